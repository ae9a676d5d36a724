// The share of the disk that compactions take, so that they leave it to reads.
#pragma once
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <set>

#include <rocksdb/rate_limiter.h>

#include "ops/kernels/portable.h"

namespace rocksdb {
class DB;
class EventListener;
struct Options;
}  // namespace rocksdb

namespace tierbed {

// Bounds what the compactions of all shards together read and write a second. RocksDB moves the bound between a
// twentieth of `most` and `most` (at least 8 MiB), as they need. Flushes never wait for it. Compactions do not while it
// is lifted, as where someone waits for them, or while a shard has so many files that its writes would soon be slowed.
class CompactionBound : public rocksdb::RateLimiter {
public:
    explicit CompactionBound(i64 most);

    class Lifted {
    public:
        explicit Lifted(CompactionBound& bound) : bound_(bound) { ++bound_.lifted_; }
        ~Lifted() { --bound_.lifted_; }
        Lifted(const Lifted&) = delete;

    private:
        CompactionBound& bound_;
    };

    // How long threads waited, in all.
    double waited() const { return static_cast<double>(waited_) * 1e-6; }
    void set_behind(const rocksdb::DB* db, bool behind);

    using RateLimiter::Request;
    void Request(i64 bytes, rocksdb::Env::IOPriority priority, rocksdb::Statistics* statistics, OpType type) override;
    std::size_t RequestToken(std::size_t bytes, std::size_t alignment, rocksdb::Env::IOPriority priority,
                             rocksdb::Statistics* statistics, OpType type) override;
    void SetBytesPerSecond(i64 rate) override { limiter_->SetBytesPerSecond(rate); }
    i64 GetBytesPerSecond() const override { return limiter_->GetBytesPerSecond(); }
    i64 GetSingleBurstBytes() const override { return piece_; }
    i64 GetTotalBytesThrough(rocksdb::Env::IOPriority priority) const override { return total(bytes_, priority); }
    i64 GetTotalRequests(rocksdb::Env::IOPriority priority) const override { return total(requests_, priority); }

private:
    using Counts = std::array<std::atomic<i64>, rocksdb::Env::IO_TOTAL>;

    static i64 total(const Counts& counts, rocksdb::Env::IOPriority priority);
    void count(std::size_t bytes, rocksdb::Env::IOPriority priority);
    bool waits(rocksdb::Env::IOPriority priority) const { return priority == rocksdb::Env::IO_LOW && lifted_ == 0; }

    std::unique_ptr<rocksdb::RateLimiter> limiter_;
    i64 piece_;  // of a request: RocksDB 7.8 ends the process where one is more than the bound of that moment allows
    std::atomic<int> lifted_{0};
    std::atomic<i64> waited_{0};  // microseconds
    Counts bytes_{}, requests_{};
    std::mutex mutex_;
    std::set<const rocksdb::DB*> behind_;
};

// Tells the bound which shards are behind; `options` are those of a shard.
std::shared_ptr<rocksdb::EventListener> listener_of(std::shared_ptr<CompactionBound> bound,
                                                    const rocksdb::Options& options);

}  // namespace tierbed
