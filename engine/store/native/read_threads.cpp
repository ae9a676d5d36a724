#include "read_threads.h"

#include <algorithm>
#include <ctime>

#include <sys/resource.h>
#include <unistd.h>

namespace tierbed {
namespace {

std::uint64_t read_clock(clockid_t clock) {
    timespec time;
    clock_gettime(clock, &time);
    return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(time.tv_nsec);
}

// Returns how many blocks this thread has read from disk. A task that reads no block may only have waited for a core.
long count_blocks_read() {
    rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_inblock;
}

}  // namespace

ReadThreadPool::ReadThreadPool(std::size_t max_threads)
    : num_cores_(std::max(1u, std::thread::hardware_concurrency())),
      max_threads_(max_threads),
      process_id_(getpid()),
      thread_target_(std::min(num_cores_, max_threads)) {}

ReadThreadPool::~ReadThreadPool() {
    {
        const std::lock_guard lock(mutex_);
        is_stopping_ = true;
    }
    call_ready_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void ReadThreadPool::run(std::size_t num_tasks, const std::function<void(std::size_t)>& task) {
    Call call{task, num_tasks, std::min<std::size_t>(thread_target_, std::max<std::size_t>(num_tasks, 1)) - 1};
    if (call.num_missing_helpers == 0 || process_id_ != getpid()) {
        run_tasks(call);
    } else {
        {
            const std::lock_guard lock(mutex_);
            calls_.push_back(&call);
            wake_threads(call.num_missing_helpers);
        }
        run_tasks(call);
        std::unique_lock lock(mutex_);
        if (call.num_missing_helpers) calls_.erase(std::find(calls_.begin(), calls_.end(), &call));
        call_done_.wait(lock, [&] { return call.num_helpers == 0; });
    }
    if (call.error) std::rethrow_exception(call.error);
    adapt_thread_target(call);
}

// Call with the lock held. Starts fewer threads if the system cannot start more.
void ReadThreadPool::wake_threads(std::size_t num_threads) {
    for (std::size_t num_asleep = num_idle_; num_asleep < num_threads; ++num_asleep) {
        if (threads_.size() + 1 >= max_threads_) break;
        try {
            threads_.emplace_back([this] { run_thread(); });
        } catch (const std::exception&) {
            break;
        }
    }
    for (std::size_t i = 0; i < num_threads; ++i) call_ready_.notify_one();
}

void ReadThreadPool::run_thread() {
    std::unique_lock lock(mutex_);
    for (;;) {
        ++num_idle_;
        call_ready_.wait(lock, [&] { return is_stopping_ || !calls_.empty(); });
        --num_idle_;
        if (is_stopping_) return;
        Call& call = *calls_.front();
        if (--call.num_missing_helpers == 0) calls_.pop_front();
        ++call.num_helpers;
        lock.unlock();
        run_tasks(call);
        lock.lock();
        if (--call.num_helpers == 0) call_done_.notify_all();
    }
}

void ReadThreadPool::run_tasks(Call& call) {
    std::uint64_t wait = 0, work = 0;
    for (std::size_t i; (i = call.next_task.fetch_add(1)) < call.num_tasks;) {
        const std::uint64_t start = read_clock(CLOCK_MONOTONIC), cpu_start = read_clock(CLOCK_THREAD_CPUTIME_ID);
        const long blocks_before = count_blocks_read();
        try {
            call.task(i);
        } catch (...) {
            const std::lock_guard lock(mutex_);
            if (!call.error) call.error = std::current_exception();
            call.next_task = call.num_tasks;
        }
        const std::uint64_t busy = read_clock(CLOCK_THREAD_CPUTIME_ID) - cpu_start;
        work += busy;
        if (count_blocks_read() != blocks_before) wait += std::max(read_clock(CLOCK_MONOTONIC) - start, busy) - busy;
    }
    call.wait_ns += wait;
    call.work_ns += work;
}

void ReadThreadPool::adapt_thread_target(const Call& call) {
    if (call.num_tasks < num_cores_) return;  // too few tasks to measure wait and work times
    const double ratio = static_cast<double>(call.wait_ns) / std::max(1.0, static_cast<double>(call.work_ns));
    const double target = static_cast<double>(num_cores_) * (1 + std::min(ratio, static_cast<double>(max_threads_)));
    thread_target_ =
        std::clamp<std::size_t>((thread_target_ + static_cast<std::size_t>(target) + 1) / 2, 1, max_threads_);
}

}  // namespace tierbed
