// One set of the set-associative cache: finds rows in the set, and chooses the row to evict.
//
// A set has 64 ways and a one-byte tag per way (0: free). A probe reads one CPU cache line of tags, then only the ways
// with a matching tag. A row's home is the group of 16 ways where the search for a victim begins. If all rows of a
// group are pinned or needed by an announced batch, the search goes on in the next group. Only one tile (a CPU thread,
// or threads of one GPU warp) uses a set at a time. The tile's size does not change which row is evicted.
//
// Batch numbers ascend in step order. `Way::last_batch` is the last batch that touched the row. The row is pinned until
// this batch completes. Unpinning changes no memory. A row is dirty if the tier below lacks some of its updates.
#pragma once
#include "ops/kernels/hash.h"
#include "ops/kernels/deduplicate.h"

namespace tierbed {

constexpr u32 WAYS = 64, GROUP_WAYS = 16;  // ways per set, ways per group
constexpr u32 NEVER = 0xFFFFFFFFu;

struct Way {
    u64 hash;
    u32 table;
    u32 last_batch;      // the last batch that touched the row
    u32 next_batch;      // the next announced batch that needs the row; 0 for none
    u32 num_uses;        // batches that touched the row
    u32 stored_updates;  // the row's `updates` in the tier below; 0 if that tier lacks the row
    u32 spare;
};
static_assert(sizeof(Way) == 32, "two ways a cache line");

struct SetView {
    u8* tags;   // [WAYS]
    Way* ways;  // [WAYS]
};

enum CachePolicy : u32 { LRU = 0, LFU = 1 };

// Returns a row's tag, never 0. With fewer than 2^25 sets per bucket, the tag shares no bits with bucket and set.
TIERBED_FN u8 get_tag(u64 hash) { return static_cast<u8>(0x80 | (hash & 0x7F)); }

// Returns a bucket's first set. Needs at least BUCKETS sets: with fewer sets, buckets would share a set.
TIERBED_FN u32 find_first_set(u32 bucket, u32 num_sets) { return static_cast<u32>(u64{bucket} * num_sets / BUCKETS); }

TIERBED_FN u32 get_set(u64 hash, u32 num_sets) {
    const u32 low = static_cast<u32>(hash);
    if (num_sets < BUCKETS) return multiply_high(low, num_sets);
    const u32 first = find_first_set(get_bucket(hash), num_sets);
    return first + multiply_high(low, find_first_set(get_bucket(hash) + 1, num_sets) - first);
}

// Returns the first way of the row's home group.
TIERBED_FN u32 get_home(u64 hash) { return static_cast<u32>(hash >> 32) % (WAYS / GROUP_WAYS) * GROUP_WAYS; }

#ifndef TIERBED_GPU
// Compares a group's tags with `tag`. Sets bit i of the result if way i's tag matches. Rarely, other bits are set too.
TIERBED_FN u32 match_tags(const u8* tags, u8 tag) {
    u32 matches = 0;
    for (u32 half = 0; half < GROUP_WAYS / 8; ++half) {
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
TIERBED_FN u32 find_free_way(const u8* tags) {
#ifdef TIERBED_GPU
    for (u32 w = 0; w < GROUP_WAYS; ++w)
        if (tags[w] == 0) return w;
    return NONE;
#else
    const u32 free = match_tags(tags, 0);
    return free ? lowest_bit(free) : NONE;
#endif
}

// Returns the row's way, or NONE.
TIERBED_FN u32 probe_set(Tile tile, const SetView& set, u64 hash, u32 table) {
    const u8 tag = get_tag(hash);
    const u32 home = get_home(hash);
    for (u32 offset = 0; offset < WAYS; offset += GROUP_WAYS) {
        const u32 first = (home + offset) % WAYS;
#ifdef TIERBED_GPU
        for (u32 base = first; base < first + GROUP_WAYS; base += tile.size) {
            const u32 w = base + tile.lane;
            const bool in_group = w < first + GROUP_WAYS;
            const bool hit = in_group && set.tags[w] == tag && set.ways[w].hash == hash && set.ways[w].table == table;
            const u32 hits = ballot(tile, hit);
            if (hits) return base + lowest_bit(hits);
        }
#else
        static_cast<void>(tile);
        for (u32 matches = match_tags(set.tags + first, tag); matches; matches &= matches - 1) {
            const u32 w = first + lowest_bit(matches);
            if (set.tags[w] == tag && set.ways[w].hash == hash && set.ways[w].table == table) return w;
        }
#endif
    }
    return NONE;
}

// True if a row differs from its copy in the tier below. A row whose `updates` is at its maximum counts as dirty.
TIERBED_FN bool is_dirty(u32 updates, u32 stored) { return updates != stored || updates == 0xFFFFFFFFu; }

// True if `batch` comes after `other`. Batch numbers wrap around, so the sign of their difference decides.
TIERBED_FN bool is_after(u32 batch, u32 other) { return static_cast<i32>(batch - other) > 0; }

// Returns the distance from `batch` to `next`; NEVER if `next` is 0 or does not come after `batch`.
TIERBED_FN u32 count_batches_until(u32 next, u32 batch) {
    return next != 0 && is_after(next, batch) ? next - batch : NEVER;
}

// Returns the way that a new row of `batch` gets: the first free way, searched from `home` on. If none is free,
// searches groups from `home` on for rows that are neither pinned nor needed by an announced batch. In the first group
// with such rows, takes the least recently used row (LRU) or the least used row (LFU). NONE: no group has such rows.
TIERBED_FN u32 find_victim(const SetView& set, u32 home, u32 batch, u32 last_completed, CachePolicy policy) {
    for (u32 offset = 0; offset < WAYS; offset += GROUP_WAYS) {
        const u32 first = (home + offset) % WAYS, free = find_free_way(set.tags + first);
        if (free != NONE) return first + free;
    }
    u32 victim = NONE;
    for (u32 offset = 0; offset < WAYS; ++offset) {
        if (offset % GROUP_WAYS == 0 && victim != NONE) break;
        const u32 w = (home + offset) % WAYS;
        const Way& way = set.ways[w];
        if (is_after(way.last_batch, last_completed) || count_batches_until(way.next_batch, batch) != NEVER) continue;
        if (victim != NONE) {
            const Way& other = set.ways[victim];
            const bool is_older = is_after(other.last_batch, way.last_batch);
            const bool is_rarer = way.num_uses != other.num_uses ? way.num_uses < other.num_uses : is_older;
            if (policy == LFU ? !is_rarer : !is_older) continue;
        }
        victim = w;
    }
    return victim;
}

}  // namespace tierbed
