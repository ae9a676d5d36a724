// Where the rows of a cache are, and which of them give way: the sets, the overflow, and the batches that are known.
#pragma once
#include <algorithm>
#include <array>
#include <vector>

#include "cache/kernels/cache_set.h"
#include "ops/native/layout.h"
#include "ops/native/memory.h"
#include "overflow.h"
#include "store/native/rows.h"
#include "store/native/tier.h"

namespace tierbed {

// The sets of a cache: tags, ways and lines in one piece of memory each.
// A slot is a way of a set, numbered through. Different sets may be used by several threads at once.
class Cache {
public:
    // As many sets as the budget has room for, with their metadata. std::invalid_argument where it has no room for one.
    Cache(const LineShape& shape, std::size_t budget_bytes, Replacement replacement);
    Cache(const Cache&) = delete;

    // The row's slot, or NONE.
    u32 find(u64 hash, u32 table) const {
        const u32 number = set_of(hash, sets_);
        const u32 way = probe_set(THREAD, set(number), hash, table);
        return way == NONE ? NONE : number * WAYS + way;
    }
    // The slot to take for a row that no set holds, as victim_way chooses it, or NONE.
    u32 choose(u64 hash, u32 batch, u32 done) const {
        const u32 number = set_of(hash, sets_);
        const u32 way = victim_way(set(number), home_of(hash), batch, done, replacement_);
        return way == NONE ? NONE : number * WAYS + way;
    }
    // How many batches after `batch` the row of a slot is needed, NEVER for a free slot.
    u32 needed_in(u32 slot, u32 batch) const { return is_free(slot) ? NEVER : batches_until(way(slot).next, batch); }
    void take(u32 slot, const Way& row) {
        tags()[slot] = tag_of(row.hash);
        way(slot) = row;
    }
    void free(u32 slot) { tags()[slot] = 0; }

    bool is_free(u32 slot) const { return tags()[slot] == 0; }
    bool is_dirty(u32 slot) const { return tierbed::is_dirty(updates(slot), way(slot).stored); }
    Way& way(u32 slot) const { return reinterpret_cast<Way*>(ways_.start())[slot]; }
    u32 updates(u32 slot) const { return record(line(slot), shape_)->updates; }
    u64 line(u32 slot) const { return lines_.start() + static_cast<u64>(slot) * shape_.line_bytes; }

    u32 slot(u64 line) const { return static_cast<u32>((line - lines_.start()) / shape_.line_bytes); }

    // These bring memory that the next calls for the row read into the CPU's caches, in the order of those calls. They
    // are inlined, since GCC drops a call of a function that only prefetches.
    TIERBED_INLINE void fetch_tags(u64 hash) const { prefetch(set(set_of(hash, sets_)).tags); }
    TIERBED_INLINE void fetch_way(u64 hash) const {
        const SetView view = set(set_of(hash, sets_));
        const u32 home = home_of(hash);
        if (const u32 matches = tag_matches(view.tags + home, tag_of(hash)))
            prefetch(&view.ways[home + lowest_bit(matches)]);
    }
    TIERBED_INLINE void fetch_ways(u64 hash) const {
        prefetch_bytes(reinterpret_cast<u64>(set(set_of(hash, sets_)).ways + home_of(hash)), GROUP * sizeof(Way));
    }

    TIERBED_INLINE void fetch_record(u32 slot) const { prefetch(record(line(slot), shape_)); }

    u32 slots() const { return sets_ * WAYS; }
    // Whether buckets have sets of their own.
    bool splits() const { return sets_ >= BUCKETS; }
    std::size_t used() const;
    std::size_t bytes() const { return tags_.size() + ways_.size() + lines_.size(); }

private:
    u8* tags() const { return reinterpret_cast<u8*>(tags_.start()); }
    SetView set(u32 number) const { return {tags() + std::size_t{number} * WAYS, &way(number * WAYS)}; }

    LineShape shape_;
    Replacement replacement_;
    u32 sets_;
    Pages tags_, ways_, lines_;
};

// Which announced batches need which rows. By this, replacement looks ahead.
// Batches that were announced and have not begun, SPAN at most, numbered one after the other. A row's number in the
// map has a bit for each of them that needs it. Each bucket may be changed by a thread of its own.
class Window {
public:
    static constexpr u32 SPAN = 32;

    bool full() const { return last_ + 1 - first_ == SPAN; }
    // Whether any announced batch comes after batch `number`.
    bool looks_past(u32 number) const { return is_after(last_, number); }

    // Adds an announced batch.
    void add(u32 number) {
        if (empty()) first_ = number;
        last_ = number;
    }
    // Notes that the batch added last needs the row. Returns whether no earlier batch does.
    bool add_row(u32 bucket, u64 hash, u32 table) {
        u32* const bits = maps_[bucket].look_up(hash, table);
        if (bits)
            *bits |= bit_of(last_);
        else
            maps_[bucket].insert(hash, table, bit_of(last_));
        return !bits;
    }

    // Takes out the earliest batch, which begins.
    void take(u32 number) {
        if (empty()) return;
        first_ = number + 1;
        if (empty()) clear();
    }
    // Notes that batch `number` needs the row no more. Returns the next batch that does, or 0.
    u32 take_row(u32 bucket, u64 hash, u32 table, u32 number) {
        u32* const bits = maps_[bucket].look_up(hash, table);
        const u32 others = bits ? *bits & ~bit_of(number) : 0;
        if (!others) {
            if (bits) maps_[bucket].erase(hash, table);
            return 0;
        }
        *bits = others;
        return next_of(others, number);
    }

    TIERBED_INLINE void fetch(u32 bucket, u64 hash) const { maps_[bucket].fetch(hash); }
    void clear() { *this = Window(); }
    std::size_t bytes() const {
        std::size_t total = 0;
        for (const RowMap& map : maps_) total += map.bytes();
        return total;
    }

private:
    bool empty() const { return is_after(first_, last_); }
    static u32 bit_of(u32 number) { return 1u << number % SPAN; }
    // The first batch after `now` that has its bit set.
    static u32 next_of(u32 bits, u32 now) {
        const u32 turn = static_cast<u32>((now + 1) % SPAN);
        const u32 turned = turn ? bits >> turn | bits << (SPAN - turn) : bits;
        return now + 1 + lowest_bit(turned);
    }

    std::array<RowMap, BUCKETS> maps_;
    u32 first_ = 1, last_ = 0;  // numbers
};

// The distinct rows of a batch by bucket, and where the addresses of their lines are written.
struct RequestedRows {
    const u32* tables;
    const u64* hashes;
    u64* lines;            // [n], out
    const u64* own_lines;  // [n], lines outside of the cache that rows use, 0 for other rows; or null
    std::array<std::size_t, BUCKETS + 1> begin;

    std::size_t size() const { return begin[BUCKETS]; }
};

// A row that a batch needs and no set holds.
struct Miss {
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
    void announce(const RequestedRows& batch, u32 number);

    // Writes where the rows of the batch are, and lists those that no set holds. With `marking`, pins rows that are up.
    void probe(const RequestedRows& batch, u32 number, bool marking);
    void mark(const RequestedRows& batch, u32 number);
    // How many rows of the batch may yet need a place in the overflow.
    std::size_t coming() const;

    // Moves rows that announced batches need from the overflow to slots, in place of rows that are needed later or not
    // at all. done: the last batch that is over.
    void take_back(u32 done);
    // Takes slots for absent rows; rows that are needed soonest come first. Batches up to `done` are over.
    void choose(const RequestedRows& batch, u32 number, u32 done);
    void restore();
    // Gives every absent row its line, with the row's values where the overflow has them. stay: whether dirty rows that
    // lost their slot move to the overflow.
    void settle(const RequestedRows& batch, bool stay);
    // Notes the `updates` that the tier below has of each row that was fetched.
    void fetched(const u32* updates);
    void drop();
    // The counts since `probe`.
    const CacheCounts& counted() const { return counts_; }
    // Adds the hits and misses of the batch, by table.
    void count_hits(const RequestedRows& batch, TableCounts& counts) const;

    // Calls body(absent) for each absent row, buckets ascending.
    template <class Body>
    void for_each_absent(const Body& body) const {
        for (const std::vector<Miss>& of_bucket : misses_)
            for (const Miss& absent : of_bucket) body(absent);
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
    u32 next_of(const RequestedRows& batch, u32 bucket, std::size_t row, u32 number) {
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
    std::array<std::vector<Miss>, BUCKETS> misses_;
    CacheCounts counts_;
};

}  // namespace tierbed
