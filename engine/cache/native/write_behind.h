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

// One thread writes rows of completed batches (numbers up to `last_completed`), a bounded number at a time. After an
// error it writes nothing until `raise` or `forget`. The mutex `directory` guards the overflow area; the caller of
// every method except `stop` holds it.
class WriteBehind {
public:
    WriteBehind(Overflow& overflow, std::mutex& directory, Tier& below, const std::atomic<u32>& last_completed,
                Histogram& latency, std::size_t threads);

    // Starts the thread, which writes rows back until the limits hold.
    void wake(const Overflow::Limits& limits);
    // The same, and waits until `enough`, or until no row can be written back now.
    void wait(std::unique_lock<std::mutex>& directory, const Overflow::Limits& limits,
              const std::function<bool()>& enough);
    // Waits for the current write; no other starts until `wake`.
    void wait_for_write(std::unique_lock<std::mutex>& directory);
    // Throws the error of the thread, if there is one, and lets the thread try again.
    void raise();
    // Drops the error, and lets the thread try again.
    void forget();
    // Waits for the current write and ends the thread; the overflow area keeps its rows.
    void stop();

    u64 rows = 0;  // written back

private:
    // Writes some rows at a time, without the lock during the write, and sleeps if there are none.
    void run(std::size_t threads);

    Overflow& overflow_;
    std::mutex& directory_;
    Tier& below_;
    const std::atomic<u32>& last_completed_;
    Histogram& latency_;
    std::condition_variable work_, changed_;
    Overflow::Limits limits_{0, 0};
    bool awake_ = false, writing_ = false, stopping_ = false;
    std::exception_ptr error_;
    std::thread thread_;
};

}  // namespace tierbed
