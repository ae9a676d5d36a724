#include "write_behind.h"

#include "ops/native/thread_pool.h"
#include "store/native/rows.h"

namespace tierbed {
namespace {

constexpr std::size_t ROWS_AT_ONCE = 1 << 14;

// While it lives, the lock is free and `flag` says so.
class Unlocked {
public:
    Unlocked(std::unique_lock<std::mutex>& lock, bool& flag) : lock_(lock), flag_(flag) {
        flag_ = true;
        lock_.unlock();
    }
    ~Unlocked() {
        lock_.lock();
        flag_ = false;
    }
    Unlocked(const Unlocked&) = delete;

private:
    std::unique_lock<std::mutex>& lock_;
    bool& flag_;
};

}  // namespace

WriteBehind::WriteBehind(Overflow& overflow, std::mutex& directory, Tier& below, const std::atomic<u32>& done,
                         Histogram& latency, std::size_t threads)
    : overflow_(overflow), directory_(directory), below_(below), done_(done), latency_(latency) {
    thread_ = std::thread([this, threads] { run(threads); });
}

void WriteBehind::run(std::size_t threads) {
    std::exception_ptr error;  // beforehand, that of having no pool
    try {
        use_own_pool(threads);
    } catch (...) {
        error = std::current_exception();
    }
    std::unique_lock lock(directory_);
    error_ = error;
    for (;;) {
        work_.wait(lock, [&] { return stopping_ || (awake_ && !error_); });
        if (stopping_) return;
        try {
            write_some(lock);
        } catch (...) {
            error_ = std::current_exception();
        }
        changed_.notify_all();
    }
}

void WriteBehind::write_some(std::unique_lock<std::mutex>& lock) {
    const std::vector<u32> places = overflow_.take(done_.load(std::memory_order_acquire), ROWS_AT_ONCE, room_);
    if (places.empty()) {
        awake_ = false;
        return;
    }
    std::vector<u32> updates;
    const auto end = [&](bool written) {
        overflow_.wrote(places, written ? &updates : nullptr, done_.load(std::memory_order_acquire));
    };
    try {
        RowList leaving;
        for (const u32 place : places) {
            leaving.add(overflow_.at(place).way.table, overflow_.at(place).way.hash, overflow_.line(place));
            updates.push_back(overflow_.updates(place));
        }
        const Unlocked unlocked(lock, writing_);
        const Timer timer(latency_);
        below_.write(leaving.rows());
    } catch (...) {
        end(false);
        throw;
    }
    rows += places.size();
    end(true);
}

void WriteBehind::wake(const Overflow::Limits& room) {
    room_ = room;
    awake_ = true;
    work_.notify_one();
}

void WriteBehind::wait(std::unique_lock<std::mutex>& directory, const Overflow::Limits& room,
                       const std::function<bool()>& enough) {
    wake(room);
    changed_.wait(directory, [&] { return enough() || error_ || !awake_ || stopping_; });
}

void WriteBehind::wait_for_write(std::unique_lock<std::mutex>& directory) {
    awake_ = false;
    changed_.wait(directory, [&] { return !writing_; });
}

void WriteBehind::raise() {
    if (!error_) return;
    const std::exception_ptr error = error_;
    error_ = nullptr;
    wake(room_);
    std::rethrow_exception(error);
}

void WriteBehind::forget() {
    error_ = nullptr;
    wake(room_);
}

void WriteBehind::stop() {
    {
        const std::lock_guard lock(directory_);
        stopping_ = true;
    }
    work_.notify_one();
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
}

}  // namespace tierbed
