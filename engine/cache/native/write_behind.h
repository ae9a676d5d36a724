// Brings dirty rows of an overflow down in a thread of its own.
#pragma once
#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include "ops/native/histogram.h"
#include "overflow.h"
#include "store/native/tier.h"

namespace tierbed {

// `directory` guards the overflow; every call but `stop` is made by a thread that holds it. Rows whose batches are over
// (numbers up to `done`) go down, a bounded number at a time. After an error nothing goes down until `raise` or `forget`.
class WriteBehind {
public:
    WriteBehind(Overflow& overflow, std::mutex& directory, Tier& below, const std::atomic<u32>& done,
                Histogram& latency, std::size_t threads);

    // Lets the thread bring rows down until what has room is left. Rows that stay come back without a read.
    void wake(const Overflow::Limits& room);
    // The same, and waits until `enough`, or until nothing is left that could go down now.
    void wait(std::unique_lock<std::mutex>& directory, const Overflow::Limits& room,
              const std::function<bool()>& enough);
    // Waits for the write that is under way; no other begins until `wake`.
    void wait_for_write(std::unique_lock<std::mutex>& directory);
    // Throws the error since the last call, if there is one, and lets the thread try again.
    void raise();
    // Drops the error, and lets the thread try again.
    void forget();
    // Waits for the write that is under way and ends the thread; what is in the overflow stays there.
    void stop();

    u64 rows = 0;  // how many went down

private:
    void run(std::size_t threads);
    // Brings some rows down, with the lock free meanwhile. With no rows to bring down, the thread goes to sleep.
    void write_some(std::unique_lock<std::mutex>& directory);

    Overflow& overflow_;
    std::mutex& directory_;
    Tier& below_;
    const std::atomic<u32>& done_;
    Histogram& latency_;
    std::condition_variable work_, changed_;
    Overflow::Limits room_{0, 0};
    bool awake_ = false, writing_ = false, stopping_ = false;
    std::exception_ptr error_;
    std::thread thread_;
};

}  // namespace tierbed
