// Copies, initialises, counts and assigns lines, given their addresses.
#include "ops/kernels/hash.h"
#include "layout.h"
#include "items.h"

using namespace tierbed;

// Copies line from[i] to line to[i]. Skips i if one of the two addresses is 0.
extern "C" __global__ void copy_lines(const u64* from, const u64* to, u64 n) {
    for_each_item<COPY_LANES>(n, [&](Tile tile, u64 i) {
        if (from[i] && to[i]) copy_line(tile, to[i], from[i], SHAPE);
    });
}

// Writes initial values to the first `count` lines. Skips lines whose address or (with `flags`) flag is 0.
extern "C" __global__ void initialise_lines(const u64* hashes, const u32* tables, const u32* count, const u64* lines,
                                            const u8* flags, InitialRow initial,
                                            const __grid_constant__ SlotHash slot_hash) {
    for_each_item<WARP>(*count, [&](Tile tile, u64 i) {
        if (lines[i] == 0 || (flags && !flags[i])) return;
        initialise_line(tile, lines[i], SHAPE, initial, tables[i], slot_hash.key(tables[i], hashes[i]));
    });
}

// Counts, for each table, how many of the first `count` lines were ever written. Adds these counts to counts [tables].
extern "C" __global__ void count_written(const u64* lines, const u32* tables, const u32* count, u64* counts) {
    CoalescingCounter counter(counts);
    for_each(*count, [&](u64 i) {
        if (lines[i] && row_counters(lines[i], SHAPE)->updates) counter.add(tables[i]);
    });
    counter.flush();
}

// Writes values [positions, dim] to embeddings. A row's last value wins. Counts first writes by table.
extern "C" __global__ void assign_rows(const u64* lines, const u32* tables, const u32* offsets, const u32* positions,
                                       const u32* count, const float* values, u32 step, u64* first_write_counts,
                                       const u32* faults) {
    if (*faults) return;
    CoalescingCounter counter(first_write_counts);
    for_each_item<WARP>(*count, [&](Tile tile, u64 i) {
        const u64 last = positions[offsets[i + 1] - 1];
        set_embedding(tile, lines[i], values + last * SHAPE.dim, SHAPE);
        if (tile.lane != 0) return;
        RowCounters* counters = row_counters(lines[i], SHAPE);
        if (counters->updates == 0) counter.add(tables[i]);
        if (counters->updates != 0xFFFFFFFFu) counters->updates += 1;
        counters->step = step;
    });
    counter.flush();
}
