// A cache in device memory in front of a full table with its lines in page-locked memory of the host. Kernels alone
// move rows. Every resident row has a line below, so it can always be written back.
#include "admission.h"
#include "store/cuda/segments.h"
#include "ops/cuda/items.h"

using namespace tierbed;

namespace {

// counts [4]: hits and misses in the table below, rows written back, lookups that the cache served
enum Count : u32 { FOUND, NEW, WRITTEN, SERVED };

using Counts = CountsOf<4>;

TIERBED_FN void write_row(Tile tile, const LineIndex& below, const Way& way, u64 line) {
    copy_line(tile, below.find(tile, way.hash, way.table), line, SHAPE);
}

}  // namespace

// Writes back the victims of the first `count` rows. It runs before any row is fetched, since the batch may need a
// victim.
extern "C" __global__ void write_back(LineIndex below, Admission all, const u32* count, u64* counts) {
    Counts counted;
    for_each_item<COPY_LANES>(*count, [&](Tile tile, u64 i) {
        if (all.gone[i] != DIRTY) return;
        write_row(tile, below, all.before[i], all.lines[i]);
        counted.found[WRITTEN] += tile.lane == 0;
    });
    counted.add_to(counts);
}

// lines [n]: where each of the first `count` rows is below -> where it is used, with the row there. A row without a
// slot is used below; one without a place there, `nowhere`, stays so. asked [tables, 2]: misses.
extern "C" __global__ void fetch(Cache cache, Admission all, const u64* hashes, const u32* tables, const u32* count,
                                    u64* lines, u64 nowhere, InitialRow initial,
                                    const __grid_constant__ SlotHash slot_hash, u64* counts, Counters asked) {
    Counts counted;
    Tally rows(asked);
    for_each_item<COPY_LANES>(*count, [&](Tile tile, u64 i) {
        const u64 below = lines[i];
        const u64 up = all.lines[i] ? all.lines[i] : below;
        synchronise(tile);  // every lane has read `lines`
        if (tile.lane == 0) lines[i] = up;
        if (all.hit[i] || below == nowhere) return;
        const u32 stored = record(below, SHAPE)->updates;
        synchronise(tile);  // every lane has read the record, which may be that of `up`
        if (tile.lane == 0) {
            ++counted.found[stored ? FOUND : NEW];
            rows.add(place_of(tables[i], true));
            if (all.slots[i] != NONE) cache.ways[all.slots[i]].stored = stored;
        }
        if (stored == 0)
            initialise_line(tile, up, SHAPE, initial, tables[i], slot_hash.key(tables[i], hashes[i]));
        else if (up != below)
            copy_line(tile, up, below, SHAPE);
    });
    rows.end();
    counted.add_to(counts);
}

// lines [n]: where each of the first `count` rows can be read, 0 where it is nowhere; absent [n]: 1 for those, else 0;
// asked [tables, 2]: hits and misses.
extern "C" __global__ void locate_rows(Cache cache, LineIndex table, const u64* hashes, const u32* tables,
                                       const u32* count, u64 n, u64* lines, i32* absent, u64* counts, Counters asked) {
    Counts counted;
    Tally rows(asked);
    for_each_item<GROUP>(n, [&](Tile tile, u64 i) {
        u64 line = 0;
        if (i < *count) {
            const u32 slot = cache.find(tile, tables[i], hashes[i]);
            if (slot != NONE) line = cache.line(slot);
            const u64 below = line ? 0 : table.find(tile, hashes[i], tables[i]);
            const bool stored = below && record(below, SHAPE)->updates != 0;
            if (tile.lane == 0) ++counted.found[line ? SERVED : stored ? FOUND : NEW];
            if (tile.lane == 0) rows.add(place_of(tables[i], line == 0));
            if (stored) line = below;
        }
        if (tile.lane != 0) return;
        lines[i] = line;
        absent[i] = i < *count && line == 0;
    });
    rows.end();
    counted.add_to(counts);
}

// Brings every dirty row down; it stays up.
extern "C" __global__ void flush_rows(Cache cache, LineIndex below, u64* counts) {
    Counts counted;
    for_each_item<COPY_LANES>(static_cast<u64>(cache.sets) * WAYS, [&](Tile tile, u64 slot) {
        if (!cache.dirty(slot)) return;
        write_row(tile, below, cache.ways[slot], cache.line(slot));
        synchronise(tile);
        if (tile.lane == 0) cache.ways[slot].stored = cache.updates(slot);
        counted.found[WRITTEN] += tile.lane == 0;
    });
    counted.add_to(counts);
}
