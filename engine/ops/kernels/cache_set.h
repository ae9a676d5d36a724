// One set of the set-associative cache: probe it, and choose the way that gives way.
//
// A set has a one-byte tag for each of its ways, 0 where the way is free, so that a probe looks at one line of tags and
// at the ways that match. One tile works on one set at a time and nobody else touches it; the lowest way wins ties, so
// what is evicted does not depend on the tile's size.
//
// Batches have numbers, ascending in the order of their steps. A row is pinned while its latest batch is not over
// (`last` beyond `done`), and dirty while its line has had updates that the tier below has not: nothing is counted up
// or down when a step ends.
#pragma once
#include "hash.h"
#include "unique.h"

namespace tierbed {

constexpr u32 WAYS = 16;
constexpr u32 NEVER = 0xFFFFFFFFu;

struct Way {
    u64 hash;
    u32 table;
    u32 last;    // the batch that touched it last
    u32 next;    // the next batch known to need it, 0 for none
    u32 uses;    // batches that touched it
    u32 stored;  // the `updates` of the row in the tier below, 0 where that has none
    u32 spare;
};
static_assert(sizeof(Way) == 32, "two ways a cache line");

struct SetView {
    u8* tags;   // [WAYS]
    Way* ways;  // [WAYS]
};

enum Replacement : u32 { LRU = 0, LFU = 1 };

// Bits of the hash that choose neither bucket nor set; never 0.
TIERBED_FN u8 tag_of(u64 hash) { return static_cast<u8>(0x80 | (hash >> 50 & 0x7F)); }

// The first set of a bucket, where there are BUCKETS sets or more: a bucket owns whole sets.
TIERBED_FN u32 first_set(u32 bucket, u32 sets) { return static_cast<u32>(static_cast<u64>(bucket) * sets / BUCKETS); }

TIERBED_FN u32 set_of(u64 hash, u32 sets) {
    const u32 low = static_cast<u32>(hash);
    if (sets < BUCKETS) return multiply_high(low, sets);
    const u32 first = first_set(bucket_of(hash), sets);
    return first + multiply_high(low, first_set(bucket_of(hash) + 1, sets) - first);
}

#ifndef TIERBED_GPU
// Ways whose tag may match, a bit for each: all that do, and rarely one that does not.
TIERBED_FN u32 tag_matches(const u8* tags, u8 tag) {
    u32 matches = 0;
    for (u32 half = 0; half < 2; ++half) {
        u64 word;
        __builtin_memcpy(&word, tags + 8 * half, 8);
        const u64 x = word ^ 0x0101010101010101ull * tag;
        const u64 zeros = (x - 0x0101010101010101ull) & ~x & 0x8080808080808080ull;
        matches |= static_cast<u32>(zeros * 0x0002040810204081ull >> 56) << (8 * half);
    }
    return matches;
}
#endif

// The way that holds the row, or NONE.
TIERBED_FN u32 probe_set(Tile tile, const SetView& set, u64 hash, u32 table) {
    const u8 tag = tag_of(hash);
#ifdef TIERBED_GPU
    for (u32 base = 0; base < WAYS; base += tile.size) {
        const u32 w = base + tile.lane;
        const bool hit = w < WAYS && set.tags[w] == tag && set.ways[w].hash == hash && set.ways[w].table == table;
        const u32 hits = ballot(tile, hit);
        if (hits) return base + lowest_bit(hits);
    }
#else
    static_cast<void>(tile);
    for (u32 matches = tag_matches(set.tags, tag); matches; matches &= matches - 1) {
        const u32 w = lowest_bit(matches);
        if (set.tags[w] == tag && set.ways[w].hash == hash && set.ways[w].table == table) return w;
    }
#endif
    return NONE;
}

// Whether a row differs from what the tier below has of it. `updates` stops at its largest value, and cannot tell
// there.
TIERBED_FN bool is_dirty(u32 updates, u32 stored) { return updates != stored || updates == 0xFFFFFFFFu; }

// Numbers wrap around, and are compared by their distance.
TIERBED_FN bool is_after(u32 number, u32 other) { return static_cast<i32>(number - other) > 0; }

// How many batches after `number` the row is needed next, NEVER where that is not known.
TIERBED_FN u32 batches_until(u32 next, u32 number) {
    return next != 0 && is_after(next, number) ? next - number : NEVER;
}

// The way to replace for batch `number`: a free one, else of the unpinned ones that which is needed last; of those not
// known to be needed the one unused for longest, or with the fewest uses. NONE where all are pinned.
TIERBED_FN u32 victim_way(const SetView& set, u32 number, u32 done, Replacement replacement) {
    u32 victim = NONE;
    for (u32 w = 0; w < WAYS; ++w) {
        if (set.tags[w] == 0) return w;
        const Way& way = set.ways[w];
        if (is_after(way.last, done)) continue;
        if (victim == NONE) {
            victim = w;
            continue;
        }
        const Way& other = set.ways[victim];
        const u32 here = batches_until(way.next, number), there = batches_until(other.next, number);
        const bool older = is_after(other.last, way.last);
        const bool rarer = way.uses != other.uses ? way.uses < other.uses : older;
        if (here != there ? here > there : replacement == LFU ? rarer : older) victim = w;
    }
    return victim;
}

}  // namespace tierbed
