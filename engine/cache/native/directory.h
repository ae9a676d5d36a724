// Where the rows of a cache are, and which of them give way: the sets, the overflow, and the batches that are known.
#pragma once
#include <array>
#include <vector>

#include "cache.h"
#include "overflow.h"
#include "store/native/table_counts.h"
#include "window.h"

namespace tierbed {

// Distinct rows by bucket, and where they are to be told.
struct Wanted {
    const u32* tables;
    const u64* hashes;
    u64* lines;            // [n], out
    const u64* own_lines;  // [n], lines that stand for their rows, 0 for the others; or null
    std::array<std::size_t, BUCKETS + 1> begin;

    std::size_t size() const { return begin[BUCKETS]; }
};

// A row that a batch needs and no set holds.
struct Absent {
    u32 row;             // of the batch
    u32 from;            // where the overflow has it, NONE where it must be fetched
    u32 before;          // the batch that had touched it there: one that is not over has its address
    u32 next = 0;        // the next batch that needs it
    u32 slot = NONE;     // that it gets, or
    u32 place = NONE;    // that it gets in the overflow
    bool free = false;   // the slot was
    bool dirty = false;  // the row that the slot held differs from the tier below
    Way way{};           // that row, or the absent one where it gets no slot
};

struct CacheCounts {
    u64 hits = 0, misses = 0, insertions = 0, evictions_clean = 0, evictions_dirty = 0, overflows = 0;
    CacheCounts& operator+=(const CacheCounts& more);
};

// A batch is admitted by `probe`, by `mark` where that did not, by `choose` and `settle`. `restore` undoes `choose`,
// `drop` the taking up of rows that could not be fetched.
class Directory {
public:
    Directory(const LineShape& shape, std::size_t budget_bytes, Replacement replacement, std::size_t overflow_rows)
        : sets(shape, budget_bytes, replacement), overflow(shape, overflow_rows), shape_(shape) {}

    // The next batch is announced.
    void announce(const Wanted& batch, u32 number);

    // Tells where rows of the batch are and lists those that no set holds. With `marking`, pins those that are there.
    void probe(const Wanted& batch, u32 number, bool marking);
    void mark(const Wanted& batch, u32 number);
    // Rows of the batch that may take a place of the overflow which they have not yet.
    std::size_t coming() const;

    // Gives rows of the overflow that announced batches need a slot of rows that are needed later, or by none, after
    // `done`, the last batch that is over.
    void take_back(u32 done);
    // Takes slots for absent rows, for those that are needed soonest first. Batches up to `done` are over.
    void choose(const Wanted& batch, u32 number, u32 done);
    void restore();
    // Gives every absent row its line, which holds what the overflow has of it. Displaced rows that are dirty move to
    // the overflow if they are to `stay`.
    void settle(const Wanted& batch, bool stay);
    // Each row that must be fetched has `updates` in the tier below.
    void fetched(const u32* updates);
    void drop();
    // What was done since `probe`.
    const CacheCounts& counted() const { return counts_; }
    // Adds its hits and misses.
    void count_asked(const Wanted& batch, TableCounts& counts) const;

    // Calls body(absent) for each absent row, buckets ascending.
    template <class Body>
    void for_each_absent(const Body& body) const {
        for (const std::vector<Absent>& of_bucket : absent_)
            for (const Absent& absent : of_bucket) body(absent);
    }
    // Calls body(way, line, slot) for each row that is up, first those of the sets, then with slot -1 the others.
    template <class Body>
    void for_each_row(const Body& body) {
        for (u32 slot = 0; slot < sets.slots(); ++slot)
            if (!sets.is_free(slot)) body(sets.way(slot), sets.line(slot), i64{slot});
        overflow.for_each([&](u32 place) { body(overflow.at(place).way, overflow.line(place), i64{-1}); });
    }

    struct Found {
        Way* way;
        u64 line;
        u32 slot, place;  // one of them, the other NONE
    };
    // `way` null where the row is not up.
    Found find(u64 hash, u32 table);
    void erase(const Found& found);

    Cache sets;
    Overflow overflow;
    Window window;

private:
    u32 next_of(const Wanted& batch, u32 bucket, std::size_t row, u32 number) {
        return looking_ ? window.take_row(bucket, batch.hashes[row], batch.tables[row], number) : 0;
    }
    static void touch(Way& way, u32 number, u32 next) {
        way.last = number;
        way.next = next;
        way.uses += way.uses != 0xFFFFFFFFu;
    }
    void begin(u32 number);
    void count(const std::array<CacheCounts, BUCKETS>& parts);

    LineShape shape_;
    bool looking_ = false;  // further batches are known
    std::array<std::vector<Absent>, BUCKETS> absent_;
    CacheCounts counts_;
};

}  // namespace tierbed
