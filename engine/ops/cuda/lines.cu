// What the tiers do with lines by their addresses: copy, initialise, count, assign.
#include "ops/kernels/hash.h"
#include "layout.h"
#include "items.h"

using namespace tierbed;

// Copies line from[i] to to[i]; 0 in either stays.
extern "C" __global__ void copy_lines(const u64* from, const u64* to, u64 n) {
    for_each_item<COPY_LANES>(n, [&](Tile tile, u64 i) {
        if (from[i] && to[i]) copy_line(tile, to[i], from[i], SHAPE);
    });
}

// Gives each of the first `count` lines that is not 0 its row's initial values; with `only`, those flagged there alone.
extern "C" __global__ void initialise_lines(const u64* hashes, const u32* tables, const u32* count, const u64* lines,
                                            const u8* only, InitialRow initial, const __grid_constant__ SlotHash slot_hash) {
    for_each_item<WARP>(*count, [&](Tile tile, u64 i) {
        if (lines[i] == 0 || (only && !only[i])) return;
        initialise_line(tile, lines[i], SHAPE, initial, tables[i], slot_hash.key(tables[i], hashes[i]));
    });
}

// written [tables]: how many of the first `count` lines were ever written.
extern "C" __global__ void count_written(const u64* lines, const u32* tables, const u32* count, u64* written) {
    Tally counted(written);
    for_each(*count, [&](u64 i) {
        if (lines[i] && record(lines[i], SHAPE)->updates) counted.add(tables[i]);
    });
    counted.end();
}

// values [size, dim] -> the embeddings of their rows, the last occurrence standing. written [tables] counts first
// writes.
extern "C" __global__ void assign_rows(const u64* lines, const u32* tables, const u32* offsets, const u32* positions,
                                       const u32* count, const float* values, u32 step, u64* written,
                                       const u32* faults) {
    if (*faults) return;
    Tally counted(written);
    for_each_item<WARP>(*count, [&](Tile tile, u64 i) {
        const u64 last = positions[offsets[i + 1] - 1];
        set_embedding(tile, lines[i], values + last * SHAPE.dim, SHAPE);
        if (tile.lane != 0) return;
        Record* lifecycle = record(lines[i], SHAPE);
        if (lifecycle->updates == 0) counted.add(tables[i]);
        if (lifecycle->updates != 0xFFFFFFFFu) lifecycle->updates += 1;
        lifecycle->step = step;
    });
    counted.end();
}
