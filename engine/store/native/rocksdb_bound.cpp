#include "rocksdb_bound.h"

#include <algorithm>
#include <chrono>
#include <string>

#include <rocksdb/db.h>
#include <rocksdb/listener.h>
#include <rocksdb/options.h>

namespace tierbed {
namespace {

constexpr i64 RANGE = 20;       // of the bound, as RocksDB moves it: its most by its least
constexpr i64 REFILL = 10'000;  // microseconds; RocksDB moves the bound by 5 % after a hundred of them
constexpr i64 LEAST = 8 << 20;  // with which a refill is a page
constexpr int FAIRNESS = 10;    // between priorities, of which one alone waits

class Watch : public rocksdb::EventListener {
public:
    Watch(std::shared_ptr<CompactionBound> bound, const rocksdb::Options& options)
        : bound_(std::move(bound)),
          files_((options.level0_file_num_compaction_trigger + options.level0_slowdown_writes_trigger) / 2),
          pending_(options.soft_pending_compaction_bytes_limit / 2) {}

    void OnFlushCompleted(rocksdb::DB* db, const rocksdb::FlushJobInfo&) override { look(*db); }
    void OnCompactionCompleted(rocksdb::DB* db, const rocksdb::CompactionJobInfo&) override { look(*db); }

private:
    void look(rocksdb::DB& db) {
        std::string files;
        u64 pending = 0;
        if (!db.GetProperty(rocksdb::DB::Properties::kNumFilesAtLevelPrefix + "0", &files)) return;
        db.GetIntProperty(rocksdb::DB::Properties::kEstimatePendingCompactionBytes, &pending);
        bound_->set_behind(&db, std::stoll(files) >= files_ || (pending_ && pending >= pending_));
    }

    std::shared_ptr<CompactionBound> bound_;
    long long files_;
    u64 pending_;
};

}  // namespace

CompactionBound::CompactionBound(i64 most)
    : RateLimiter(Mode::kAllIo),
      limiter_(rocksdb::NewGenericRateLimiter(std::max(most, LEAST), REFILL, FAIRNESS, Mode::kAllIo,
                                              /*auto_tuned=*/true)) {
    limiter_->SetBytesPerSecond(std::max(most, LEAST) / RANGE);
    piece_ = limiter_->GetSingleBurstBytes();
}

void CompactionBound::set_behind(const rocksdb::DB* db, bool behind) {
    const std::lock_guard lock(mutex_);
    if (behind)
        lifted_ += static_cast<int>(behind_.insert(db).second);
    else
        lifted_ -= static_cast<int>(behind_.erase(db));
}

void CompactionBound::Request(i64 bytes, rocksdb::Env::IOPriority priority, rocksdb::Statistics* statistics,
                              OpType type) {
    if (waits(priority)) {
        const auto begin = std::chrono::steady_clock::now();
        for (i64 done = 0; done < bytes; done += piece_)
            limiter_->Request(std::min(piece_, bytes - done), priority, statistics, type);
        waited_ +=
            std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begin).count();
    }
    count(static_cast<std::size_t>(bytes), priority);
}

// What does not wait is not divided either.
std::size_t CompactionBound::RequestToken(std::size_t bytes, std::size_t alignment, rocksdb::Env::IOPriority priority,
                                          rocksdb::Statistics* statistics, OpType type) {
    if (waits(priority)) return RateLimiter::RequestToken(bytes, alignment, priority, statistics, type);
    count(bytes, priority);
    return bytes;
}

void CompactionBound::count(std::size_t bytes, rocksdb::Env::IOPriority priority) {
    if (priority == rocksdb::Env::IO_TOTAL) return;  // of nobody whom the bound concerns
    bytes_[priority] += static_cast<i64>(bytes);
    ++requests_[priority];
}

i64 CompactionBound::total(const Counts& counts, rocksdb::Env::IOPriority priority) {
    if (priority != rocksdb::Env::IO_TOTAL) return counts[priority];
    i64 sum = 0;
    for (const auto& count : counts) sum += count;
    return sum;
}

std::shared_ptr<rocksdb::EventListener> listener_of(std::shared_ptr<CompactionBound> bound,
                                                    const rocksdb::Options& options) {
    return std::make_shared<Watch>(std::move(bound), options);
}

}  // namespace tierbed
