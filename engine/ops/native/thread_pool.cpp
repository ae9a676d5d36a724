#include "thread_pool.h"

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <dlfcn.h>
#include <pthread.h>

namespace tierbed {
namespace {

// Resets the thread's rounding mode and denormal flushing, because rows must not depend on the thread.
class DefaultArithmetic {
public:
    DefaultArithmetic() {
        std::fegetenv(&saved_environment_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultArithmetic() { std::fesetenv(&saved_environment_); }

private:
    std::fenv_t saved_environment_;
};

// Distributes numbered tasks to threads. Each thread starts with the same range of tasks in every loop, because the
// core's cache may still have these tasks' memory. Then the thread takes tasks from other threads' ranges.
class TaskQueue {
public:
    TaskQueue(std::size_t count, std::size_t threads, const std::function<void(std::size_t)>& task)
        : ranges_(threads), task_(task) {
        for (std::size_t i = 0; i < threads; ++i) {
            ranges_[i].next = count * i / threads;
            ranges_[i].end = count * (i + 1) / threads;
        }
    }

    // Runs tasks until none is left. thread: the calling thread's number, from 0.
    void run(std::size_t thread) {
        for (std::size_t k = 0; k < ranges_.size(); ++k) run_range(ranges_[(thread + k) % ranges_.size()]);
    }

    void rethrow() const {
        if (error_) std::rethrow_exception(error_);
    }

private:
    struct alignas(64) Range {
        std::atomic<std::size_t> next;
        std::size_t end;
    };

    void run_range(Range& range) {
        for (std::size_t i; (i = range.next.fetch_add(1)) < range.end;) {
            try {
                task_(i);
            } catch (...) {
                const std::lock_guard lock(mutex_);
                if (!error_) error_ = std::current_exception();
                for (Range& other : ranges_) other.next = other.end;
            }
        }
    }

    std::vector<Range> ranges_;
    const std::function<void(std::size_t)>& task_;
    std::mutex mutex_;
    std::exception_ptr error_;
};

class Pool {
public:
    // Starts fewer workers if the system lacks threads or memory.
    explicit Pool(std::size_t workers) : num_requested_(workers) {
        threads_.reserve(workers);
        try {
            while (threads_.size() < workers) threads_.emplace_back([this, n = threads_.size() + 1] { work(n); });
        } catch (const std::exception&) {
        }
    }

    ~Pool() {
        {
            std::lock_guard lock(mutex_);
            is_stopping_ = true;
        }
        round_started_.notify_all();
        for (auto& thread : threads_) thread.join();
    }

    std::size_t num_requested() const { return num_requested_; }

    void run(TaskQueue& tasks) {
        bool has_sleeping;
        {
            std::lock_guard lock(mutex_);
            tasks_ = &tasks;
            num_busy_ = threads_.size();
            ++round_;
            has_sleeping = num_sleeping_ > 0;
        }
        if (has_sleeping) round_started_.notify_all();
        tasks.run(0);
        spin([this] { return num_busy_ == 0; });
        std::unique_lock lock(mutex_);
        round_done_.wait(lock, [this] { return num_busy_ == 0; });
    }

private:
    void work(std::size_t number) {
        std::fesetenv(FE_DFL_ENV);
        std::size_t last_round = 0;
        for (;;) {
            spin([&] { return is_stopping_ || round_ != last_round; });
            std::unique_lock lock(mutex_);
            ++num_sleeping_;
            round_started_.wait(lock, [&] { return is_stopping_ || round_ != last_round; });
            --num_sleeping_;
            if (is_stopping_) return;
            last_round = round_;
            TaskQueue* const tasks = tasks_;
            lock.unlock();
            tasks->run(number);
            lock.lock();
            if (--num_busy_ == 0) round_done_.notify_one();
        }
    }

    // A step's next loop follows within microseconds, so spinning briefly saves two context switches.
    template <class Condition>
    static void spin(const Condition& condition) {
        const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(50);
        while (!condition() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    }

    const std::size_t num_requested_;
    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable round_started_, round_done_;
    TaskQueue* tasks_ = nullptr;
    std::size_t num_sleeping_ = 0;
    std::atomic<std::size_t> num_busy_{0}, round_{0};
    std::atomic<bool> is_stopping_{false};
};

std::atomic<std::size_t> num_step_threads{1};
thread_local bool is_step_thread = false;
thread_local std::unique_ptr<Pool> own_pool;

// OpenMP's entry point GOMP_parallel: calls run(data) on `threads` threads, including the caller.
using RunParallel = void (*)(void (*run)(void*), void* data, unsigned threads, unsigned flags);

// True if this process was started by exec. In a process that was only forked, libgomp still refers to threads of the
// parent, and a parallel region would wait for these threads forever. Linux marks such a process by the flag
// PF_FORKNOEXEC in the ninth field of /proc/self/stat. Some sandboxes show no flags; then false is the safe answer.
bool was_started_by_exec() {
    constexpr unsigned long FORKED = 0x40;
    std::ifstream file("/proc/self/stat");
    std::string stat, skipped;
    std::getline(file, stat);
    const std::size_t name_end = stat.rfind(')');  // the name may contain blanks
    if (name_end == std::string::npos) return false;
    std::istringstream fields(stat.substr(name_end + 1));
    for (int field = 3; field < 9; ++field) fields >> skipped;
    unsigned long flags = 0;
    return fields >> flags && flags != 0 && !(flags & FORKED);
}

// The thread pool that runs the loops of steps. A forked child lacks the parent's threads, so the child leaks the
// parent's ProcessPool (pool and mutex) and starts with a new ProcessPool.
struct ProcessPool {
    bool may_use_openmp = false;  // true if torch's OpenMP threads may run tasks
    std::mutex mutex{};
    std::unique_ptr<Pool> pool{};
};

ProcessPool* process_pool = new ProcessPool{was_started_by_exec()};
[[maybe_unused]] const int fork_handler = pthread_atfork(nullptr, nullptr, [] { process_pool = new ProcessPool; });

// Returns torch's OpenMP if its threads spin after their work. Spinning threads would keep other workers off the cores.
// Returns null if OpenMP's threads sleep, if the calling thread runs no steps, or if this process is a forked child.
RunParallel find_openmp() {
#ifdef __SANITIZE_THREAD__
    return nullptr;  // ThreadSanitizer does not see how OpenMP synchronises its threads
#else
    static const RunParallel gomp_parallel = [] {
        const char* policy = std::getenv("OMP_WAIT_POLICY");
        const bool is_passive = policy && (*policy == 'p' || *policy == 'P');
        return is_passive ? nullptr : reinterpret_cast<RunParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    }();
    return is_step_thread && process_pool->may_use_openmp ? gomp_parallel : nullptr;
#endif
}

void run_on_openmp(RunParallel run_parallel, std::size_t threads, TaskQueue& tasks) {
    const auto run = [](void* data) {
        const DefaultArithmetic arithmetic;
        static const auto number = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_get_thread_num"));
        static_cast<TaskQueue*>(data)->run(number ? static_cast<std::size_t>(number()) : 0);
    };
    run_parallel(run, &tasks, static_cast<unsigned>(threads), 0);
}

}  // namespace

void use_own_pool(std::size_t num_threads) {
    own_pool = std::make_unique<Pool>(std::max<std::size_t>(num_threads, 1) - 1);
}

void set_num_threads(std::size_t num_threads) {
    if (own_pool) return;  // this thread does not run steps
    is_step_thread = true;
    num_step_threads = std::max<std::size_t>(num_threads, 1);
}

void parallel_for(std::size_t num_tasks, const std::function<void(std::size_t)>& task) {
    const DefaultArithmetic arithmetic;
    if (own_pool && num_tasks > 1) {
        TaskQueue queue(num_tasks, own_pool->num_requested() + 1, task);
        own_pool->run(queue);
        return queue.rethrow();
    }
    const std::size_t workers = num_step_threads - 1;
    if (workers > 0 && num_tasks > 1) {
        TaskQueue queue(num_tasks, workers + 1, task);
        std::unique_lock lock(process_pool->mutex, std::try_to_lock);
        if (lock.owns_lock()) {
            if (const RunParallel run_parallel = find_openmp()) {
                run_on_openmp(run_parallel, workers + 1, queue);
                return queue.rethrow();
            }
            std::unique_ptr<Pool>& pool = process_pool->pool;
            if (pool && pool->num_requested() != workers) pool.reset();
            if (!pool) pool = std::make_unique<Pool>(workers);
            pool->run(queue);
            return queue.rethrow();
        }
    }
    for (std::size_t i = 0; i < num_tasks; ++i) task(i);
}

void parallel_for(std::size_t num_tasks, std::size_t num_items, const std::function<void(std::size_t)>& task) {
    constexpr std::size_t MAX_SERIAL_ITEMS = 2048;
    if (num_items > MAX_SERIAL_ITEMS) return parallel_for(num_tasks, task);
    const DefaultArithmetic arithmetic;
    for (std::size_t i = 0; i < num_tasks; ++i) task(i);
}

void parallel_ranges(std::size_t n, std::size_t grain, const std::function<void(std::size_t, std::size_t)>& body) {
    parallel_for((n + grain - 1) / grain, [&](std::size_t i) { body(i * grain, std::min(n, (i + 1) * grain)); });
}

}  // namespace tierbed
