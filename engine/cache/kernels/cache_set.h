// One set of the set-associative cache: probes it and chooses victims.
//
// A set has 64 ways and a one-byte tag per way (0: free). A probe reads one CPU cache line of tags, then only the ways
// with a matching tag. A row's home is one group of 16 ways, where it replaces another row. If all rows there are
// pinned or needed by an announced batch, the search goes on in the next group. One tile works on a set at a time, and
// no other thread uses that set. The tile's size does not change which victim is chosen.
//
// Batch numbers ascend in step order. A row is pinned while its `last` is after `last_completed`, the last batch that
// has completed, so the end of a step changes no row. A row is dirty if the tier below lacks some of its updates.
#pragma once
#include "ops/kernels/hash.h"
#include "ops/kernels/deduplicate.h"

namespace tierbed {

constexpr u32 WAYS = 64, GROUP = 16;  // ways per set, ways per group
constexpr u32 NEVER = 0xFFFFFFFFu;

struct Way {
    u64 hash;
    u32 table;
    u32 last;    // the last batch that touched it
    u32 next;    // the next announced batch that needs it; 0 for none
    u32 uses;    // how many batches touched it
    u32 stored;  // the row's `updates` in the tier below; 0 if that tier lacks it
    u32 spare;
};
static_assert(sizeof(Way) == 32, "two ways a cache line");

struct SetView {
    u8* tags;   // [WAYS]
    Way* ways;  // [WAYS]
};

enum Replacement : u32 { LRU = 0, LFU = 1 };

// Never 0. These bits choose neither the bucket nor, with fewer than 2^25 sets per bucket, the set.
TIERBED_FN u8 tag_of(u64 hash) { return static_cast<u8>(0x80 | (hash & 0x7F)); }

// A bucket's first set, if there are at least BUCKETS sets: then each set belongs to one bucket.
TIERBED_FN u32 first_set(u32 bucket, u32 sets) { return static_cast<u32>(static_cast<u64>(bucket) * sets / BUCKETS); }

TIERBED_FN u32 set_of(u64 hash, u32 sets) {
    const u32 low = static_cast<u32>(hash);
    if (sets < BUCKETS) return multiply_high(low, sets);
    const u32 first = first_set(bucket_of(hash), sets);
    return first + multiply_high(low, first_set(bucket_of(hash) + 1, sets) - first);
}

// The first way of the row's home.
TIERBED_FN u32 home_of(u64 hash) { return static_cast<u32>(hash >> 32) % (WAYS / GROUP) * GROUP; }

#ifndef TIERBED_GPU
// A bit for each way of a group whose tag matches. Rarely, the bit of another way is set too.
TIERBED_FN u32 tag_matches(const u8* tags, u8 tag) {
    u32 matches = 0;
    for (u32 half = 0; half < GROUP / 8; ++half) {
        u64 word;
        __builtin_memcpy(&word, tags + 8 * half, 8);
        const u64 x = word ^ 0x0101010101010101ull * tag;
        const u64 zeros = (x - 0x0101010101010101ull) & ~x & 0x8080808080808080ull;
        matches |= static_cast<u32>(zeros * 0x0002040810204081ull >> 56) << (8 * half);
    }
    return matches;
}
#endif

// Returns the first free way of a group, or NONE.
TIERBED_FN u32 first_free(const u8* tags) {
#ifdef TIERBED_GPU
    for (u32 w = 0; w < GROUP; ++w)
        if (tags[w] == 0) return w;
    return NONE;
#else
    const u32 free = tag_matches(tags, 0);
    return free ? lowest_bit(free) : NONE;
#endif
}

// Returns the row's way, or NONE.
TIERBED_FN u32 probe_set(Tile tile, const SetView& set, u64 hash, u32 table) {
    const u8 tag = tag_of(hash);
    const u32 home = home_of(hash);
    for (u32 turn = 0; turn < WAYS; turn += GROUP) {
        const u32 first = (home + turn) % WAYS;
#ifdef TIERBED_GPU
        for (u32 base = first; base < first + GROUP; base += tile.size) {
            const u32 w = base + tile.lane;
            const bool in = w < first + GROUP;
            const bool hit = in && set.tags[w] == tag && set.ways[w].hash == hash && set.ways[w].table == table;
            const u32 hits = ballot(tile, hit);
            if (hits) return base + lowest_bit(hits);
        }
#else
        static_cast<void>(tile);
        for (u32 matches = tag_matches(set.tags + first, tag); matches; matches &= matches - 1) {
            const u32 w = first + lowest_bit(matches);
            if (set.tags[w] == tag && set.ways[w].hash == hash && set.ways[w].table == table) return w;
        }
#endif
    }
    return NONE;
}

// True if a row differs from the tier below. `updates` saturates, so a saturated row counts as dirty.
TIERBED_FN bool is_dirty(u32 updates, u32 stored) { return updates != stored || updates == 0xFFFFFFFFu; }

// Batch numbers wrap around, so they are compared by their difference.
TIERBED_FN bool is_after(u32 number, u32 other) { return static_cast<i32>(number - other) > 0; }

// Batches from `number` to the next one that needs the row; NEVER if no announced batch does.
TIERBED_FN u32 batches_until(u32 next, u32 number) {
    return next != 0 && is_after(next, number) ? next - number : NEVER;
}

// Returns the way to replace for batch `number`: the first free way, searched from `home` on. If there is none, takes
// the first group with a row that is neither pinned nor needed by an announced batch, and in it the least recently used
// row or the row with the fewest uses. Returns NONE if no group has such a row.
TIERBED_FN u32 victim_way(const SetView& set, u32 home, u32 number, u32 last_completed, Replacement replacement) {
    for (u32 turn = 0; turn < WAYS; turn += GROUP) {
        const u32 first = (home + turn) % WAYS, free = first_free(set.tags + first);
        if (free != NONE) return first + free;
    }
    u32 victim = NONE;
    for (u32 turn = 0; turn < WAYS; ++turn) {
        if (turn % GROUP == 0 && victim != NONE) break;
        const u32 w = (home + turn) % WAYS;
        const Way& way = set.ways[w];
        if (is_after(way.last, last_completed) || batches_until(way.next, number) != NEVER) continue;
        if (victim != NONE) {
            const Way& other = set.ways[victim];
            const bool older = is_after(other.last, way.last);
            const bool rarer = way.uses != other.uses ? way.uses < other.uses : older;
            if (replacement == LFU ? !rarer : !older) continue;
        }
        victim = w;
    }
    return victim;
}

}  // namespace tierbed
