// One set of the set-associative cache: probes it, and chooses victims.
//
// A set has a one-byte tag for each way, 0 for a free way, so a probe reads one CPU cache line of tags and the ways
// whose tags match. The home of a row is one group of the set's ways, and the row replaces another row there. If every
// row there is pinned or needed by an announced batch, the next group is searched, and so on. One tile works on one set
// at a time, and no other thread uses the set. The choice of victims does not depend on the tile's size.
//
// Batches have numbers, ascending in the order of their steps. A row is pinned while the last batch that touched it has
// not completed (`last` beyond `done`), and dirty if its line has updates that the tier below lacks. So the end of a
// step changes no counter.
#pragma once
#include "ops/kernels/hash.h"
#include "ops/kernels/deduplicate.h"

namespace tierbed {

constexpr u32 WAYS = 64, GROUP = 16;  // ways of a set, and of a group
constexpr u32 NEVER = 0xFFFFFFFFu;

struct Way {
    u64 hash;
    u32 table;
    u32 last;    // the batch that touched it last
    u32 next;    // the next announced batch that needs it, 0 for none
    u32 uses;    // number of batches that touched it
    u32 stored;  // the `updates` of the row in the tier below, 0 if that lacks the row
    u32 spare;
};
static_assert(sizeof(Way) == 32, "two ways a cache line");

struct SetView {
    u8* tags;   // [WAYS]
    Way* ways;  // [WAYS]
};

enum Replacement : u32 { LRU = 0, LFU = 1 };

// Bits of the hash that choose neither bucket nor, among fewer than 2^25 of a bucket, the set; never 0.
TIERBED_FN u8 tag_of(u64 hash) { return static_cast<u8>(0x80 | (hash & 0x7F)); }

// The first set of a bucket, if there are BUCKETS sets or more: a bucket owns whole sets.
TIERBED_FN u32 first_set(u32 bucket, u32 sets) { return static_cast<u32>(static_cast<u64>(bucket) * sets / BUCKETS); }

TIERBED_FN u32 set_of(u64 hash, u32 sets) {
    const u32 low = static_cast<u32>(hash);
    if (sets < BUCKETS) return multiply_high(low, sets);
    const u32 first = first_set(bucket_of(hash), sets);
    return first + multiply_high(low, first_set(bucket_of(hash) + 1, sets) - first);
}

// The first way of a row's home.
TIERBED_FN u32 home_of(u64 hash) { return static_cast<u32>(hash >> 32) % (WAYS / GROUP) * GROUP; }

#ifndef TIERBED_GPU
// The ways of a group whose tag may match, one bit for each: all that match and, rarely, one that does not.
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

// The first free way of a group, or NONE.
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

// The way that has the row, or NONE.
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

// Whether a row differs from the row in the tier below. `updates` saturates; a saturated row counts as dirty.
TIERBED_FN bool is_dirty(u32 updates, u32 stored) { return updates != stored || updates == 0xFFFFFFFFu; }

// Batch numbers wrap around, and are compared by their distance.
TIERBED_FN bool is_after(u32 number, u32 other) { return static_cast<i32>(number - other) > 0; }

// The number of batches from `number` to the next one that needs the row, NEVER if no announced batch does.
TIERBED_FN u32 batches_until(u32 next, u32 number) {
    return next != 0 && is_after(next, number) ? next - number : NEVER;
}

// The way to replace for batch `number`, searched from `home` on; NONE if all rows are pinned or needed by an announced
// batch. A free way comes first. Else the victim is the least recently used row, or the one with the fewest uses, of
// the first group that has a row to replace.
TIERBED_FN u32 victim_way(const SetView& set, u32 home, u32 number, u32 done, Replacement replacement) {
    for (u32 turn = 0; turn < WAYS; turn += GROUP) {
        const u32 first = (home + turn) % WAYS, free = first_free(set.tags + first);
        if (free != NONE) return first + free;
    }
    u32 victim = NONE;
    for (u32 turn = 0; turn < WAYS; ++turn) {
        if (turn % GROUP == 0 && victim != NONE) break;
        const u32 w = (home + turn) % WAYS;
        const Way& way = set.ways[w];
        if (is_after(way.last, done) || batches_until(way.next, number) != NEVER) continue;
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
