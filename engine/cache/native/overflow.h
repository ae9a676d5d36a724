// Lines outside of the sets: for rows that no set has room for, and for evicted dirty rows that wait for write-back.
#pragma once
#include <array>
#include <atomic>
#include <functional>
#include <vector>

#include "cache/kernels/cache_set.h"
#include "ops/native/memory.h"
#include "store/native/rows.h"

namespace tierbed {

// The line of one row, and what the overflow area knows about the row.
struct OverflowEntry {
    Way way;
    bool writing;       // a thread is writing the line to the tier below
    bool erased;        // the row was removed during that write: the entry is freed when the write ends
    bool evictable;     // no batch needed the row when it left its set: it only waits for write-back
    bool evicted;       // the row comes from a set, whose eviction was counted
    u32 before, after;  // neighbours in the chain, which is in the order of arrival; free entries are linked by `after`
};

// Entries are numbered. Only `find` may be called by several threads at once.
class Overflow {
    static constexpr u32 CHUNK = 1024;  // entries of a chunk, at most

public:
    // capacity: the number of rows whose memory is kept after they are removed.
    Overflow(const LineShape& shape, std::size_t capacity) : shape_(shape), capacity_(capacity) {}

    // The row's entry, or NONE.
    u32 find(u64 hash, u32 table) const { return index_.find(hash, table) - 1; }
    TIERBED_INLINE void prefetch_slot(u64 hash) const { index_.prefetch_slot(hash); }
    // Allocates memory for that many more rows. Only this and `trim` can fail for lack of memory.
    void reserve(std::size_t rows);
    // Adds a row and returns its entry, whose line the caller fills. evictable: no batch needs the row. evicted: its
    // eviction from a set was counted.
    u32 add(const Way& row, bool evictable, bool evicted = false);
    void remove(u32 entry);
    // Frees the memory beyond the capacity if no row is in it.
    void trim();
    // Raises a capacity of whole chunks to that many rows. Returns false if it is larger, or memory beyond it is used.
    bool grow(std::size_t rows);
    static std::size_t whole_chunks(std::size_t rows) { return rows / CHUNK * CHUNK + CHUNK - 1; }
    std::size_t capacity() const { return capacity_; }

    // How many rows may stay in the overflow area: rows of any kind, and rows that announced batches need.
    struct Limits {
        std::size_t rows, needed_rows;
    };
    // Evicts rows until the limits hold. At most `max_rows` dirty ones are passed to `write`, by hash, which writes them
    // to the tier below; they are `writing` meanwhile. Clean ones are removed at once. No row of a batch after
    // `last_completed` is evicted. Evictable rows come first, in the order of arrival. Returns how many were written.
    std::size_t write_back(const std::atomic<u32>& last_completed, std::size_t max_rows, const Limits& limits,
                           const std::function<void(const RowSpan&)>& write);

    // Calls body(entry) for each row that is in the overflow area at the start. The body may remove the row.
    template <class Body>
    void for_each(const Body& body) {
        for (const Chain& chain : chains_) for_each_of(chain, body);
    }

    // Whether no batch pins the row and no thread is writing it.
    bool is_idle(u32 entry, u32 last_completed) const {
        return !at(entry).writing && !is_after(at(entry).way.last, last_completed);
    }
    u32 updates(u32 entry) const { return record(line(entry), shape_)->updates; }
    bool is_dirty(u32 entry) const { return tierbed::is_dirty(updates(entry), at(entry).way.stored); }
    OverflowEntry& at(u32 entry) { return chunks_[entry / CHUNK].entries[entry % CHUNK]; }
    const OverflowEntry& at(u32 entry) const { return chunks_[entry / CHUNK].entries[entry % CHUNK]; }
    u64 line(u32 entry) const {
        return chunks_[entry / CHUNK].lines.start() + static_cast<u64>(entry % CHUNK) * shape_.line_bytes;
    }

    bool empty() const { return rows_ == 0; }
    std::size_t rows() const { return rows_; }
    std::size_t peak_rows() const { return peak_; }
    // Evictions from the overflow area, without rows whose eviction from a set was counted.
    u64 evictions() const { return evictions_; }
    std::size_t bytes() const;
    // Upper bound of the bytes that a row takes, up to the capacity.
    static std::size_t row_bytes(const LineShape& shape) {
        return shape.line_bytes + sizeof(OverflowEntry) + RowMap::MAX_BYTES;
    }

private:
    struct Chunk {
        Pages lines;
        std::vector<OverflowEntry> entries;
    };
    struct Chain {
        u32 first = NONE, last = NONE;
        std::size_t rows = 0;
    };

    template <class Body>
    void for_each_of(const Chain& chain, const Body& body) {
        u32 entry = chain.first;
        for (std::size_t rest = chain.rows; rest > 0; --rest) {
            const u32 after = at(entry).after;
            if (!at(entry).erased) body(entry);
            entry = after;
        }
    }
    std::vector<u32> take_dirty(u32 last_completed, std::size_t max_rows, const Limits& limits);
    // updates: those of each row when it was written; null if the write failed.
    void written_back(const std::vector<u32>& entries, const std::vector<u32>* updates, u32 last_completed);
    void link(u32 entry);
    void unlink(u32 entry);
    void keep(u32 entry);  // an evictable row, which is needed now
    void evict(u32 entry);
    void release(u32 entry);

    LineShape shape_;
    std::size_t capacity_;
    std::size_t entries_ = 0;
    std::size_t rows_ = 0, rows_beyond_ = 0, peak_ = 0;  // entries in use, erased ones included
    u64 evictions_ = 0;
    RowMap index_;                         // entry + 1
    std::vector<Chunk> chunks_;            // first the entries up to number `capacity_`, then those beyond
    std::array<u32, 2> free_{NONE, NONE};  // the first free entry up to the capacity, and beyond it
    std::array<Chain, 2> chains_;          // of rows that may be needed, and of evictable rows
    u32 resume_at_ = NONE;                 // where `take_dirty` continues among the former
};

}  // namespace tierbed
