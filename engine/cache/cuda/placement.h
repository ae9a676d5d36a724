// A set-associative cache in device memory, and the slots that it gives to a batch's rows.
#pragma once
#include "cache/kernels/cache_set.h"
#include "ops/cuda/layout.h"

namespace tierbed {

struct CacheSets {
    u8* tags;   // [num_sets * WAYS], 0 for a free way
    Way* ways;  // [num_sets * WAYS]
    u64 lines_start;
    u32 num_sets;

    TIERBED_FN SetView set(u64 set_index) const { return {tags + set_index * WAYS, ways + set_index * WAYS}; }
    TIERBED_FN u64 line(u64 slot) const { return lines_start + slot * SHAPE.line_bytes; }
    // Returns the row's slot, or NONE.
    TIERBED_FN u32 find(Tile tile, u32 table, u64 hash) const {
        const u32 set_index = get_set(hash, num_sets);
        const u32 way = probe_set(tile, set(set_index), hash, table);
        return way == NONE ? NONE : set_index * WAYS + way;
    }
    TIERBED_FN u32 updates(u64 slot) const { return row_counters(line(slot), SHAPE)->updates; }
    TIERBED_FN bool is_dirty(u64 slot) const { return tags[slot] && updates(slot) != ways[slot].stored_updates; }
};

enum Eviction : u8 { NOTHING, CLEAN, DIRTY };

// The result of placing a batch. Each array has one element per row of the batch.
struct Placement {
    u32* slots;        // the row's slot, or NONE
    u64* lines;        // the row's line, or 0
    u8* is_hit;        // 1 for a hit, 0 for a miss
    u8* evictions;     // an Eviction
    Way* victim_ways;  // the evicted row's Way
};

}  // namespace tierbed
