// A write-back cache over a tier: the store of a step, and a tier itself, so that caches stack.
//
// A row comes up once, stays while a batch that is not over needs it, and goes down once, when it gives way while its
// line has updates that the tier below has not. Rows that no set has room for are in the overflow until their batch is
// over; over a disk, dirty rows that gave way wait there too, for a thread that writes them down. A row is in one place.
//
// `operations_` lets one operation at a time move rows; `directory_` guards what the writing thread and the end of a
// batch share with it. An error of the thread is kept for the next `pin`, `prefetch`, `write` or `flush`; no row is lost
// by it, and the thread tries again.
#pragma once
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <sys/types.h>

#include "batch.h"
#include "cache.h"
#include "histogram.h"
#include "overflow.h"
#include "tier.h"
#include "window.h"

namespace tierbed {

struct CacheOptions {
    std::size_t budget_bytes;
    std::size_t overflow_bytes;
    Replacement replacement;
    std::size_t io_threads;
};

struct CacheCounts {
    u64 hits = 0, misses = 0;  // rows asked for
    u64 insertions = 0, evictions_clean = 0, evictions_dirty = 0;
    u64 overflows = 0;  // rows that no set had room for
    u64 fetched = 0, written = 0;  // rows from and to the tier below
    u64 prefetch_waits = 0;
};

struct OverflowSize {
    std::size_t rows, peak, bytes, capacity;
};

class CachedTier : public Tier {
public:
    CachedTier(const Layout& layout, Tier& below, const CacheOptions& options);
    ~CachedTier() override;
    CachedTier(const CachedTier&) = delete;
    void close();  // ends the thread; nothing may be used after it

    // Of batches, whose lines they set. They begin and end in the order of their numbers.
    void announce(Batch& batch);
    bool prefetch(Batch& batch);  // of an announced one; false where it has to wait for room
    void pin(Batch& batch);
    void unpin(Batch& batch);
    void cancel();
    void peek(Batch& batch);

    void read(const Rows& rows, bool* found, bool touch) override;
    void write(const Rows& rows) override;
    void erase(const Rows& rows) override;
    bool on_disk() const override { return false; }
    void flush();  // every dirty line to the tier below

    struct Place {
        bool held = false, overflow = false, pinned = false, dirty = false;
        u32 slot = 0;
        Record record{0, 0};
    };
    Place where(u64 hash, u32 table);

    CacheCounts counts();
    std::size_t capacity() const { return cache_.capacity(); }
    std::size_t used();
    std::size_t bytes() const { return cache_.bytes(); }
    OverflowSize overflow();
    Histogram fetch_times, write_times;
    const LineShape& shape() const { return layout_.shape; }

private:
    friend class Admission;

    // own [unique]: lines of the batch's own, which no tier gives a place, 0 for other rows; or null
    void admit(Batch& batch, const u64* own, std::unique_lock<std::mutex>& directory);
    std::size_t missing(const Batch& batch);
    void count(const CacheCounts& counts);
    void read_below(const Rows& rows, bool* found, bool touch);  // rows that are not found get their initial values
    void write_below(const Rows& rows);
    bool is_dirty(u64 line, u32 stored) const { return record(line, layout_.shape)->updates != stored; }
    bool is_announced(const Batch& batch) const { return batch.number != 0 && is_after(batch.number, cancelled_); }

    // write_behind.cpp
    class Paused {  // keeps the thread from writing
    public:
        Paused(CachedTier& tier, std::unique_lock<std::mutex>& directory);
        ~Paused();

    private:
        CachedTier& tier_;
    };
    bool can_leave() const;
    std::vector<u32> take_leaving(std::size_t most);
    void leave(std::unique_lock<std::mutex>& directory, const std::vector<u32>& entries);
    void write_loop();
    void wait_for_room(std::unique_lock<std::mutex>& directory);
    void raise_failure();

    const Layout& layout_;
    Tier& below_;
    const CacheOptions options_;
    const pid_t process_;
    std::mutex operations_, directory_;
    Cache cache_;
    Overflow overflow_;
    const std::size_t overflow_rows_;  // where prefetch and victims wait
    Window window_;
    CacheCounts counts_;
    std::atomic<u64> fetched_{0}, written_{0};
    u32 issued_ = 0, done_ = 0, cancelled_ = 0;  // batch numbers: the latest, the last one over, all that were forgotten

    std::unique_ptr<std::thread> writer_;
    // not destroyed in a forked child, where that would wait for the parent's thread
    std::condition_variable &wake_ = *new std::condition_variable, &wrote_ = *new std::condition_variable;
    std::exception_ptr failure_;
    bool stopping_ = false, paused_ = false, writing_ = false;
};

}  // namespace tierbed
