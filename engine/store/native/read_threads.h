// A pool of threads that wait for a disk, so that many reads are in flight even on a few cores.
//
// The caller and some threads run numbered tasks until all are done. Several callers may run at a time. The number of
// threads adapts to the wait and work times of recent tasks, up to a limit. cores * (1 + wait / work) threads keep all
// cores busy while other threads wait (Goetz et al., "Java Concurrency in Practice", section 8.2). If all rows are
// in memory, one thread per core is enough. A forked child has none of the threads: callers in the child run all tasks
// themselves, and the child must not destroy this object.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include <sys/types.h>

namespace tierbed {

class ReadThreadPool {
public:
    // max_threads: maximum threads of one call, including the caller.
    explicit ReadThreadPool(std::size_t max_threads);
    ~ReadThreadPool();  // no call of `run` may be in progress
    ReadThreadPool(const ReadThreadPool&) = delete;

    // Tasks must not write the same memory. If a task throws, skips tasks that have not begun, and rethrows the error.
    void run(std::size_t num_tasks, const std::function<void(std::size_t)>& task);

    // How many threads the next call will use.
    std::size_t thread_target() const { return thread_target_; }

private:
    struct Call {
        const std::function<void(std::size_t)>& task;
        const std::size_t num_tasks;
        std::size_t num_missing_helpers;  // how many more threads may join
        std::size_t num_helpers = 0;      // threads at work, without the caller
        std::atomic<std::size_t> next_task{0};
        std::atomic<std::uint64_t> wait_ns{0}, work_ns{0};
        std::exception_ptr error;
    };

    void run_thread();
    void run_tasks(Call& call);
    void wake_threads(std::size_t num_threads);
    void adapt_thread_target(const Call& call);

    const std::size_t num_cores_, max_threads_;
    const pid_t process_id_;
    std::atomic<std::size_t> thread_target_;
    std::mutex mutex_;
    std::condition_variable call_ready_, call_done_;
    std::deque<Call*> calls_;  // calls that threads may still join
    std::vector<std::thread> threads_;
    std::size_t num_idle_ = 0;
    bool is_stopping_ = false;
};

}  // namespace tierbed
