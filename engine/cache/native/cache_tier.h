// A write-back cache above a slower tier. Steps use a cache directly, or it serves as the lower tier of another cache.
//
// A cache keeps rows in sets of 64 ways, and a row's hash chooses the row's set (cache_set.h). A slot is one way of one
// set: slot = set * 64 + way. The window records which announced batches need which rows (directory.h).
//
// Batches get numbers when they are announced or pinned, and end in the order of their numbers. `place_batch` looks up
// a batch's rows, pins them, chooses victims for missing rows and reads the missing rows from the lower tier.
// `prefetch` places an announced batch before its step, in another thread; `pin` places any other batch. Rows that
// announced batches need are not chosen as victims. A row is pinned until the last batch that touched it ends.
//
// Above a tier on disk, evicted dirty rows move to the overflow area, and the write-behind thread writes them back.
// Above a tier in memory, `place_batch` writes evicted rows back. The overflow area also holds rows without a slot.
//
// Threads lock three mutexes in this order: `placement_mutex` to place, copy, flush or erase rows; `directory_mutex` to
// use the sets, the overflow area and the window; `queue_mutex` to use the queue of batches. A line (a row's memory)
// needs no lock. Only the row's step uses a pinned line. Only the placing thread uses the line of a missing row.
#pragma once
#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <optional>

#include <sys/types.h>

#include "ops/native/batch.h"
#include "directory.h"
#include "ops/native/histogram.h"
#include "store/native/rows.h"
#include "store/native/tier.h"
#include "write_behind.h"

namespace tierbed {

struct CacheOptions {
    std::size_t budget_bytes;    // memory for the sets
    std::size_t overflow_bytes;  // limit for prefetched rows and rows that wait for write-back
    CachePolicy policy;
    std::size_t io_threads;         // threads that write to a disk
    bool grows_with_batch = false;  // grow the overflow area to hold at least two batches
};

class CacheTier : public Tier {
public:
    // The layout and the lower tier must outlive the cache.
    CacheTier(const Layout& layout, Tier& lower_tier, const CacheOptions& options);
    ~CacheTier() override;
    CacheTier(const CacheTier&) = delete;

    // See engine/store/interfaces.py. `announce` and `prefetch` may run in another thread. If the write-behind thread
    // fails, the next call that fetches rows throws the error; `flush` drops the error. No row is lost.
    void announce(std::shared_ptr<Batch> batch);
    bool prefetch(const Batch& batch);
    void pin(std::shared_ptr<Batch> batch);
    void unpin(const Batch& batch);
    void cancel_announced();
    // Returns how many rows are not in the cache, and how many rows are in no tier.
    std::pair<std::size_t, std::size_t> peek(Batch& batch);

    // `write` makes rows resident, `read` does not. If `should_touch`, eviction counts the read as a use of the rows.
    // While any batch is announced or pinned, `write` throws, and so does `read` with `should_touch`.
    void read(const RowSpan& rows, bool* is_hit, bool should_touch) override;
    void write(const RowSpan& rows) override;
    void erase(const RowSpan& rows) override;
    void forget_errors() override;
    bool is_on_disk() const override { return false; }
    // Writes all dirty rows back. will_flush: the caller will flush the lower tier.
    void flush(bool will_flush);
    // Writes some dirty rows back, for a flush: rows in the sets from slot `begin` on, then rows in the overflow area.
    // Returns `begin` for the next call, or 0 at the end.
    u32 flush_piece(u32 begin);
    // Returns the keys of all dirty rows.
    RowKeys list_dirty();
    // Ends the write-behind thread and drops all batches. Does not flush.
    void close();

    Metrics metrics() const;
    // Returns hits and misses of each table [tables, 2].
    std::vector<u64> hit_counts() const;

    // The state of a row in the cache.
    struct ResidentRow {
        i64 slot;  // -1 if the row is in the overflow area
        bool is_dirty, is_pinned;
        RowCounters counters;
    };
    std::optional<ResidentRow> locate(u32 table, u64 key);

private:
    struct AnnouncedBatch {
        std::shared_ptr<Batch> batch;
        u32 batch_number;
        enum { waiting, fetching, fetched } state;
    };
    // Allocated on the heap, so that a forked child can leak these objects. A child must not destroy them.
    struct Synchronization {
        std::mutex placement_mutex, directory_mutex, queue_mutex;
        std::condition_variable batch_fetched;
        std::optional<WriteBehind> writer;
    };
    enum class Purpose { prefetch, step, write };

    // The caller must hold `queue_mutex` for these two functions. `find_announced` returns null for a cancelled batch.
    AnnouncedBatch* find_announced(u32 batch_number);
    void update_last_completed();
    // The caller must hold `placement_mutex` for the next functions. `begin_internal_batch` gives a number to a
    // `write`, or to a `read` with `should_touch`. `end_internal_batch` ends this batch.
    u32 begin_internal_batch();
    void end_internal_batch();
    // Returns false if a prefetch might need too much of the overflow area now.
    bool place_batch(const RequestedRows& requested, u32 batch_number, Purpose purpose);
    void fetch(const RequestedRows& requested);
    // Copies resident rows to the lines in `out`, and returns the missing rows.
    std::vector<std::size_t> copy_resident(const RequestedRows& requested, const u64* out, bool should_touch);
    // The caller must hold `placement_mutex` and `directory_mutex` for the next three functions.
    void write_back_overflow();
    void write_back_victims();
    void write_back(const RowSpan& rows, bool will_flush = false);
    // Writes back the dirty rows that `for_each` visits, up to one chunk if `is_piece`. Returns the slot of the first
    // dirty row that remains, if any. The caller must hold no lock, because this function locks `placement_mutex` and
    // `directory_mutex`.
    template <class ForEach>
    std::optional<i64> flush_rows(const ForEach& for_each, bool will_flush, bool is_piece);
    // Fills lines from the lower tier or with initial values. Returns each row's `updates`. Needs no lock.
    std::vector<u32> read_lower_tier(const RowSpan& rows, bool should_touch);
    // Returns the limits for write-back. Write-back empties the area down to half its capacity, or further if `added`
    // rows need the space. If no rows are being added, rows for announced batches may keep the area up to 3/4 full.
    Overflow::Limits overflow_limits(std::size_t added = 0) const {
        const std::size_t half = overflow_rows_ / 2;
        const std::size_t rest = overflow_rows_ - std::min(overflow_rows_, added);
        return {std::min(half, rest), added ? std::min(half, rest) : half + half / 2};
    }
    u32 last_completed() const { return last_completed_.load(std::memory_order_acquire); }

    const Layout& layout_;
    Tier& lower_tier_;
    std::size_t overflow_rows_;
    const bool grows_with_batch_;
    Directory directory_;
    CacheCounts counts_;
    HitCounts hit_counts_;
    std::atomic<u64> bytes_in_{0};
    u64 bytes_out_ = 0, prefetch_waits_ = 0;
    Histogram fetch_latency_, write_latency_;
    pid_t process_id_;
    std::unique_ptr<Synchronization> sync_;

    // Guarded by `queue_mutex`.
    std::deque<AnnouncedBatch> announced_;
    std::shared_ptr<Batch> pinned_;
    u32 pinned_number_ = 0;
    u32 latest_number_ = 0;  // the latest batch number
    std::atomic<u32> last_completed_{0};
};

}  // namespace tierbed
