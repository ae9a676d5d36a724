#include "write_behind.h"

#include "pool.h"

namespace tierbed {
namespace {

constexpr std::size_t ROWS_AT_ONCE = 1 << 14;

}  // namespace

WriteBehind::WriteBehind(Overflow& overflow, std::mutex& directory, Tier& below, const std::atomic<u32>& done,
                         Histogram& latency, std::size_t threads)
    : overflow_(overflow), directory_(directory), below_(below), done_(done), latency_(latency) {
    thread_ = std::thread([this, threads] { run(threads); });
}

void WriteBehind::run(std::size_t threads) {
    use_own_pool(threads);
    std::vector<u32> tables, updates;
    std::vector<u64> hashes, lines;
    std::unique_lock lock(directory_);
    for (;;) {
        work_.wait(lock, [&] { return stopping_ || (awake_ && !error_); });
        if (stopping_) return;
        const std::vector<u32> places = overflow_.take(done_.load(std::memory_order_acquire), ROWS_AT_ONCE);
        if (places.empty()) {
            awake_ = false;
            changed_.notify_all();
            continue;
        }
        tables.clear(), hashes.clear(), lines.clear(), updates.clear();
        for (const u32 place : places) {
            tables.push_back(overflow_.at(place).way.table);
            hashes.push_back(overflow_.at(place).way.hash);
            lines.push_back(overflow_.line(place));
            updates.push_back(overflow_.updates(place));
        }
        writing_ = true;
        lock.unlock();
        std::exception_ptr error;
        try {
            const Timer timer(latency_);
            below_.write({tables.data(), hashes.data(), lines.data(), lines.size()});
        } catch (...) {
            error = std::current_exception();
        }
        lock.lock();
        writing_ = false;
        error_ = error;
        if (!error) rows += places.size();
        overflow_.wrote(places, error ? nullptr : &updates, done_.load(std::memory_order_acquire));
        changed_.notify_all();
    }
}

void WriteBehind::wake() {
    awake_ = true;
    work_.notify_one();
}

void WriteBehind::wait(std::unique_lock<std::mutex>& directory, const std::function<bool()>& enough) {
    wake();
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
    wake();
    std::rethrow_exception(error);
}

void WriteBehind::forget() {
    error_ = nullptr;
    wake();
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
