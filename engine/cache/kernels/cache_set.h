// One set of the set-associative cache: probe it, and choose the way that gives way.
//
// A set has a one-byte tag for each of its ways, 0 where the way is free, so that a probe looks at one line of tags and
// at the ways that match. One group of the set's ways is the home of a row, and the row replaces another one there.
// Where every row there is pinned or known to be needed, the next group is looked at as well, and so on. One tile works
// on one set at a time, and nobody else touches the set. Which rows give way does not depend on the tile's size.
//
// Batches have numbers, ascending in the order of their steps. A row is pinned while its latest batch is not over
// (`last` beyond `done`), and dirty while its line has had updates that the tier below has not: nothing is counted up
// or down when a step ends.
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
    u32 next;    // the next batch known to need it, 0 for none
    u32 uses;    // batches that touched it
    u32 stored;  // the `updates` of the row in the tier below, 0 where that lacks the row
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

// The first way of a row's home.
TIERBED_FN u32 home_of(u64 hash) { return static_cast<u32>(hash >> 32) % (WAYS / GROUP) * GROUP; }

#ifndef TIERBED_GPU
// Ways of a group whose tag may match, a bit for each: all that do, and rarely one beyond the first that does not.
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

// The way that holds the row, or NONE.
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

// Whether a row differs from what the tier below has of it. `updates` stops at its largest value; there every row
// counts as dirty.
TIERBED_FN bool is_dirty(u32 updates, u32 stored) { return updates != stored || updates == 0xFFFFFFFFu; }

// Numbers wrap around, and are compared by their distance.
TIERBED_FN bool is_after(u32 number, u32 other) { return static_cast<i32>(number - other) > 0; }

// How many batches after `number` the row is needed next, NEVER where no announced batch needs it.
TIERBED_FN u32 batches_until(u32 next, u32 number) {
    return next != 0 && is_after(next, number) ? next - number : NEVER;
}

// The way to replace for batch `number`, looked for from `home` on; NONE where all ways are pinned. A free way comes
// first. Of unpinned ways, rows that no announced batch needs give way first: the least recently used one, or the one
// with the fewest uses, of the first group that has any. Then the row that is needed last gives way.
TIERBED_FN u32 victim_way(const SetView& set, u32 home, u32 number, u32 done, Replacement replacement) {
    for (u32 turn = 0; turn < WAYS; turn += GROUP) {
        const u32 first = (home + turn) % WAYS, free = first_free(set.tags + first);
        if (free != NONE) return first + free;
    }
    u32 victim = NONE, farthest = 0;
    for (u32 turn = 0; turn < WAYS; ++turn) {
        if (turn % GROUP == 0 && farthest == NEVER) break;
        const u32 w = (home + turn) % WAYS;
        const Way& way = set.ways[w];
        if (is_after(way.last, done)) continue;
        const u32 needed = batches_until(way.next, number);
        if (victim != NONE) {
            const Way& other = set.ways[victim];
            const bool older = is_after(other.last, way.last);
            const bool rarer = way.uses != other.uses ? way.uses < other.uses : older;
            if (needed != farthest ? needed < farthest : replacement == LFU ? !rarer : !older) continue;
        }
        victim = w;
        farthest = needed;
    }
    return victim;
}

}  // namespace tierbed
