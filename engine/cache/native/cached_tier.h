// A write-back cache over a slower tier: the store of steps, or a tier itself, so that caches stack.
//
// A row comes up once, stays pinned while a batch needs it, and goes down once, when it gives way while it differs from
// what the tier below has. Batches are numbered in the order in which they are announced or pinned, and end in that
// order: a row is pinned while the last batch that touched it is not over, so ending a batch touches no row.
//
// Locks, in the order in which they are taken: `admission` is held by whoever brings rows up or down, `directory` while
// sets, overflow and window are looked at or changed, `queue` for the batches. No lock guards the lines: the line of a
// pinned row belongs to its step, the line of an absent row to the thread that admits the row.
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
    std::size_t budget_bytes;    // of the sets
    std::size_t overflow_bytes;  // the most for prefetched rows and for rows on their way down
    Replacement replacement;
    std::size_t io_threads;  // how many threads write to a disk
};

class CachedTier : public Tier {
public:
    // The layout and the tier below must outlive it.
    CachedTier(const Layout& layout, Tier& below, const CacheOptions& options);
    ~CachedTier() override;
    CachedTier(const CachedTier&) = delete;

    // As in engine/store/contract.py. `announce` and `prefetch` may run in another thread than the rest. An error of
    // the thread that brings rows down is thrown by the next call that moves rows, or forgotten by a flush; nothing is
    // lost by it.
    void announce(std::shared_ptr<Batch> batch);
    bool prefetch(const Batch& batch);
    void pin(std::shared_ptr<Batch> batch);
    void unpin(const Batch& batch);
    void cancel();
    void peek(Batch& batch);

    // Rows that are not up stay down; those that are written come up. Not beside batches.
    void read(const RowSpan& rows, bool* found, bool touch) override;
    void write(const RowSpan& rows) override;
    void erase(const RowSpan& rows) override;
    void forget_errors() override;
    bool on_disk() const override { return false; }
    // Brings every dirty row down.
    void flush();
    // Ends the writing thread and forgets batches; does not flush.
    void close();

    struct Metrics {
        CacheCounts counts;
        u64 bytes_in, bytes_out;
        std::size_t capacity, resident_rows, bytes;
        std::size_t overflow_rows, overflow_peak_rows, overflow_capacity, overflow_bytes, window_bytes;
        u64 overflow_evictions, prefetch_waits;
    };
    Metrics metrics() const;
    // [tables, 2], hits and misses of each table
    std::vector<u64> asked() const;
    const Histogram& fetch_latency() const { return fetch_latency_; }
    const Histogram& write_latency() const { return write_latency_; }

    // A row that is up.
    struct Resident {
        u64 hash, line, last;
        u32 table, uses;
        i64 slot;  // -1 in the overflow
        bool dirty, pinned;
        Record record;
    };
    std::vector<Resident> residents();
    std::optional<Resident> find(u32 table, u64 key);

private:
    struct Announced {
        std::shared_ptr<Batch> batch;
        u32 number;
        enum { waiting, admitting, admitted } state;
    };
    // On the heap, so that a forked child can leave it alone: even destroying it there would be wrong.
    struct Threads {
        std::mutex admission, directory, queue;
        std::condition_variable admitted;
        std::optional<WriteBehind> writer;
    };
    enum class Purpose { ahead, step, write };

    // The methods below are called with the locks that their group names. With `queue`:
    Announced* announced(u32 number);  // null where that batch was cancelled
    void update_done();
    // With `admission`. A call of `read` or `write` is a batch of its own, between these two.
    u32 begin_alone();
    void end_alone();
    // False where the overflow might get too large for a batch that is not needed yet.
    bool admit(const RequestedRows& wanted, u32 number, Purpose purpose);
    void fetch(const RequestedRows& wanted);
    // Copies rows that are up to the lines `to` and lists the others. `touch`: the former count as used.
    std::vector<std::size_t> copy_present(const RequestedRows& wanted, const u64* to, bool touch);
    // With `admission` and `directory`. Bring down the rows of the overflow, rows that give way, given rows.
    void sweep();
    void write_victims();
    void write_down(const RowSpan& rows);
    Resident resident(const Way& way, u64 line, i64 slot) const;
    // With none. Fills lines of rows from the tier below, or with initial values. Returns the `updates` of each row.
    std::vector<u32> read_below(const RowSpan& rows, bool touch);
    // What may stay in the overflow where so many more rows come. Half of it is room for what a batch needs.
    Overflow::Limits room_beside(std::size_t coming = 0) const {
        const std::size_t half = overflow_rows_ / 2;
        const std::size_t others = overflow_rows_ - std::min(overflow_rows_, coming);
        return {std::min(half, others), coming ? std::min(half, others) : half + half / 2};
    }
    u32 done() const { return done_.load(std::memory_order_acquire); }

    const Layout& layout_;
    Tier& below_;
    std::size_t overflow_rows_;
    Directory directory_;
    CacheCounts counts_;
    TableCounts hit_counts_;
    std::atomic<u64> bytes_in_{0};
    u64 bytes_out_ = 0, prefetch_waits_ = 0;
    Histogram fetch_latency_, write_latency_;
    pid_t process_;
    std::unique_ptr<Threads> threads_;

    // guarded by `queue`
    std::deque<Announced> announced_;
    std::shared_ptr<Batch> pinned_;
    u32 pinned_number_ = 0;
    u32 number_ = 0;  // of the latest batch
    std::atomic<u32> done_{0};
};

}  // namespace tierbed
