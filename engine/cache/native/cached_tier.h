// A write-back cache over a slower tier. It serves steps, or is itself a tier, so that caches stack.
//
// A row is fetched once and stays pinned while a batch needs it. It is written back when it is evicted and dirty.
// Batches are numbered in the order in which they are announced or pinned, and end in that order. A row is pinned until
// the last batch that touched it has ended, so ending a batch touches no row.
//
// Locks, in the order in which they are taken: `admission` by a thread that fetches or writes back, `directory` for
// sets, overflow area and window, `queue` for the batches. No lock guards the lines: the line of a pinned row belongs
// to its step, the line of a missing row to the thread that admits it.
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
    std::size_t overflow_bytes;  // the most for prefetched rows and for rows that wait for write-back
    Replacement replacement;
    std::size_t io_threads;  // how many threads write to a disk
    bool follows_batch = false;  // the overflow area has room for two batches at least
};

class CachedTier : public Tier {
public:
    // The layout and the tier below must outlive it.
    CachedTier(const Layout& layout, Tier& below, const CacheOptions& options);
    ~CachedTier() override;
    CachedTier(const CachedTier&) = delete;

    // As in engine/store/contract.py. `announce` and `prefetch` may be called by another thread than the rest. An error
    // of the write-behind thread is thrown by the next call that fetches rows, or dropped by `flush`; no row is lost.
    void announce(std::shared_ptr<Batch> batch);
    bool prefetch(const Batch& batch);
    void pin(std::shared_ptr<Batch> batch);
    void unpin(const Batch& batch);
    void cancel();
    // Returns how many rows it did not have, and how many of these no tier has.
    std::pair<std::size_t, std::size_t> peek(Batch& batch);

    // Rows that are read are not fetched, rows that are written become resident. Throws while batches are announced or
    // pinned.
    void read(const RowSpan& rows, bool* found, bool touch) override;
    void write(const RowSpan& rows) override;
    void erase(const RowSpan& rows) override;
    void forget_errors() override;
    bool on_disk() const override { return false; }
    // Writes every dirty row back.
    void flush();
    // Flushes at most `rows` rows: of the sets from slot `begin` on, then of the overflow area. Returns where the next
    // call goes on, 0 at the end.
    u32 flush_some(u32 begin, u32 rows);
    // Ends the write-behind thread and drops all batches; does not flush.
    void close();

    Metrics metrics() const;
    // [tables, 2], hits and misses of each table
    std::vector<u64> hit_counts() const;

    // A row of the cache.
    struct Resident {
        i64 slot;  // -1 in the overflow area
        bool dirty, pinned;
        Record record;
    };
    std::optional<Resident> find(u32 table, u64 key);

private:
    struct Announced {
        std::shared_ptr<Batch> batch;
        u32 number;
        enum { waiting, admitting, admitted } state;
    };
    // On the heap, so that a forked child can leak it: destroying it there is undefined.
    struct Threads {
        std::mutex admission, directory, queue;
        std::condition_variable admitted;
        std::optional<WriteBehind> writer;
    };
    enum class Purpose { prefetch, step, write };

    // With `queue` held:
    Announced* announced(u32 number);  // null if the batch was cancelled
    void update_last_completed();
    // With `admission` held. A call of `read` or `write` is a batch between these two.
    u32 begin_internal_batch();
    void end_internal_batch();
    // False if the overflow area might get too large for a batch that no step needs yet.
    bool admit(const RequestedRows& requested, u32 number, Purpose purpose);
    void fetch(const RequestedRows& requested);
    // for_each: passes rows to its argument. At most `left` dirty ones are flushed; returns whether there are more.
    template <class ForEach>
    bool flush_rows(const ForEach& for_each, std::size_t left = SIZE_MAX);
    // Copies resident rows to the lines `to` and returns the others. touch: resident rows count as used.
    std::vector<std::size_t> copy_present(const RequestedRows& requested, const u64* to, bool touch);
    // With `admission` and `directory` held.
    void write_back_overflow();
    void write_back_victims();
    void write_back(const RowSpan& rows);
    // With no lock. Fills lines from the tier below, or with initial values. Returns the `updates` of each row.
    std::vector<u32> read_below(const RowSpan& rows, bool touch);
    // What may stay in the overflow area if `added` rows are added. Half of the area is for rows that a batch needs.
    Overflow::Limits overflow_limits(std::size_t added = 0) const {
        const std::size_t half = overflow_rows_ / 2;
        const std::size_t others = overflow_rows_ - std::min(overflow_rows_, added);
        return {std::min(half, others), added ? std::min(half, others) : half + half / 2};
    }
    u32 last_completed() const { return last_completed_.load(std::memory_order_acquire); }

    const Layout& layout_;
    Tier& below_;
    std::size_t overflow_rows_;
    const bool follows_batch_;
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
    std::atomic<u32> last_completed_{0};
};

}  // namespace tierbed
