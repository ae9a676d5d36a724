// The overflow area: lines outside the sets. It holds evicted dirty rows until write-back, and rows without a slot.
#pragma once
#include <array>
#include <atomic>
#include <functional>
#include <vector>

#include "cache/kernels/cache_set.h"
#include "ops/native/memory.h"
#include "store/native/rows.h"

namespace tierbed {

// A row of the overflow area.
struct OverflowEntry {
    Way way;
    bool is_being_written;     // a thread is writing the line to the lower tier
    bool is_erased;            // the row was removed during the write; the entry is freed when the write ends
    bool is_evictable;         // the row only waits for write-back: no batch needed it when it left its set
    bool is_eviction_counted;  // the row came from a set, where its eviction was counted
    u32 previous, next;        // neighbours in a chain, in order of arrival; `next` also links free entries
};

// Stores rows in numbered entries. Threads may call `find` concurrently, but no other method.
class Overflow {
    static constexpr u32 CHUNK = 1024;  // maximum number of entries per chunk

public:
    // capacity: memory for this many rows is kept when rows are removed.
    Overflow(const LineShape& shape, std::size_t capacity) : shape_(shape), capacity_(capacity) {}

    // Returns the row's entry, or NONE.
    u32 find(u64 hash, u32 table) const { return index_.find(hash, table) - 1; }
    TIERBED_INLINE void prefetch_slot(u64 hash) const { index_.prefetch_slot(hash); }
    // Allocates memory for `rows` more rows. Only this call and `trim` can run out of memory.
    void reserve(std::size_t rows);
    // Adds a row and returns its entry. The caller fills the entry's line. is_evictable: no batch needs the row.
    // is_eviction_counted: the row's eviction from a set was counted.
    u32 add(const Way& row, bool is_evictable, bool is_eviction_counted = false);
    void remove(u32 entry);
    // Frees the memory beyond the capacity, if no row uses it.
    void trim();
    // Raises the capacity to `rows` in whole chunks, unless memory beyond the capacity is in use. True if it grew.
    bool grow(std::size_t rows);
    static std::size_t round_up_to_chunks(std::size_t rows) { return rows / CHUNK * CHUNK + CHUNK - 1; }
    std::size_t capacity() const { return capacity_; }

    // `write_back` evicts until `max_rows` rows remain, but keeps rows for announced batches at `max_needed_rows` rows.
    struct Limits {
        std::size_t max_rows, max_needed_rows;
    };
    // Evicts rows until the limits hold. Clean rows are evicted immediately. Up to `max_rows` dirty rows are sorted by
    // hash, written to the lower tier by `write`, and then evicted. Evictable rows go first, in order of arrival. A row
    // is not evicted while a batch after `last_completed` uses it. Returns the number of rows written.
    std::size_t write_back(const std::atomic<u32>& last_completed, std::size_t max_rows, const Limits& limits,
                           const std::function<void(const RowSpan&)>& write);

    // Calls body(entry) for each row that is present at the start. The body may remove the row.
    template <class Body>
    void for_each(const Body& body) {
        for (const Chain& chain : chains_) for_each_in(chain, body);
    }

    // True if no batch pins the row and no thread is writing it.
    bool is_idle(u32 entry, u32 last_completed) const {
        return !at(entry).is_being_written && !is_after(at(entry).way.last_batch, last_completed);
    }
    u32 updates(u32 entry) const { return row_counters(line(entry), shape_)->updates; }
    bool is_dirty(u32 entry) const { return tierbed::is_dirty(updates(entry), at(entry).way.stored_updates); }
    OverflowEntry& at(u32 entry) { return chunks_[entry / CHUNK].entries[entry % CHUNK]; }
    const OverflowEntry& at(u32 entry) const { return chunks_[entry / CHUNK].entries[entry % CHUNK]; }
    u64 line(u32 entry) const {
        return chunks_[entry / CHUNK].lines.start() + static_cast<u64>(entry % CHUNK) * shape_.line_bytes;
    }

    bool empty() const { return num_rows_ == 0; }
    std::size_t num_rows() const { return num_rows_; }
    std::size_t peak_rows() const { return peak_rows_; }
    // The number of rows evicted from the overflow area. Excludes rows whose eviction from a set was already counted.
    u64 evictions() const { return evictions_; }
    std::size_t bytes() const;
    // Upper bound for the memory per row, while the rows fit the capacity.
    static std::size_t row_bytes(const LineShape& shape) {
        return shape.line_bytes + sizeof(OverflowEntry) + RowMap::MAX_ROW_BYTES;
    }

private:
    struct Chunk {
        Pages lines;
        std::vector<OverflowEntry> entries;
    };
    struct Chain {
        u32 first = NONE, last = NONE;
        std::size_t num_rows = 0;
    };

    template <class Body>
    void for_each_in(const Chain& chain, const Body& body) {
        u32 entry = chain.first;
        for (std::size_t remaining = chain.num_rows; remaining > 0; --remaining) {
            const u32 next = at(entry).next;
            if (!at(entry).is_erased) body(entry);
            entry = next;
        }
    }
    std::vector<u32> claim_dirty(u32 last_completed, std::size_t max_rows, const Limits& limits);
    // updates: each row's `updates` in the written line; null if the write failed.
    void finish_write(const std::vector<u32>& entries, const std::vector<u32>* updates, u32 last_completed);
    void link(u32 entry);
    void unlink(u32 entry);
    void mark_needed(u32 entry);  // marks an evictable row that a batch needs again
    void evict(u32 entry);
    void release(u32 entry);

    LineShape shape_;
    std::size_t capacity_;
    std::size_t num_entries_ = 0;
    std::size_t num_rows_ = 0, num_spare_rows_ = 0, peak_rows_ = 0;  // entries in use, including erased ones
    u64 evictions_ = 0;
    RowMap index_;                               // maps a row to its entry + 1
    std::vector<Chunk> chunks_;                  // entries up to number `capacity_`, then entries beyond this number
    std::array<u32, 2> first_free_{NONE, NONE};  // the first free entry up to `capacity_`, and the first one beyond it
    std::array<Chain, 2> chains_;                // first the rows that a batch may need, then the evictable rows
    u32 next_candidate_ = NONE;                  // where `claim_dirty` continues in the first chain
};

}  // namespace tierbed
