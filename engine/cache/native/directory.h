// Where the rows of a cache are, and which of them give way: the sets, the overflow, and the batches that are known.
#pragma once
#include <array>
#include <vector>

#include "cache.h"
#include "overflow.h"
#include "store/native/table_counts.h"
#include "window.h"

namespace tierbed {

// The distinct rows of a batch by bucket, and where the addresses of their lines are written.
struct Wanted {
    const u32* tables;
    const u64* hashes;
    u64* lines;            // [n], out
    const u64* own_lines;  // [n], lines outside of the cache that rows use, 0 for other rows; or null
    std::array<std::size_t, BUCKETS + 1> begin;

    std::size_t size() const { return begin[BUCKETS]; }
};

// A row that a batch needs and no set holds.
struct Absent {
    u32 row;             // of the batch
    u32 from;            // where the overflow has it, NONE where it must be fetched
    u32 before;          // the batch that had touched it there: one that is not over has its address
    u32 next = 0;        // the next batch that needs the row, 0 for none
    u32 slot = NONE;     // the slot that the row gets
    u32 place = NONE;    // the place in the overflow that it gets where it gets no slot
    bool free = false;   // whether the slot was free
    bool dirty = false;  // whether the row that the slot held differs from the tier below
    Way way{};           // of the row that the slot held; of the absent row where it gets no slot
};

struct CacheCounts {
    u64 hits = 0, misses = 0, insertions = 0, evictions_clean = 0, evictions_dirty = 0, overflows = 0;
    CacheCounts& operator+=(const CacheCounts& more);
};

// A batch is admitted by `probe`, `choose` and `settle`, and by `mark` where `probe` did not pin. `restore` undoes
// `choose`. `drop` takes out the rows that could not be fetched.
class Directory {
public:
    Directory(const LineShape& shape, std::size_t budget_bytes, Replacement replacement, std::size_t overflow_rows)
        : sets(shape, budget_bytes, replacement), overflow(shape, overflow_rows), shape_(shape) {}

    // Notes an announced batch, the last until now.
    void announce(const Wanted& batch, u32 number);

    // Writes where the rows of the batch are, and lists those that no set holds. With `marking`, pins rows that are up.
    void probe(const Wanted& batch, u32 number, bool marking);
    void mark(const Wanted& batch, u32 number);
    // How many rows of the batch may yet need a place in the overflow.
    std::size_t coming() const;

    // Moves rows that announced batches need from the overflow to slots, in place of rows that are needed later or not
    // at all. done: the last batch that is over.
    void take_back(u32 done);
    // Takes slots for absent rows; rows that are needed soonest come first. Batches up to `done` are over.
    void choose(const Wanted& batch, u32 number, u32 done);
    void restore();
    // Gives every absent row its line, with the row's values where the overflow has them. stay: whether dirty rows that
    // lost their slot move to the overflow.
    void settle(const Wanted& batch, bool stay);
    // Notes the `updates` that the tier below has of each row that was fetched.
    void fetched(const u32* updates);
    void drop();
    // The counts since `probe`.
    const CacheCounts& counted() const { return counts_; }
    // Adds the hits and misses of the batch, by table.
    void count_asked(const Wanted& batch, TableCounts& counts) const;

    // Calls body(absent) for each absent row, buckets ascending.
    template <class Body>
    void for_each_absent(const Body& body) const {
        for (const std::vector<Absent>& of_bucket : absent_)
            for (const Absent& absent : of_bucket) body(absent);
    }
    // Calls body(way, line, slot) for each row of the sets, then with slot -1 for each row of the overflow.
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
    // The place of a row; its `way` is null where the row is not up.
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
