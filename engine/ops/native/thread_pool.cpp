#include "thread_pool.h"

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <unistd.h>

namespace tierbed {
namespace {

class Pool {
public:
    // Fewer workers where the system gives no more threads, or no memory for them.
    explicit Pool(std::size_t workers) : wanted_(workers) {
        threads_.reserve(workers);
        try {
            while (threads_.size() < workers) threads_.emplace_back([this] { work(); });
        } catch (const std::exception&) {
        }
    }

    ~Pool() {
        {
            std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        wake_.notify_all();
        for (auto& thread : threads_) thread.join();
    }

    std::size_t wanted() const { return wanted_; }

    void run(std::size_t tasks, const std::function<void(std::size_t)>& task) {
        bool asleep;
        {
            std::lock_guard lock(mutex_);
            task_ = &task;
            tasks_ = tasks;
            next_ = 0;
            busy_ = threads_.size();
            failure_ = nullptr;
            ++round_;
            asleep = sleeping_ > 0;
        }
        if (asleep) wake_.notify_all();
        take(task, tasks);
        spin([this] { return busy_ == 0; });
        std::unique_lock lock(mutex_);
        done_.wait(lock, [this] { return busy_ == 0; });
        if (failure_) std::rethrow_exception(failure_);
    }

private:
    void take(const std::function<void(std::size_t)>& task, std::size_t tasks) {
        for (std::size_t i; (i = next_.fetch_add(1)) < tasks;) {
            try {
                task(i);
            } catch (...) {
                std::lock_guard lock(mutex_);
                if (!failure_) failure_ = std::current_exception();
                next_ = tasks;
            }
        }
    }

    void work() {
        std::fesetenv(FE_DFL_ENV);
        std::size_t seen = 0;
        for (;;) {
            spin([&] { return stopping_ || round_ != seen; });
            std::unique_lock lock(mutex_);
            ++sleeping_;
            wake_.wait(lock, [&] { return stopping_ || round_ != seen; });
            --sleeping_;
            if (stopping_) return;
            seen = round_;
            const auto* task = task_;
            const std::size_t tasks = tasks_;
            lock.unlock();
            take(*task, tasks);
            lock.lock();
            if (--busy_ == 0) done_.notify_one();
        }
    }

    // The loops of a step follow one another at once, so a moment of waiting saves two switches of the system.
    template <class Condition>
    static void spin(const Condition& condition) {
        const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(50);
        while (!condition() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    }

    const std::size_t wanted_;
    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    const std::function<void(std::size_t)>* task_ = nullptr;
    std::size_t tasks_ = 0, sleeping_ = 0;
    std::atomic<std::size_t> next_{0}, busy_{0}, round_{0};
    std::exception_ptr failure_;
    std::atomic<bool> stopping_{false};
};

std::atomic<std::size_t> wanted_threads{1};
thread_local std::unique_ptr<Pool> own_pool;

// The pool of this process. After a fork the parent's threads do not exist: its pool and mutex are abandoned, never
// touched.
struct Process {
    pid_t pid = getpid();
    std::mutex turn;
    Pool* pool = nullptr;
};

Process& process() {
    static std::atomic<Process*> current{new Process};
    Process* mine = current.load();
    if (mine->pid != getpid()) {
        auto* fresh = new Process;
        if (current.compare_exchange_strong(mine, fresh))
            mine = fresh;
        else
            delete fresh;
    }
    return *mine;
}

}  // namespace

void use_own_pool(std::size_t threads) { own_pool = std::make_unique<Pool>(std::max<std::size_t>(threads, 1) - 1); }

void set_threads(std::size_t threads) {
    if (own_pool) return;  // of steps, whose number this thread does not know
    wanted_threads = std::max<std::size_t>(threads, 1);
}

// Rounding and the flushing of denormals belong to a thread; rows must not depend on whose they are.
class DefaultArithmetic {
public:
    DefaultArithmetic() {
        std::fegetenv(&before_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultArithmetic() { std::fesetenv(&before_); }

private:
    std::fenv_t before_;
};

void parallel_for(std::size_t tasks, const std::function<void(std::size_t)>& task) {
    const DefaultArithmetic arithmetic;
    if (own_pool && tasks > 1) {
        own_pool->run(tasks, task);
        return;
    }
    const std::size_t workers = wanted_threads - 1;
    if (workers > 0 && tasks > 1) {
        Process& here = process();
        std::unique_lock turn(here.turn, std::try_to_lock);
        if (turn.owns_lock()) {
            if (here.pool && here.pool->wanted() != workers) {
                delete here.pool;
                here.pool = nullptr;
            }
            if (!here.pool) here.pool = new Pool(workers);
            here.pool->run(tasks, task);
            return;
        }
    }
    for (std::size_t i = 0; i < tasks; ++i) task(i);
}

void parallel_for(std::size_t tasks, std::size_t items, const std::function<void(std::size_t)>& task) {
    constexpr std::size_t FEW = 2048;
    if (items > FEW) return parallel_for(tasks, task);
    const DefaultArithmetic arithmetic;
    for (std::size_t i = 0; i < tasks; ++i) task(i);
}

void parallel_ranges(std::size_t n, std::size_t grain, const std::function<void(std::size_t, std::size_t)>& body) {
    parallel_for((n + grain - 1) / grain, [&](std::size_t i) { body(i * grain, std::min(n, (i + 1) * grain)); });
}

}  // namespace tierbed
