// Threads that wait for a disk, so that many reads are in flight, whatever the number of cores.
//
// The caller and some of the threads take numbered tasks until none is left. There may be several callers. The number
// of threads follows from the last tasks: as many as keep all cores busy while the others wait (cores * (1 + wait /
// work), Goetz et al., "Java Concurrency in Practice", section 8.2), up to a limit. For rows in memory, which need no
// waiting, it is one for each core. In a forked child, which has none of the threads, callers do all tasks; it must not
// destroy this object.
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

class ReadThreads {
public:
    // limit: threads of one call, at most, its caller included.
    explicit ReadThreads(std::size_t limit);
    ~ReadThreads();  // no call may run
    ReadThreads(const ReadThreads&) = delete;

    // No two tasks may write the same memory. The first exception of a task is rethrown, and tasks that have not begun
    // are skipped.
    void run(std::size_t tasks, const std::function<void(std::size_t)>& task);

    // The number of threads of the next call.
    std::size_t wanted() const { return wanted_; }

private:
    struct Call {
        const std::function<void(std::size_t)>& task;
        const std::size_t tasks;
        std::size_t places;       // threads that may still join
        std::size_t present = 0;  // threads at work, without the caller
        std::atomic<std::size_t> next{0};
        std::atomic<std::uint64_t> wait_ns{0}, work_ns{0};
        std::exception_ptr failure;
    };

    void work();
    void take(Call& call);
    void ask_for(std::size_t threads);
    void learn(const Call& call);

    const std::size_t cores_, limit_;
    const pid_t process_;
    std::atomic<std::size_t> wanted_;
    std::mutex mutex_;
    std::condition_variable called_, left_;
    std::deque<Call*> calls_;  // with free places
    std::vector<std::thread> threads_;
    std::size_t idle_ = 0;
    bool stopping_ = false;
};

}  // namespace tierbed
