// The directory of a cache knows where each row is, and decides which rows to replace.
//
// `Directory` combines three classes. `CacheSets` holds most rows. `Overflow` (overflow.h) holds evicted dirty rows and
// rows without a slot. `Window` records which announced batches need which rows; each resident row also stores the next
// batch that needs the row. Rows that announced batches need are never evicted. If a set has too few slots, the rows
// that are needed soonest get the slots: this is Belady's rule, applied to the announced batches.
//
// Most calls run one task per bucket in parallel. A task uses only its bucket's sets and maps, so tasks need no locks.
#pragma once
#include <array>
#include <vector>

#include "cache/kernels/cache_set.h"
#include "ops/native/layout.h"
#include "ops/native/memory.h"
#include "overflow.h"
#include "store/native/rows.h"
#include "store/native/tier.h"

namespace tierbed {

// The sets of a cache. A slot is one way of one set: slot = set * WAYS + way. The tags of all sets are one block of
// memory, and so are the ways and the lines. Threads may use different sets at the same time.
class CacheSets {
public:
    // Makes as many sets as fit the budget, metadata included. Throws std::invalid_argument if none fits.
    CacheSets(const LineShape& shape, std::size_t budget_bytes, CachePolicy policy);
    CacheSets(const CacheSets&) = delete;

    // Returns the row's slot, or NONE.
    u32 find(u64 hash, u32 table) const {
        const u32 set_index = get_set(hash, num_sets_);
        const u32 way = probe_set(THREAD, set(set_index), hash, table);
        return way == NONE ? NONE : set_index * WAYS + way;
    }
    // Returns the slot that `find_victim` chooses for a row without a slot, or NONE.
    u32 find_victim_slot(u64 hash, u32 batch, u32 last_completed) const {
        const u32 set_index = get_set(hash, num_sets_);
        const u32 way = find_victim(set(set_index), get_home(hash), batch, last_completed, policy_);
        return way == NONE ? NONE : set_index * WAYS + way;
    }
    void fill(u32 slot, const Way& row) {
        tags()[slot] = get_tag(row.hash);
        way(slot) = row;
    }
    void free(u32 slot) { tags()[slot] = 0; }

    bool is_free(u32 slot) const { return tags()[slot] == 0; }
    Way& way(u32 slot) const { return reinterpret_cast<Way*>(ways_.start())[slot]; }
    u32 updates(u32 slot) const { return row_counters(line(slot), shape_)->updates; }
    u64 line(u32 slot) const { return lines_.start() + static_cast<u64>(slot) * shape_.line_bytes; }
    u32 slot(u64 line) const { return static_cast<u32>((line - lines_.start()) / shape_.line_bytes); }

    // The next functions, called in this order, prefetch memory for later calls with the same row. These functions are
    // inlined, because GCC drops calls to functions that only prefetch.
    TIERBED_INLINE void prefetch_tags(u64 hash) const { prefetch(set(get_set(hash, num_sets_)).tags); }
    // Returns true if the row seems to be in the set.
    TIERBED_INLINE bool prefetch_way(u64 hash) const {
        const SetView view = set(get_set(hash, num_sets_));
        const u32 home = get_home(hash);
        const u32 matches = match_tags(view.tags + home, get_tag(hash));
        if (matches) prefetch(&view.ways[home + lowest_bit(matches)]);
        return matches != 0;
    }
    TIERBED_INLINE void prefetch_ways(u64 hash) const {
        prefetch_bytes(reinterpret_cast<u64>(set(get_set(hash, num_sets_)).ways + get_home(hash)),
                       GROUP_WAYS * sizeof(Way));
    }

    TIERBED_INLINE void prefetch_counters(u32 slot) const { prefetch(row_counters(line(slot), shape_)); }

    u32 num_slots() const { return num_sets_ * WAYS; }
    // True if each set belongs to one bucket.
    bool has_one_bucket_per_set() const { return num_sets_ >= BUCKETS; }
    std::size_t count_used_slots() const;
    std::size_t bytes() const { return tags_.size() + ways_.size() + lines_.size(); }

private:
    u8* tags() const { return reinterpret_cast<u8*>(tags_.start()); }
    SetView set(u32 set_index) const { return {tags() + std::size_t{set_index} * WAYS, &way(set_index * WAYS)}; }

    LineShape shape_;
    CachePolicy policy_;
    u32 num_sets_;
    Pages tags_, ways_, lines_;
};

// The look-ahead window records which announced batches need which rows, one bit per row and batch. It has at most
// MAX_BATCHES consecutive batches. A batch leaves when it is placed. Threads may change different buckets concurrently.
class Window {
public:
    static constexpr u32 MAX_BATCHES = 32;

    bool is_full() const { return last_ + 1 - first_ == MAX_BATCHES; }
    // True if a batch after `batch_number` is announced.
    bool has_batch_after(u32 batch_number) const { return is_after(last_, batch_number); }

    void add_batch(u32 batch_number) {
        if (empty()) first_ = batch_number;
        last_ = batch_number;
    }
    // Records that the last added batch needs the row. Returns false if an earlier batch needs the row too.
    bool add_row(u32 bucket, u64 hash, u32 table) {
        u32* const bits = maps_[bucket].find_mutable(hash, table);
        if (bits)
            *bits |= batch_bit(last_);
        else
            maps_[bucket].insert(hash, table, batch_bit(last_));
        return !bits;
    }

    // Removes batch `batch_number`, the window's earliest batch, because it is being placed.
    void remove(u32 batch_number) {
        if (empty()) return;
        first_ = batch_number + 1;
        if (empty()) clear();
    }
    // Records that batch `batch_number` no longer needs the row. Returns the next batch that needs the row, or 0.
    u32 remove_row(u32 bucket, u64 hash, u32 table, u32 batch_number) {
        u32* const bits = maps_[bucket].find_mutable(hash, table);
        const u32 later_bits = bits ? *bits & ~batch_bit(batch_number) : 0;
        if (!later_bits) {
            if (bits) maps_[bucket].erase(hash, table);
            return 0;
        }
        *bits = later_bits;
        return find_next(later_bits, batch_number);
    }

    TIERBED_INLINE void prefetch_slot(u32 bucket, u64 hash) const { maps_[bucket].prefetch_slot(hash); }
    void clear() { *this = Window(); }
    std::size_t bytes() const { return sum_bytes(maps_); }

private:
    bool empty() const { return is_after(first_, last_); }
    static u32 batch_bit(u32 batch_number) { return 1u << batch_number % MAX_BATCHES; }
    // Returns the first batch after `batch_number` whose bit is set.
    static u32 find_next(u32 bits, u32 batch_number) {
        const u32 shift = static_cast<u32>((batch_number + 1) % MAX_BATCHES);
        const u32 rotated = shift ? bits >> shift | bits << (MAX_BATCHES - shift) : bits;
        return batch_number + 1 + lowest_bit(rotated);
    }

    std::array<RowMap, BUCKETS> maps_;
    u32 first_ = 1, last_ = 0;  // batch numbers
};

// A batch's distinct rows by bucket, and the array that receives their line addresses.
struct RequestedRows {
    const u32* tables;
    const u64* hashes;
    u64* lines;                // [n], output
    const u64* refused_lines;  // null, or [n]: a row's line if admission refused the row, otherwise 0
    std::array<std::size_t, BUCKETS + 1> bucket_offsets;

    std::size_t size() const { return bucket_offsets[BUCKETS]; }
};

// A row that a batch needs but that is in no set.
struct Miss {
    u32 row;         // index in the batch
    u32 old_entry;   // the row's entry in the overflow area; NONE if the row must be fetched
    u32 last_batch;  // the last batch that touched `old_entry`; until it ends, it may still be using the entry's line
    u32 next_batch = 0;         // the next batch that needs the row; 0 if no announced batch needs the row
    u32 slot = NONE;            // the slot that the row gets; NONE if the row goes to the overflow area
    u32 new_entry = NONE;       // the overflow entry that a fetched row gets if the row gets no slot
    bool is_slot_free = false;  // true if the slot was free, so that no row is evicted
    bool is_victim_dirty = false;
    Way displaced_way{};  // the evicted row's metadata, for `undo_victims`; if none is evicted, the missing row's own
};

struct CacheCounts {
    u64 insertions = 0, evictions_clean = 0, evictions_dirty = 0, overflows = 0;
    CacheCounts& operator+=(const CacheCounts& other);
};

// To place a batch, call `probe`, `choose_victims` and `place_misses`. If `probe` does not pin, call `pin` next. If a
// later call fails, `undo_victims` undoes `choose_victims`, and `drop_unfetched_rows` removes unfetched rows.
class Directory {
public:
    Directory(const LineShape& shape, std::size_t budget_bytes, CachePolicy policy, std::size_t overflow_rows)
        : sets(shape, budget_bytes, policy), overflow(shape, overflow_rows), shape_(shape) {}

    // Adds a batch to the look-ahead window.
    void announce(const RequestedRows& batch, u32 batch_number);

    // Sets the lines of resident rows, and lists the misses. should_pin: also pin the resident rows.
    void probe(const RequestedRows& batch, u32 batch_number, bool should_pin);
    // Pins the resident rows of the batch that was just probed.
    void pin(const RequestedRows& batch, u32 batch_number);
    // Returns how many overflow entries the batch may still need.
    std::size_t overflow_demand() const;

    // Chooses a slot for each miss. The sooner an announced batch needs a row, the earlier the row gets a slot.
    void choose_victims(const RequestedRows& batch, u32 batch_number, u32 last_completed);
    void undo_victims();
    // Gives each missing row its line. A row that was in the overflow area keeps its values.
    // keep_victims: move dirty victims to the overflow area instead of overwriting them.
    void place_misses(const RequestedRows& batch, bool keep_victims);
    // Records how many updates each fetched row has in the lower tier.
    void set_stored_updates(const u32* updates);
    void drop_unfetched_rows();
    // The counts of the last `choose_victims` call.
    const CacheCounts& counts() const { return counts_; }
    // Adds the batch's hits and misses to each table's counts.
    void count_hits(const RequestedRows& batch, HitCounts& counts) const;

    // Calls body(miss) for each miss, in ascending order of buckets.
    template <class Body>
    void for_each_miss(const Body& body) const {
        for (const std::vector<Miss>& bucket : misses_)
            for (const Miss& miss : bucket) body(miss);
    }
    // Calls body(way, line, slot) for each row in the sets, then body(way, line, -1) for each row in the overflow area.
    template <class Body>
    void for_each_row(const Body& body) {
        for_each_in_slots(0, sets.num_slots(), body);
        for_each_in_overflow(body);
    }

    template <class Body>
    void for_each_in_slots(u32 begin, u32 end, const Body& body) {
        for (u32 slot = begin; slot < end; ++slot)
            if (!sets.is_free(slot)) body(sets.way(slot), sets.line(slot), i64{slot});
    }
    template <class Body>
    void for_each_in_overflow(const Body& body) {
        overflow.for_each([&](u32 entry) { body(overflow.at(entry).way, overflow.line(entry), i64{-1}); });
    }

    struct Location {
        Way* way;  // null if the row is not resident
        u64 line;
        u32 slot, entry;  // the row's slot or overflow entry; one of the two is NONE
    };
    Location find(u64 hash, u32 table);
    void erase(const Location& location);

    CacheSets sets;
    Overflow overflow;
    Window window;

private:
    u32 take_next_batch(const RequestedRows& batch, u32 bucket, std::size_t row, u32 batch_number) {
        return has_later_batch_ ? window.remove_row(bucket, batch.hashes[row], batch.tables[row], batch_number) : 0;
    }
    static void touch(Way& way, u32 batch_number, u32 next) {
        way.last_batch = batch_number;
        way.next_batch = next;
        way.num_uses += way.num_uses != 0xFFFFFFFFu;
    }
    void begin_batch(u32 batch_number);
    // Prefetches the memory that `place_misses` copies.
    void prefetch_lines(const Miss& miss) const;

    LineShape shape_;
    bool has_later_batch_ = false;  // true if a batch after the current one is announced
    std::array<std::vector<Miss>, BUCKETS> misses_;
    CacheCounts counts_;
};

}  // namespace tierbed
