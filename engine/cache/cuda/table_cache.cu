// A cache in device memory above a full table whose lines are in page-locked host memory. Only kernels copy rows. Each
// resident row also owns a line in the full table, so the row can always be written back.
#include "placement.h"
#include "store/cuda/segments.h"
#include "ops/cuda/items.h"

using namespace tierbed;

namespace {

// counts [4]: hits and misses in the lower table, rows written back, lookups that the cache served
enum CountIndex : u32 { LOWER_HIT, LOWER_MISS, WRITTEN, CACHE_HIT };

using Counts = ThreadCounters<4>;

TIERBED_FN void write_row(Tile tile, const LineIndex& lower_table, const Way& way, u64 line) {
    copy_line(tile, lower_table.find(tile, way.hash, way.table), line, SHAPE);
}

}  // namespace

// Writes back the victims of the first `count` rows. Runs before rows are fetched, since the batch may need a victim.
extern "C" __global__ void write_victims(LineIndex lower_table, Placement placement, const u32* count, u64* counts) {
    Counts thread_counts;
    for_each_item<COPY_LANES>(*count, [&](Tile tile, u64 i) {
        if (placement.evictions[i] != DIRTY) return;
        write_row(tile, lower_table, placement.victim_ways[i], placement.lines[i]);
        thread_counts.values[WRITTEN] += tile.lane == 0;
    });
    thread_counts.add_to(counts);
}

// Fetches the first `count` rows. On entry, lines [n] has each row's line in the lower table. On return, a row with a
// slot has the slot's line; other rows keep the table's line. Skips rows at `zero_line`. Adds misses to `hit_counters`.
extern "C" __global__ void fetch(CacheSets sets, Placement placement, const u64* hashes, const u32* tables,
                                 const u32* count, u64* lines, u64 zero_line, InitialRow initial,
                                 const __grid_constant__ SlotHash slot_hash, u64* counts, DeviceCounters hit_counters) {
    Counts thread_counts;
    CoalescingCounter counter(hit_counters);
    for_each_item<COPY_LANES>(*count, [&](Tile tile, u64 i) {
        const u64 lower_line = lines[i];
        const u64 used_line = placement.lines[i] ? placement.lines[i] : lower_line;
        synchronise(tile);  // all lanes have read `lines`
        if (tile.lane == 0) lines[i] = used_line;
        if (placement.is_hit[i] || lower_line == zero_line) return;
        const u32 stored = row_counters(lower_line, SHAPE)->updates;
        synchronise(tile);  // all lanes must read the counters before `used_line` changes
        if (tile.lane == 0) {
            ++thread_counts.values[stored ? LOWER_HIT : LOWER_MISS];
            counter.add(hit_index(tables[i], false));
            if (placement.slots[i] != NONE) sets.ways[placement.slots[i]].stored_updates = stored;
        }
        if (stored == 0)
            initialise_line(tile, used_line, SHAPE, initial, tables[i], slot_hash.key(tables[i], hashes[i]));
        else if (used_line != lower_line)
            copy_line(tile, used_line, lower_line, SHAPE);
    });
    counter.flush();
    thread_counts.add_to(counts);
}

// Looks up the first `count` rows for reading. If no tier has row i, sets lines[i] to 0 and absent[i] to 1. Otherwise
// sets lines[i] to the row's line and absent[i] to 0. Counts hits and misses in hit_counters [tables, 2].
extern "C" __global__ void look_up_rows(CacheSets sets, LineIndex table, const u64* hashes, const u32* tables,
                                        const u32* count, u64 n, u64* lines, i32* absent, u64* counts,
                                        DeviceCounters hit_counters) {
    Counts thread_counts;
    CoalescingCounter counter(hit_counters);
    for_each_item<GROUP_WAYS>(n, [&](Tile tile, u64 i) {
        u64 line = 0;
        if (i < *count) {
            const u32 slot = sets.find(tile, tables[i], hashes[i]);
            if (slot != NONE) line = sets.line(slot);
            const u64 lower_line = line ? 0 : table.find(tile, hashes[i], tables[i]);
            const bool stored = lower_line && row_counters(lower_line, SHAPE)->updates != 0;
            if (tile.lane == 0) ++thread_counts.values[line ? CACHE_HIT : stored ? LOWER_HIT : LOWER_MISS];
            if (tile.lane == 0) counter.add(hit_index(tables[i], line != 0));
            if (stored) line = lower_line;
        }
        if (tile.lane != 0) return;
        lines[i] = line;
        absent[i] = i < *count && line == 0;
    });
    counter.flush();
    thread_counts.add_to(counts);
}

// Writes dirty rows back to the lower table, and keeps the rows in the cache.
extern "C" __global__ void flush_rows(CacheSets sets, LineIndex lower_table, u64* counts) {
    Counts thread_counts;
    for_each_item<COPY_LANES>(static_cast<u64>(sets.num_sets) * WAYS, [&](Tile tile, u64 slot) {
        if (!sets.is_dirty(slot)) return;
        write_row(tile, lower_table, sets.ways[slot], sets.line(slot));
        synchronise(tile);
        if (tile.lane == 0) sets.ways[slot].stored_updates = sets.updates(slot);
        thread_counts.values[WRITTEN] += tile.lane == 0;
    });
    thread_counts.add_to(counts);
}
