// Lines between device memory and the host memory that tiers below read and write: page-locked, reached by its address.
//
// flags [n] of 0 and 1 say which rows go; ranks [n], their running sum, say where.
#include "layout.h"
#include "ops/kernels/hash.h"

using namespace tierbed;

// Identities of flagged rows to host memory for `room` of them, by ranks. Steps: from a row's hash or table to the next.
extern "C" __global__ void list_flagged(const u64* hashes, u64 hash_step, const u32* row_tables, u64 table_step,
                                        const i32* flags, const i32* ranks, u64 n, u64 room, u32* tables, u64* keys,
                                        const __grid_constant__ SlotHash slot_hash) {
    for_each(n, [&](u64 i) {
        const u64 at = static_cast<u64>(ranks[i]) - 1;
        if (!flags[i] || at >= room) return;
        tables[at] = row_tables[i * table_step];
        keys[at] = slot_hash.key(row_tables[i * table_step], hashes[i * hash_step]);
    });
}

// Copies flagged lines to host memory for `room` lines, by ranks.
extern "C" __global__ void lines_to_host(const u64* lines, const i32* flags, const i32* ranks, u64 n, u64 room,
                                         u64 memory) {
    for_each_item<COPY_LANES>(n, [&](Tile tile, u64 i) {
        const u64 at = static_cast<u64>(ranks[i]) - 1;
        if (flags[i] && at < room) copy_line(tile, memory + at * SHAPE.line_bytes, lines[i], SHAPE);
    });
}

// Fills flagged lines from host memory where the tier below found them, with initial values where it did not.
extern "C" __global__ void lines_from_host(const u64* lines, const i32* flags, const i32* ranks, u64 n, const u8* found,
                                           u64 memory, const u64* hashes, const u32* tables, InitialRow initial,
                                           const __grid_constant__ SlotHash slot_hash) {
    for_each_item<WARP>(n, [&](Tile tile, u64 i) {
        if (!flags[i]) return;
        const u64 at = static_cast<u64>(ranks[i]) - 1;
        if (found[at])
            copy_line(tile, lines[i], memory + at * SHAPE.line_bytes, SHAPE);
        else
            initialise_line(tile, lines[i], SHAPE, initial, tables[i], slot_hash.key(tables[i], hashes[i]));
    });
}
