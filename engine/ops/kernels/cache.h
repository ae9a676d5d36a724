// One set of the set-associative cache: probe, admit, evict the least recently used way that no batch has pinned.
//
// One tile works on one set at a time and nobody else touches it. Lookups stride the ways by lane; the lowest matching
// way wins, so what is evicted does not depend on the tile's size. `tick` numbers batches and never repeats.
#pragma once
#include "hash.h"
#include "unique.h"

namespace tierbed {

constexpr u32 WAYS = 16;

struct Way {
    u64 hash;
    u32 table;
    u32 tick;   // the batch that touched it last
    u32 pins;   // batches that hold its address
    u32 state;  // WayState
};

enum WayState : u32 { FREE = 0, CLEAN = 1, DIRTY = 2 };

// The set of a row. More than BUCKETS sets are a multiple of it: a bucket owns whole sets.
TIERBED_FN u32 set_of(u64 hash, u32 sets) {
    const u32 low = static_cast<u32>(hash);
    if (sets < BUCKETS) return multiply_high(low, sets);
    const u32 sets_a_bucket = sets / BUCKETS;
    return bucket_of(hash) * sets_a_bucket + multiply_high(low, sets_a_bucket);
}

// The way that holds the row, or NONE.
TIERBED_FN u32 probe_set(Tile tile, const Way* set, u32 table, u64 hash) {
    for (u32 base = 0; base < WAYS; base += tile.size) {
        const u32 w = base + tile.lane;
        const bool hit = w < WAYS && set[w].state != FREE && set[w].hash == hash && set[w].table == table;
        const u32 hits = ballot(tile, hit);
        if (hits) return base + lowest_bit(hits);
    }
    return NONE;
}

// The way to replace: a free one, else the one unused for longest (the older batch, then the lower way). Ways that are
// pinned or were touched by batch `tick` stay; NONE where all are such. Ages are distances to `tick`, right across its
// wrap-around.
TIERBED_FN u32 victim_way(const Way* set, u32 tick) {
    u32 victim = NONE, oldest = 0;
    for (u32 w = 0; w < WAYS; ++w) {
        if (set[w].state == FREE) return w;
        const u32 age = tick - set[w].tick;
        if (set[w].pins == 0 && age > oldest) {
            oldest = age;
            victim = w;
        }
    }
    return victim;
}

}  // namespace tierbed
