// A set-associative write-back cache in device memory.
//
// The rows of a call are distinct. The caller sorts them, stably, by set and (if a set has rows of several buckets) by
// bucket. One tile handles all rows of a set in this order, so the GPU decides like the CPU cache.
#include "admission.h"
#include "ops/cuda/items.h"

using namespace tierbed;

namespace {

// The elements of `counts`.
enum Count : u32 { EVICTIONS_CLEAN, EVICTIONS_DIRTY, OVERFLOWS };

using Counts = CountsOf<3>;

// Returns the number of sort keys per set: one, or one per bucket if a set has rows of several buckets.
TIERBED_FN u32 parts_of_set(u32 sets) { return sets < BUCKETS ? BUCKETS : 1; }

TIERBED_FN bool note_hit(const Cache& cache, const Admission& admission, u64 row, u32 slot, u32 now) {
    const bool hit = slot != NONE;
    admission.hit[row] = hit;
    admission.slots[row] = slot;
    admission.lines[row] = hit ? cache.line(slot) : 0;
    admission.evicted[row] = NOTHING;
    if (hit) {
        cache.ways[slot].last = now;
        ++cache.ways[slot].uses;
    }
    return hit;
}

TIERBED_FN void admit_miss(const Cache& cache, const Admission& admission, u64 row, u32 set, Replacement replacement,
                           u32 last_completed, const Way& new_way, Counts& thread_counts) {
    const u32 way = victim_way(cache.set(set), home_of(new_way.hash), new_way.last, last_completed, replacement);
    if (way == NONE) {
        ++thread_counts.found[OVERFLOWS];
        return;
    }
    const u32 slot = set * WAYS + way;
    admission.slots[row] = slot;
    admission.lines[row] = cache.line(slot);
    if (cache.tags[slot]) {
        const bool dirty = cache.dirty(slot);
        admission.evicted[row] = dirty ? DIRTY : CLEAN;
        admission.previous[row] = cache.ways[slot];
        ++thread_counts.found[dirty ? EVICTIONS_DIRTY : EVICTIONS_CLEAN];
    }
    cache.ways[slot] = new_way;
    cache.tags[slot] = tag_of(new_way.hash);
}

}  // namespace

// Writes set_keys [n], the sort keys of the first `count` rows. Later elements get a larger key than any row.
extern "C" __global__ void compute_set_keys(const u64* hashes, const u32* count, u64 n, u32 sets, u32* set_keys) {
    const u32 parts = parts_of_set(sets);
    for_each(n, [&](u64 i) {
        set_keys[i] = i < *count ? set_of(hashes[i], sets) * parts + bucket_of(hashes[i]) % parts : sets * parts;
    });
}

// Admits the rows of batch `now`. set_keys [n] is sorted, and order [n] lists the rows in that order. After a fault,
// admits no missing row. Counts hits and misses in lookups [tables, 2].
extern "C" __global__ void admit_rows(Cache cache, u32 now, u32 last_completed, u32 policy, const u64* hashes,
                                      const u32* tables, const u32* set_keys, const i64* order, u64 n,
                                      Admission admission, u64* counts, Counters lookups, const u32* faults) {
    const u32 parts = parts_of_set(cache.sets);
    const Replacement replacement = static_cast<Replacement>(policy);
    const bool is_valid = *faults == 0;
    Counts thread_counts;
    Tally tally(lookups);
    for_each_item<GROUP>(n, [&](Tile tile, u64 begin) {
        const u32 set = set_keys[begin] / parts;
        if (set == cache.sets || (begin > 0 && set_keys[begin - 1] / parts == set)) return;
        u64 end = begin;
        // Hits come first, so that no miss evicts a row that the batch needs.
        for (; end < n && set_keys[end] / parts == set; ++end) {
            const u64 row = static_cast<u64>(order[end]);
            const u32 slot = cache.find(tile, tables[row], hashes[row]);
            if (tile.lane == 0 && note_hit(cache, admission, row, slot, now)) tally.add(place_of(tables[row], false));
        }
        for (u64 i = begin; is_valid && tile.lane == 0 && i < end; ++i) {
            const u64 row = static_cast<u64>(order[i]);
            const Way new_way{hashes[row], tables[row], now, 0, 1, 0, 0};
            if (admission.hit[row]) continue;
            tally.add(place_of(tables[row], true));
            admit_miss(cache, admission, row, set, replacement, last_completed, new_way, thread_counts);
        }
    });
    tally.end();
    thread_counts.add_to(counts);
}

// Marks rows as clean after they were fetched from the tier below.
extern "C" __global__ void mark_fetched(Cache cache, Admission admission, const u32* count) {
    for_each(*count, [&](u64 i) {
        const u32 slot = admission.slots[i];
        if (slot != NONE && !admission.hit[i]) cache.ways[slot].stored = cache.updates(slot);
    });
}

// Marks the rows in slots [n] as clean: the tier below has their current values.
extern "C" __global__ void mark_clean(Cache cache, const i64* slots, u64 n) {
    for_each(n, [&](u64 i) { cache.ways[slots[i]].stored = cache.updates(static_cast<u64>(slots[i])); });
}

// Undoes an admission. With `restore`, victims return to their slots; otherwise the slots become free.
extern "C" __global__ void cancel_rows(Cache cache, Admission admission, const u32* count, u32 restore) {
    for_each(*count, [&](u64 i) {
        const u32 slot = admission.slots[i];
        if (slot == NONE || admission.hit[i]) return;
        const bool restored = restore && admission.evicted[i] != NOTHING;
        if (restored) cache.ways[slot] = admission.previous[i];
        cache.tags[slot] = restored ? tag_of(admission.previous[i].hash) : u8{0};
    });
}

// Erases rows from the cache. Rows flagged in keep [n] stay, but count as absent from the tier below.
extern "C" __global__ void erase_cached(Cache cache, const u64* hashes, const u32* tables, const u32* count,
                                        const u8* keep) {
    for_each_item<GROUP>(*count, [&](Tile tile, u64 i) {
        const u32 slot = cache.find(tile, tables[i], hashes[i]);
        if (slot == NONE || tile.lane != 0) return;
        if (keep[i])
            cache.ways[slot].stored = 0;
        else
            cache.tags[slot] = 0;
    });
}

// Looks up the first `count` rows: writes lines [n], 0 for a miss, and missing [n], 1 for a miss, otherwise 0.
extern "C" __global__ void find_cached(Cache cache, const u64* hashes, const u32* tables, const u32* count, u64 n,
                                       u64* lines, i32* missing) {
    for_each_item<GROUP>(n, [&](Tile tile, u64 i) {
        const u32 slot = i < *count ? cache.find(tile, tables[i], hashes[i]) : NONE;
        if (tile.lane != 0) return;
        lines[i] = slot == NONE ? 0 : cache.line(slot);
        missing[i] = i < *count && slot == NONE;
    });
}

// Sets flags [sets * WAYS]: 1 for a dirty slot, otherwise 0.
extern "C" __global__ void find_dirty(Cache cache, u8* flags) {
    for_each(static_cast<u64>(cache.sets) * WAYS, [&](u64 slot) { flags[slot] = cache.dirty(slot); });
}

// Sets flags [n] to 0 or 1: victims (dirty rows to evict), absent (rows to fetch), overflows (rows without a slot).
extern "C" __global__ void flag_rows(Admission admission, const u32* count, u64 n, i32* victims, i32* absent,
                                     i32* overflows) {
    for_each(n, [&](u64 i) {
        const bool missed = i < *count && !admission.hit[i];
        victims[i] = missed && admission.evicted[i] == DIRTY;
        absent[i] = missed;
        overflows[i] = missed && admission.slots[i] == NONE;
    });
}
