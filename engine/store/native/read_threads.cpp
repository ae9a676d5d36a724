#include "read_threads.h"

#include <algorithm>
#include <ctime>

#include <sys/resource.h>
#include <unistd.h>

namespace tierbed {
namespace {

std::uint64_t now(clockid_t clock) {
    timespec time;
    clock_gettime(clock, &time);
    return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(time.tv_nsec);
}

// Returns how many blocks this thread has read from disk. Only tasks that read blocks count as waiting for the disk;
// other tasks may have waited for a core.
long blocks_read() {
    rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_inblock;
}

}  // namespace

ReadThreads::ReadThreads(std::size_t limit)
    : cores_(std::max(1u, std::thread::hardware_concurrency())),
      limit_(limit),
      process_(getpid()),
      thread_target_(std::min(cores_, limit)) {}

ReadThreads::~ReadThreads() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    called_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void ReadThreads::run(std::size_t tasks, const std::function<void(std::size_t)>& task) {
    Call call{task, tasks, std::min<std::size_t>(thread_target_, std::max<std::size_t>(tasks, 1)) - 1};
    if (call.joins_left == 0 || process_ != getpid()) {
        run_tasks(call);
    } else {
        {
            const std::lock_guard lock(mutex_);
            calls_.push_back(&call);
            wake(call.joins_left);
        }
        run_tasks(call);
        std::unique_lock lock(mutex_);
        if (call.joins_left) calls_.erase(std::find(calls_.begin(), calls_.end(), &call));
        finished_.wait(lock, [&] { return call.present == 0; });
    }
    if (call.failure) std::rethrow_exception(call.failure);
    adapt(call);
}

// Call with the lock held. Starts fewer threads if the system cannot start more.
void ReadThreads::wake(std::size_t threads) {
    for (std::size_t asleep = idle_; asleep < threads; ++asleep) {
        if (threads_.size() + 1 >= limit_) break;
        try {
            threads_.emplace_back([this] { loop(); });
        } catch (const std::exception&) {
            break;
        }
    }
    for (std::size_t i = 0; i < threads; ++i) called_.notify_one();
}

void ReadThreads::loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
        ++idle_;
        called_.wait(lock, [&] { return stopping_ || !calls_.empty(); });
        --idle_;
        if (stopping_) return;
        Call& call = *calls_.front();
        if (--call.joins_left == 0) calls_.pop_front();
        ++call.present;
        lock.unlock();
        run_tasks(call);
        lock.lock();
        if (--call.present == 0) finished_.notify_all();
    }
}

void ReadThreads::run_tasks(Call& call) {
    std::uint64_t wait = 0, work = 0;
    for (std::size_t i; (i = call.next.fetch_add(1)) < call.tasks;) {
        const std::uint64_t began = now(CLOCK_MONOTONIC), cpu_began = now(CLOCK_THREAD_CPUTIME_ID);
        const long blocks_before = blocks_read();
        try {
            call.task(i);
        } catch (...) {
            const std::lock_guard lock(mutex_);
            if (!call.failure) call.failure = std::current_exception();
            call.next = call.tasks;
        }
        const std::uint64_t busy = now(CLOCK_THREAD_CPUTIME_ID) - cpu_began;
        work += busy;
        if (blocks_read() != blocks_before) wait += std::max(now(CLOCK_MONOTONIC) - began, busy) - busy;
    }
    call.wait_ns += wait;
    call.work_ns += work;
}

void ReadThreads::adapt(const Call& call) {
    if (call.tasks < cores_) return;  // too few tasks to measure
    const double ratio = static_cast<double>(call.wait_ns) / static_cast<double>(std::max<std::uint64_t>(call.work_ns, 1));
    const double target = static_cast<double>(cores_) * (1 + std::min(ratio, static_cast<double>(limit_)));
    thread_target_ = std::clamp<std::size_t>((thread_target_ + static_cast<std::size_t>(target) + 1) / 2, 1, limit_);
}

}  // namespace tierbed
