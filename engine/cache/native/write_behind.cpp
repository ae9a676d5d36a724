#include "write_behind.h"

#include <memory>

#include "ops/native/thread_pool.h"

namespace tierbed {
namespace {

constexpr std::size_t MAX_ROWS_PER_WRITE = 1 << 14;

}  // namespace

WriteBehind::WriteBehind(Overflow& overflow, std::mutex& mutex, Tier& lower_tier,
                         const std::atomic<u32>& last_completed, Histogram& latency, std::size_t threads)
    : overflow_(overflow), mutex_(mutex), lower_tier_(lower_tier), last_completed_(last_completed), latency_(latency) {
    thread_ = std::thread([this, threads] { run(threads); });
}

void WriteBehind::run(std::size_t threads) {
    std::exception_ptr error;
    try {
        use_own_pool(threads);
    } catch (...) {
        error = std::current_exception();
    }
    std::unique_lock lock(mutex_);
    error_ = error;
    for (;;) {
        work_ready_.wait(lock, [&] { return is_stopping_ || (is_awake_ && !error_); });
        if (is_stopping_) return;
        try {
            const auto write = [&](const RowSpan& dirty) {
                is_writing_ = true;
                lock.unlock();
                const std::shared_ptr<void> relock(nullptr, [&](void*) {  // runs even if the write throws
                    lock.lock();
                    is_writing_ = false;
                });
                const Timer timer(latency_);
                lower_tier_.write(dirty);
            };
            const std::size_t written = overflow_.write_back(last_completed_, MAX_ROWS_PER_WRITE, limits_, write);
            is_awake_ = is_awake_ && written > 0;
            num_written += written;
        } catch (...) {
            error_ = std::current_exception();
        }
        write_finished_.notify_all();
    }
}

void WriteBehind::wake(const Overflow::Limits& limits) {
    limits_ = limits;
    is_awake_ = true;
    work_ready_.notify_one();
}

void WriteBehind::wait_until(std::unique_lock<std::mutex>& lock, const Overflow::Limits& limits,
                             const std::function<bool()>& is_satisfied) {
    wake(limits);
    write_finished_.wait(lock, [&] { return is_satisfied() || error_ || !is_awake_ || is_stopping_; });
}

void WriteBehind::wait_for_write(std::unique_lock<std::mutex>& lock) {
    is_awake_ = false;
    write_finished_.wait(lock, [&] { return !is_writing_; });
}

void WriteBehind::rethrow_error() {
    if (!error_) return;
    const std::exception_ptr error = error_;
    error_ = nullptr;
    wake(limits_);
    std::rethrow_exception(error);
}

void WriteBehind::drop_error() {
    error_ = nullptr;
    wake(limits_);
}

void WriteBehind::stop() {
    {
        const std::lock_guard lock(mutex_);
        is_stopping_ = true;
    }
    work_ready_.notify_one();
    write_finished_.notify_all();
    if (thread_.joinable()) thread_.join();
}

}  // namespace tierbed
