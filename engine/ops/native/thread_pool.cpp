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

// Rounding mode and flushing of denormals are settings of a thread; rows must not depend on the thread.
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

// Numbered tasks that threads take until none is left. Each thread has a share of neighbouring tasks, the same in every
// loop, whose memory its core may have in its cache from the loop before; then it takes tasks of other shares.
class Tasks {
public:
    Tasks(std::size_t count, std::size_t threads, const std::function<void(std::size_t)>& task)
        : shares_(threads), task_(task) {
        for (std::size_t i = 0; i < threads; ++i) {
            shares_[i].next = count * i / threads;
            shares_[i].end = count * (i + 1) / threads;
        }
    }

    // thread: its number, from 0.
    void take(std::size_t thread) {
        for (std::size_t k = 0; k < shares_.size(); ++k) take_of(shares_[(thread + k) % shares_.size()]);
    }

    void rethrow() const {
        if (failure_) std::rethrow_exception(failure_);
    }

private:
    struct alignas(64) Share {
        std::atomic<std::size_t> next;
        std::size_t end;
    };

    void take_of(Share& share) {
        for (std::size_t i; (i = share.next.fetch_add(1)) < share.end;) {
            try {
                task_(i);
            } catch (...) {
                const std::lock_guard lock(mutex_);
                if (!failure_) failure_ = std::current_exception();
                for (Share& other : shares_) other.next = other.end;
            }
        }
    }

    std::vector<Share> shares_;
    const std::function<void(std::size_t)>& task_;
    std::mutex mutex_;
    std::exception_ptr failure_;
};

class Pool {
public:
    // Starts fewer workers if the system has no more threads, or no memory for them.
    explicit Pool(std::size_t workers) : wanted_(workers) {
        threads_.reserve(workers);
        try {
            while (threads_.size() < workers) threads_.emplace_back([this, n = threads_.size() + 1] { work(n); });
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

    void run(Tasks& tasks) {
        bool asleep;
        {
            std::lock_guard lock(mutex_);
            tasks_ = &tasks;
            busy_ = threads_.size();
            ++round_;
            asleep = sleeping_ > 0;
        }
        if (asleep) wake_.notify_all();
        tasks.take(0);
        spin([this] { return busy_ == 0; });
        std::unique_lock lock(mutex_);
        done_.wait(lock, [this] { return busy_ == 0; });
    }

private:
    void work(std::size_t number) {
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
            Tasks* const tasks = tasks_;
            lock.unlock();
            tasks->take(number);
            lock.lock();
            if (--busy_ == 0) done_.notify_one();
        }
    }

    // The next loop of a step follows at once, so a moment of spinning saves two context switches.
    template <class Condition>
    static void spin(const Condition& condition) {
        const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(50);
        while (!condition() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    }

    const std::size_t wanted_;
    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    Tasks* tasks_ = nullptr;
    std::size_t sleeping_ = 0;
    std::atomic<std::size_t> busy_{0}, round_{0};
    std::atomic<bool> stopping_{false};
};

std::atomic<std::size_t> wanted_threads{1};
thread_local bool makes_steps = false;
thread_local std::unique_ptr<Pool> own_pool;

// OpenMP's entry: calls run(data) on each of that many threads, the caller included.
using RunParallel = void (*)(void (*run)(void*), void* data, unsigned threads, unsigned flags);

// Whether this process began by exec. One that was forked takes libgomp's threads from its parent's memory, where they
// do not exist, and a parallel region would wait for them forever. Linux shows it by PF_FORKNOEXEC in the ninth field
// of /proc/self/stat; if the system has no flags, as in a sandbox, false is safe.
bool began_by_exec() {
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

// The pool of steps' loops, and whether they may use torch's OpenMP threads. A forked child has none of these threads:
// it abandons the parent's pool and mutex, and never touches them.
struct Process {
    bool has_openmp_threads = false;
    std::mutex turn{};
    std::unique_ptr<Pool> pool{};
};

Process* process = new Process{began_by_exec()};
[[maybe_unused]] const int on_fork = pthread_atfork(nullptr, nullptr, [] { process = new Process; });

// Torch's OpenMP if its threads spin after their work, since other threads would wait for their cores. Null if they
// sleep, for threads that run no steps, and in a forked child, which has none of torch's threads.
RunParallel torch_threads() {
#ifdef __SANITIZE_THREAD__
    return nullptr;  // ThreadSanitizer does not see how OpenMP synchronises its threads
#else
    static const RunParallel entry = [] {
        const char* policy = std::getenv("OMP_WAIT_POLICY");
        const bool sleep = policy && (*policy == 'p' || *policy == 'P');
        return sleep ? nullptr : reinterpret_cast<RunParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    }();
    return makes_steps && process->has_openmp_threads ? entry : nullptr;
#endif
}

void run_on(RunParallel parallel, std::size_t threads, Tasks& tasks) {
    const auto run = [](void* given) {
        const DefaultArithmetic arithmetic;
        static const auto number = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_get_thread_num"));
        static_cast<Tasks*>(given)->take(number ? static_cast<std::size_t>(number()) : 0);
    };
    parallel(run, &tasks, static_cast<unsigned>(threads), 0);
}

}  // namespace

void use_own_pool(std::size_t threads) { own_pool = std::make_unique<Pool>(std::max<std::size_t>(threads, 1) - 1); }

void set_threads(std::size_t threads) {
    if (own_pool) return;  // the number is for threads of steps
    makes_steps = true;
    wanted_threads = std::max<std::size_t>(threads, 1);
}

void parallel_for(std::size_t tasks, const std::function<void(std::size_t)>& task) {
    const DefaultArithmetic arithmetic;
    if (own_pool && tasks > 1) {
        Tasks all(tasks, own_pool->wanted() + 1, task);
        own_pool->run(all);
        return all.rethrow();
    }
    const std::size_t workers = wanted_threads - 1;
    if (workers > 0 && tasks > 1) {
        Tasks all(tasks, workers + 1, task);
        std::unique_lock turn(process->turn, std::try_to_lock);
        if (turn.owns_lock()) {
            if (const RunParallel parallel = torch_threads()) {
                run_on(parallel, workers + 1, all);
                return all.rethrow();
            }
            std::unique_ptr<Pool>& pool = process->pool;
            if (pool && pool->wanted() != workers) pool.reset();
            if (!pool) pool = std::make_unique<Pool>(workers);
            pool->run(all);
            return all.rethrow();
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
