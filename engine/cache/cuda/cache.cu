// A set-associative write-back cache in device memory.
//
// The rows of a call are distinct. The caller sorts the rows stably by set, and by bucket if a set has several buckets.
// One tile (threads of a warp) places a set's rows in this order, so the GPU evicts the same rows as the CPU cache.
#include "placement.h"
#include "ops/cuda/items.h"

using namespace tierbed;

namespace {

// The indexes of counters in `counts`.
enum CountIndex : u32 { EVICTIONS_CLEAN, EVICTIONS_DIRTY, OVERFLOWS };

using Counts = ThreadCounters<3>;

// Returns the number of sort keys per set: one, or one per bucket if a set has rows of several buckets.
TIERBED_FN u32 count_set_parts(u32 num_sets) { return num_sets < BUCKETS ? BUCKETS : 1; }

TIERBED_FN bool record_hit(const CacheSets& sets, const Placement& placement, u64 row, u32 slot, u32 batch_number) {
    const bool is_hit = slot != NONE;
    placement.is_hit[row] = is_hit;
    placement.slots[row] = slot;
    placement.lines[row] = is_hit ? sets.line(slot) : 0;
    placement.evictions[row] = NOTHING;
    if (is_hit) {
        sets.ways[slot].last_batch = batch_number;
        ++sets.ways[slot].num_uses;
    }
    return is_hit;
}

TIERBED_FN void place_miss(const CacheSets& sets, const Placement& placement, u64 row, u32 set, CachePolicy policy,
                           u32 last_completed, const Way& new_way, Counts& thread_counts) {
    const u32 way = find_victim(sets.set(set), get_home(new_way.hash), new_way.last_batch, last_completed, policy);
    if (way == NONE) {
        ++thread_counts.values[OVERFLOWS];
        return;
    }
    const u32 slot = set * WAYS + way;
    placement.slots[row] = slot;
    placement.lines[row] = sets.line(slot);
    if (sets.tags[slot]) {
        const bool dirty = sets.is_dirty(slot);
        placement.evictions[row] = dirty ? DIRTY : CLEAN;
        placement.victim_ways[row] = sets.ways[slot];
        ++thread_counts.values[dirty ? EVICTIONS_DIRTY : EVICTIONS_CLEAN];
    }
    sets.ways[slot] = new_way;
    sets.tags[slot] = get_tag(new_way.hash);
}

}  // namespace

// Writes set_keys [n], the sort keys of the first `count` rows. Elements after `count` get a larger key than any row.
extern "C" __global__ void compute_set_keys(const u64* hashes, const u32* count, u64 n, u32 num_sets, u32* set_keys) {
    const u32 parts = count_set_parts(num_sets);
    for_each(n, [&](u64 i) {
        set_keys[i] =
            i < *count ? get_set(hashes[i], num_sets) * parts + get_bucket(hashes[i]) % parts : num_sets * parts;
    });
}

// Places a batch's rows. set_keys [n] is sorted, and order [n] lists the rows in that order. After a fault,
// places no missing row. Adds the hits and misses to hit_counters [tables, 2].
extern "C" __global__ void place_rows(CacheSets sets, u32 batch_number, u32 last_completed, u32 policy_number,
                                      const u64* hashes, const u32* tables, const u32* set_keys, const i64* order,
                                      u64 n, Placement placement, u64* counts, DeviceCounters hit_counters,
                                      const u32* faults) {
    const u32 parts = count_set_parts(sets.num_sets);
    const CachePolicy policy = static_cast<CachePolicy>(policy_number);
    const bool is_valid = *faults == 0;
    Counts thread_counts;
    CoalescingCounter counter(hit_counters);
    for_each_item<GROUP_WAYS>(n, [&](Tile tile, u64 begin) {
        const u32 set = set_keys[begin] / parts;
        if (set == sets.num_sets || (begin > 0 && set_keys[begin - 1] / parts == set)) return;
        u64 end = begin;
        // Hits come first, so that no miss evicts a row that the batch needs.
        for (; end < n && set_keys[end] / parts == set; ++end) {
            const u64 row = static_cast<u64>(order[end]);
            const u32 slot = sets.find(tile, tables[row], hashes[row]);
            if (tile.lane == 0 && record_hit(sets, placement, row, slot, batch_number))
                counter.add(hit_index(tables[row], true));
        }
        for (u64 i = begin; is_valid && tile.lane == 0 && i < end; ++i) {
            const u64 row = static_cast<u64>(order[i]);
            const Way new_way{hashes[row], tables[row], batch_number, 0, 1, 0, 0};
            if (placement.is_hit[row]) continue;
            counter.add(hit_index(tables[row], false));
            place_miss(sets, placement, row, set, policy, last_completed, new_way, thread_counts);
        }
    });
    counter.flush();
    thread_counts.add_to(counts);
}

// Marks rows as clean after they were fetched from the lower tier.
extern "C" __global__ void mark_fetched(CacheSets sets, Placement placement, const u32* count) {
    for_each(*count, [&](u64 i) {
        const u32 slot = placement.slots[i];
        if (slot != NONE && !placement.is_hit[i]) sets.ways[slot].stored_updates = sets.updates(slot);
    });
}

// Marks the rows in slots [n] as clean: the lower tier has their current values.
extern "C" __global__ void mark_clean(CacheSets sets, const i64* slots, u64 n) {
    for_each(n, [&](u64 i) { sets.ways[slots[i]].stored_updates = sets.updates(static_cast<u64>(slots[i])); });
}

// Undoes a placement. With `restore`, evicted rows return to their slots; otherwise these slots become free.
extern "C" __global__ void undo_placement(CacheSets sets, Placement placement, const u32* count, u32 restore) {
    for_each(*count, [&](u64 i) {
        const u32 slot = placement.slots[i];
        if (slot == NONE || placement.is_hit[i]) return;
        const bool is_restored = restore && placement.evictions[i] != NOTHING;
        if (is_restored) sets.ways[slot] = placement.victim_ways[i];
        sets.tags[slot] = is_restored ? get_tag(placement.victim_ways[i].hash) : u8{0};
    });
}

// Erases rows from the cache. Rows flagged in is_kept [n] stay, but count as absent from the lower tier.
extern "C" __global__ void erase_cached_rows(CacheSets sets, const u64* hashes, const u32* tables, const u32* count,
                                             const u8* is_kept) {
    for_each_item<GROUP_WAYS>(*count, [&](Tile tile, u64 i) {
        const u32 slot = sets.find(tile, tables[i], hashes[i]);
        if (slot == NONE || tile.lane != 0) return;
        if (is_kept[i])
            sets.ways[slot].stored_updates = 0;
        else
            sets.tags[slot] = 0;
    });
}

// Looks up the first `count` rows. Sets lines [n]: 0 for a miss. Sets is_missing [n]: 1 for a miss, otherwise 0.
extern "C" __global__ void find_cached_rows(CacheSets sets, const u64* hashes, const u32* tables, const u32* count,
                                            u64 n, u64* lines, i32* is_missing) {
    for_each_item<GROUP_WAYS>(n, [&](Tile tile, u64 i) {
        const u32 slot = i < *count ? sets.find(tile, tables[i], hashes[i]) : NONE;
        if (tile.lane != 0) return;
        lines[i] = slot == NONE ? 0 : sets.line(slot);
        is_missing[i] = i < *count && slot == NONE;
    });
}

// Sets flags [num_sets * WAYS]: 1 for a dirty slot, otherwise 0.
extern "C" __global__ void find_dirty_slots(CacheSets sets, u8* flags) {
    for_each(static_cast<u64>(sets.num_sets) * WAYS, [&](u64 slot) { flags[slot] = sets.is_dirty(slot); });
}

// Sets flags to 0 or 1: victims [n] (dirty rows to evict), absent [n] (rows to fetch), overflows [n] (no slot).
extern "C" __global__ void flag_rows(Placement placement, const u32* count, u64 n, i32* victims, i32* absent,
                                     i32* overflows) {
    for_each(n, [&](u64 i) {
        const bool is_miss = i < *count && !placement.is_hit[i];
        victims[i] = is_miss && placement.evictions[i] == DIRTY;
        absent[i] = is_miss;
        overflows[i] = is_miss && placement.slots[i] == NONE;
    });
}
