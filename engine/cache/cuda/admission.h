// A set-associative cache in device memory, and the slots that it gives to a batch's rows.
#pragma once
#include "cache/kernels/cache_set.h"
#include "ops/cuda/layout.h"

namespace tierbed {

struct Cache {
    u8* tags;   // [num_sets * WAYS], 0 for a free way
    Way* ways;  // [num_sets * WAYS]
    u64 lines_start;
    u32 num_sets;

    TIERBED_FN SetView set(u64 number) const { return {tags + number * WAYS, ways + number * WAYS}; }
    TIERBED_FN u64 line(u64 slot) const { return lines_start + slot * SHAPE.line_bytes; }
    // Returns the row's slot, or NONE.
    TIERBED_FN u32 find(Tile tile, u32 table, u64 hash) const {
        const u32 number = get_set(hash, num_sets);
        const u32 way = probe_set(tile, set(number), hash, table);
        return way == NONE ? NONE : number * WAYS + way;
    }
    TIERBED_FN u32 updates(u64 slot) const { return row_counters(line(slot), SHAPE)->updates; }
    TIERBED_FN bool is_dirty(u64 slot) const { return tags[slot] && updates(slot) != ways[slot].stored_updates; }
};

enum Eviction : u8 { NOTHING, CLEAN, DIRTY };

// Arrays with one element per row of a batch: slot or NONE, line or 0, 1 for a hit, Eviction, the evicted row's Way.
struct Admission {
    u32* slots;
    u64* lines;
    u8* is_hit;
    u8* evictions;
    Way* victim_ways;
};

}  // namespace tierbed
