// Threads that wait for a disk, so that many reads are in flight, whatever the number of cores.
//
// The caller and some of the threads take numbered tasks until none is left; callers may be many. How many threads take
// part follows from the last tasks: as many as keep all cores busy while the others wait (cores * (1 + wait / work),
// Goetz et al., "Java Concurrency in Practice", section 8.2), up to a limit. Rows in memory wait for nothing, and take
// one thread a core. A forked child has none of the threads: its callers do all themselves, and it must not destroy this.
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
    // limit: the most that take part in one call, its caller among them.
    explicit ReadThreads(std::size_t limit);
    ~ReadThreads();  // nothing may run
    ReadThreads(const ReadThreads&) = delete;

    // A task must own what it writes. The first exception of a task is rethrown; tasks that nobody began are left out.
    void run(std::size_t tasks, const std::function<void(std::size_t)>& task);

    // How many take part in the next call.
    std::size_t wanted() const { return wanted_; }

private:
    struct Call {
        const std::function<void(std::size_t)>& task;
        const std::size_t tasks;
        std::size_t places;            // how many threads may still come
        std::size_t present = 0;       // threads at work, the caller left out
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
    std::deque<Call*> calls_;  // that have places
    std::vector<std::thread> threads_;
    std::size_t idle_ = 0;
    bool stopping_ = false;
};

}  // namespace tierbed
