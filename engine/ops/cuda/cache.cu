// A set-associative write-back cache in device memory.
//
// Rows of a call are distinct and come sorted (by the caller, stably) by set and, where a set has several buckets, by
// bucket: one tile takes all rows of a set, in this order, so it decides as the CPU's cache does.
#include "cache.h"
#include "layout.h"

using namespace tierbed;

namespace {

// counts [5]
enum Count : u32 { HITS, MISSES, EVICTIONS_CLEAN, EVICTIONS_DIRTY, OVERFLOWS };

struct Counts {
    u32 found[5] = {};
};

// What became of each row: its slot or NONE, its line or 0, whether it was there, and what its slot held before.
struct Admission {
    u32* slots;
    u64* lines;
    u8* hit;
    Way* before;
};

// How many numbers a set has to sort by.
TIERBED_FN u32 parts_of_set(u32 sets) { return sets < BUCKETS ? BUCKETS : 1; }

TIERBED_FN bool note_hit(const Admission& all, u64 row, Way* set, u32 way, u32 number, u32 tick, u64 memory) {
    const bool hit = way != NONE;
    const u32 slot = hit ? number * WAYS + way : NONE;
    all.hit[row] = hit;
    all.slots[row] = slot;
    all.lines[row] = hit ? memory + static_cast<u64>(slot) * SHAPE.line_bytes : 0;
    all.before[row] = Way{0, 0, 0, 0, FREE};
    if (hit) {
        set[way].tick = tick;
        ++set[way].pins;
    }
    return hit;
}

TIERBED_FN void admit_miss(const Admission& all, u64 row, Way* set, u32 number, const Way& wanted, u64 memory,
                           Counts& counted) {
    const u32 way = victim_way(set, wanted.tick);
    ++counted.found[MISSES];
    if (way == NONE) {
        ++counted.found[OVERFLOWS];
        return;
    }
    const u32 slot = number * WAYS + way;
    all.slots[row] = slot;
    all.lines[row] = memory + static_cast<u64>(slot) * SHAPE.line_bytes;
    all.before[row] = set[way];
    counted.found[EVICTIONS_CLEAN] += set[way].state == CLEAN;
    counted.found[EVICTIONS_DIRTY] += set[way].state == DIRTY;
    set[way] = wanted;
}

}  // namespace

// places [n]: what to sort the first `count` rows by, behind them more than any row's
extern "C" __global__ void place_rows(const u64* hashes, const u32* count, u64 n, u32 sets, u32* places) {
    const u32 parts = parts_of_set(sets);
    for_each(n, [&](u64 i) {
        places[i] = i < *count ? set_of(hashes[i], sets) * parts + bucket_of(hashes[i]) % parts : sets * parts;
    });
}

// places [n], sorted, and order [n], the rows in that order
extern "C" __global__ void admit_rows(Way* ways, u32 sets, u64 memory, u32 tick, const u64* hashes, const u32* tables,
                                      const u32* places, const i64* order, u64 n, Admission all, u64* counts) {
    const u32 parts = parts_of_set(sets);
    Counts counted;
    for_each_item<WAYS>(n, [&](Tile tile, u64 first) {
        const u32 number = places[first] / parts;
        if (number == sets || (first > 0 && places[first - 1] / parts == number)) return;
        Way* set = ways + static_cast<u64>(number) * WAYS;
        for (u64 begin = first, end = first; begin < n && places[begin] / parts == number; begin = end) {
            while (end < n && places[end] == places[begin]) ++end;
            // hits first, so that no miss takes the place of a row that is needed
            for (u64 i = begin; i < end; ++i) {
                const u64 row = static_cast<u64>(order[i]);
                const u32 way = probe_set(tile, set, tables[row], hashes[row]);
                if (tile.lane == 0) counted.found[HITS] += note_hit(all, row, set, way, number, tick, memory);
            }
            for (u64 i = begin; tile.lane == 0 && i < end; ++i) {
                const u64 row = static_cast<u64>(order[i]);
                const Way wanted{hashes[row], tables[row], tick, 1, CLEAN};
                if (!all.hit[row]) admit_miss(all, row, set, number, wanted, memory, counted);
            }
            synchronise(tile);
        }
    });
    for (u32 k = 0; k < 5; ++k)
        if (counted.found[k]) atomicAdd(&counts[k], static_cast<u64>(counted.found[k]));
}

// Ends the pins of an admission whose lines were filled.
extern "C" __global__ void release_rows(Way* ways, const u32* slots, const u32* count, u32 dirty) {
    for_each(*count, [&](u64 i) {
        if (slots[i] == NONE) return;
        --ways[slots[i]].pins;
        if (dirty) ways[slots[i]].state = DIRTY;
    });
}

// Undoes an admission. With `restore` victims come back, without their slots become free.
extern "C" __global__ void cancel_rows(Way* ways, Admission all, const u32* count, u32 restore) {
    for_each(*count, [&](u64 i) {
        if (all.slots[i] == NONE) return;
        if (all.hit[i])
            --ways[all.slots[i]].pins;
        else
            ways[all.slots[i]] = restore ? all.before[i] : Way{0, 0, 0, 0, FREE};
    });
}

// lines [n]: where each of the first `count` rows is, 0 where it is not up; missing [n]: 1 for the latter, else 0
extern "C" __global__ void find_cached(const Way* ways, u32 sets, u64 memory, const u64* hashes, const u32* tables,
                                       const u32* count, u64 n, u64* lines, i32* missing) {
    for_each_item<WAYS>(n, [&](Tile tile, u64 i) {
        u32 way = NONE, set = 0;
        if (i < *count) {
            set = set_of(hashes[i], sets);
            way = probe_set(tile, ways + static_cast<u64>(set) * WAYS, tables[i], hashes[i]);
        }
        if (tile.lane != 0) return;
        lines[i] = way == NONE ? 0 : memory + (static_cast<u64>(set) * WAYS + way) * SHAPE.line_bytes;
        missing[i] = i < *count && way == NONE;
    });
}

// flags [n] of 0 and 1: victims (dirty rows that gave way), absent (rows to fetch), overflows (those without a slot)
extern "C" __global__ void sort_out(Admission all, const u32* count, u64 n, i32* victims, i32* absent, i32* overflows) {
    for_each(n, [&](u64 i) {
        const bool missed = i < *count && !all.hit[i];
        victims[i] = missed && all.slots[i] != NONE && all.before[i].state == DIRTY;
        absent[i] = missed;
        overflows[i] = missed && all.slots[i] == NONE;
    });
}

// Identities of victims, by ranks, the running sum of their flags, to host memory for `room` of them.
extern "C" __global__ void list_victims(Admission all, const i32* flags, const i32* ranks, u64 n, u64 room, u32* tables,
                                        u64* keys) {
    for_each(n, [&](u64 i) {
        const u64 at = static_cast<u64>(ranks[i]) - 1;
        if (!flags[i] || at >= room) return;
        tables[at] = all.before[i].table;
        keys[at] = key_of(all.before[i].table, all.before[i].hash);
    });
}
