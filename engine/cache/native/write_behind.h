// Writes dirty rows of an overflow area back while steps run.
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

// A thread writes rows of completed batches (numbers up to `last_completed`), some at a time. After an error, it writes
// nothing until `rethrow_error` or `drop_error` is called. Hold `mutex`, except to call `stop`.
class WriteBehind {
public:
    WriteBehind(Overflow& overflow, std::mutex& mutex, Tier& lower_tier, const std::atomic<u32>& last_completed,
                Histogram& latency, std::size_t threads);

    // Makes the thread write rows back until the limits hold.
    void wake(const Overflow::Limits& limits);
    // Calls `wake`, then waits until `is_satisfied()` is true or no more rows can be written back now.
    void wait_until(std::unique_lock<std::mutex>& lock, const Overflow::Limits& limits,
                    const std::function<bool()>& is_satisfied);
    // Waits for the current write. No other write starts until `wake`.
    void wait_for_write(std::unique_lock<std::mutex>& lock);
    // Throws the thread's error, if there is one, and lets the thread try again.
    void rethrow_error();
    // Drops the thread's error and lets the thread try again.
    void drop_error();
    // Waits for the current write and ends the thread. Rows stay in the overflow area.
    void stop();

    u64 num_written = 0;  // rows written back

private:
    // Writes a few rows at a time, and releases the lock during each write. Sleeps if there are no rows to write.
    void run(std::size_t threads);

    Overflow& overflow_;
    std::mutex& mutex_;
    Tier& lower_tier_;
    const std::atomic<u32>& last_completed_;
    Histogram& latency_;
    std::condition_variable work_ready_, write_finished_;
    Overflow::Limits limits_{0, 0};
    bool is_awake_ = false, is_writing_ = false, is_stopping_ = false;
    std::exception_ptr error_;
    std::thread thread_;
};

}  // namespace tierbed
