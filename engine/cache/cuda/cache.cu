// A set-associative write-back cache in device memory.
//
// Rows of a call are distinct and come sorted (by the caller, stably) by set and, where a set has several buckets, by
// bucket: one tile takes all rows of a set, in this order, so it decides as the CPU's cache does.
#include "admission.h"
#include "ops/cuda/items.h"

using namespace tierbed;

namespace {

// counts [3]
enum Count : u32 { EVICTIONS_CLEAN, EVICTIONS_DIRTY, OVERFLOWS };

using Counts = CountsOf<3>;

// How many numbers `places` has for a set: one, or one for each bucket where a set has rows of several.
TIERBED_FN u32 parts_of_set(u32 sets) { return sets < BUCKETS ? BUCKETS : 1; }

TIERBED_FN bool note_hit(const Cache& cache, const Admission& all, u64 row, u32 slot, u32 now) {
    const bool hit = slot != NONE;
    all.hit[row] = hit;
    all.slots[row] = slot;
    all.lines[row] = hit ? cache.line(slot) : 0;
    all.gone[row] = NOTHING;
    if (hit) {
        cache.ways[slot].last = now;
        ++cache.ways[slot].uses;
    }
    return hit;
}

TIERBED_FN void admit_miss(const Cache& cache, const Admission& all, u64 row, u32 set, Replacement replacement,
                           u32 done, const Way& wanted, Counts& counted) {
    const u32 way = victim_way(cache.set(set), home_of(wanted.hash), wanted.last, done, replacement);
    if (way == NONE) {
        ++counted.found[OVERFLOWS];
        return;
    }
    const u32 slot = set * WAYS + way;
    all.slots[row] = slot;
    all.lines[row] = cache.line(slot);
    if (cache.tags[slot]) {
        const bool dirty = cache.dirty(slot);
        all.gone[row] = dirty ? DIRTY : CLEAN;
        all.before[row] = cache.ways[slot];
        ++counted.found[dirty ? EVICTIONS_DIRTY : EVICTIONS_CLEAN];
    }
    cache.ways[slot] = wanted;
    cache.tags[slot] = tag_of(wanted.hash);
}

}  // namespace

// places [n]: what to sort the first `count` rows by, behind them more than any row's
extern "C" __global__ void place_rows(const u64* hashes, const u32* count, u64 n, u32 sets, u32* places) {
    const u32 parts = parts_of_set(sets);
    for_each(n, [&](u64 i) {
        places[i] = i < *count ? set_of(hashes[i], sets) * parts + bucket_of(hashes[i]) % parts : sets * parts;
    });
}

// places [n], sorted, and order [n], the rows in that order: batch number `now`, where `done` is over. After a fault no
// row is fetched. asked [tables, 2]: hits and misses.
extern "C" __global__ void admit_rows(Cache cache, u32 now, u32 done, u32 policy, const u64* hashes, const u32* tables,
                                      const u32* places, const i64* order, u64 n, Admission all, u64* counts,
                                      Counters asked, const u32* faults) {
    const u32 parts = parts_of_set(cache.sets);
    const bool open = *faults == 0;
    Counts counted;
    Tally rows(asked);
    for_each_item<GROUP>(n, [&](Tile tile, u64 begin) {
        const u32 set = places[begin] / parts;
        if (set == cache.sets || (begin > 0 && places[begin - 1] / parts == set)) return;
        u64 end = begin;
        // hits first, so that no miss takes the place of a row that is needed
        for (; end < n && places[end] / parts == set; ++end) {
            const u64 row = static_cast<u64>(order[end]);
            const u32 slot = cache.find(tile, tables[row], hashes[row]);
            if (tile.lane == 0 && note_hit(cache, all, row, slot, now)) rows.add(place_of(tables[row], false));
        }
        for (u64 i = begin; open && tile.lane == 0 && i < end; ++i) {
            const u64 row = static_cast<u64>(order[i]);
            const Way wanted{hashes[row], tables[row], now, 0, 1, 0, 0};
            if (all.hit[row]) continue;
            rows.add(place_of(tables[row], true));
            admit_miss(cache, all, row, set, static_cast<Replacement>(policy), done, wanted, counted);
        }
    });
    rows.end();
    counted.add_to(counts);
}

// Marks the rows that were just fetched as equal to those of the tier below.
extern "C" __global__ void note_fetched(Cache cache, Admission all, const u32* count) {
    for_each(*count, [&](u64 i) {
        if (all.slots[i] != NONE && !all.hit[i]) cache.ways[all.slots[i]].stored = cache.updates(all.slots[i]);
    });
}

// Notes that the tier below has the rows in slots [n] as they are now.
extern "C" __global__ void note_written(Cache cache, const i64* slots, u64 n) {
    for_each(n, [&](u64 i) { cache.ways[slots[i]].stored = cache.updates(static_cast<u64>(slots[i])); });
}

// Undoes an admission. With `restore` the victims come back; without it their slots become free.
extern "C" __global__ void cancel_rows(Cache cache, Admission all, const u32* count, u32 restore) {
    for_each(*count, [&](u64 i) {
        const u32 slot = all.slots[i];
        if (slot == NONE || all.hit[i]) return;
        const bool back = restore && all.gone[i] != NOTHING;
        if (back) cache.ways[slot] = all.before[i];
        cache.tags[slot] = back ? tag_of(all.before[i].hash) : u8{0};
    });
}

// Takes rows out of the cache. Rows flagged in kept [n] stay, and count as absent from the tier below.
extern "C" __global__ void erase_cached(Cache cache, const u64* hashes, const u32* tables, const u32* count,
                                        const u8* kept) {
    for_each_item<GROUP>(*count, [&](Tile tile, u64 i) {
        const u32 slot = cache.find(tile, tables[i], hashes[i]);
        if (slot == NONE || tile.lane != 0) return;
        if (kept[i])
            cache.ways[slot].stored = 0;
        else
            cache.tags[slot] = 0;
    });
}

// lines [n]: where each of the first `count` rows is, 0 where it is not up; missing [n]: 1 where it is not up, else 0
extern "C" __global__ void find_cached(Cache cache, const u64* hashes, const u32* tables, const u32* count, u64 n,
                                       u64* lines, i32* missing) {
    for_each_item<GROUP>(n, [&](Tile tile, u64 i) {
        const u32 slot = i < *count ? cache.find(tile, tables[i], hashes[i]) : NONE;
        if (tile.lane != 0) return;
        lines[i] = slot == NONE ? 0 : cache.line(slot);
        missing[i] = i < *count && slot == NONE;
    });
}

// flags [sets * WAYS]
extern "C" __global__ void find_dirty(Cache cache, u8* flags) {
    for_each(static_cast<u64>(cache.sets) * WAYS, [&](u64 slot) { flags[slot] = cache.dirty(slot); });
}

// flags [n] of 0 and 1: victims (dirty rows that are evicted), absent (rows to fetch), overflows (those without a slot)
extern "C" __global__ void sort_out(Admission all, const u32* count, u64 n, i32* victims, i32* absent, i32* overflows) {
    for_each(n, [&](u64 i) {
        const bool missed = i < *count && !all.hit[i];
        victims[i] = missed && all.gone[i] == DIRTY;
        absent[i] = missed;
        overflows[i] = missed && all.slots[i] == NONE;
    });
}
