// Copies lines between device memory and page-locked host memory, where lower tiers read and write lines. Row i is
// copied if flags[i] is 1. Its position in host memory is prefix_sums[i] - 1. prefix_sums: the running sum of `flags`.
#include "layout.h"
#include "ops/kernels/hash.h"

using namespace tierbed;

// Writes tables and keys of flagged rows to host memory, at most `capacity` rows.
extern "C" __global__ void copy_keys_to_host(const u64* hashes, u64 hash_stride, const u32* row_tables,
                                             u64 table_stride, const i32* flags, const i32* prefix_sums, u64 n,
                                             u64 capacity, u32* tables, u64* keys,
                                             const __grid_constant__ SlotHash slot_hash) {
    for_each(n, [&](u64 i) {
        const u64 position = static_cast<u64>(prefix_sums[i]) - 1;
        if (!flags[i] || position >= capacity) return;
        tables[position] = row_tables[i * table_stride];
        keys[position] = slot_hash.key(row_tables[i * table_stride], hashes[i * hash_stride]);
    });
}

// Copies flagged lines to host memory, at most `capacity` lines.
extern "C" __global__ void copy_lines_to_host(const u64* lines, const i32* flags, const i32* prefix_sums, u64 n,
                                              u64 capacity, u64 memory) {
    for_each_item<COPY_LANES>(n, [&](Tile tile, u64 i) {
        const u64 position = static_cast<u64>(prefix_sums[i]) - 1;
        if (flags[i] && position < capacity) copy_line(tile, memory + position * SHAPE.line_bytes, lines[i], SHAPE);
    });
}

// Fills flagged lines from host memory, or with initial values if the lower tier did not find them.
extern "C" __global__ void lines_from_host(const u64* lines, const i32* flags, const i32* prefix_sums, u64 n,
                                           const u8* is_hit, u64 memory, const u64* hashes, const u32* tables,
                                           InitialRow initial, const __grid_constant__ SlotHash slot_hash) {
    for_each_item<WARP>(n, [&](Tile tile, u64 i) {
        if (!flags[i]) return;
        const u64 position = static_cast<u64>(prefix_sums[i]) - 1;
        if (is_hit[position])
            copy_line(tile, lines[i], memory + position * SHAPE.line_bytes, SHAPE);
        else
            initialise_line(tile, lines[i], SHAPE, initial, tables[i], slot_hash.key(tables[i], hashes[i]));
    });
}
