// The full table in device memory: one open-addressing index, lines in segments that double in size and never move.
//
// Rows of one call are distinct, so inserting them races for slots alone, and a slot is claimed by its `row`. New rows
// are numbered by their rank among the missing: neither numbers nor values depend on the order of threads.
#include "layout.h"
#include "table.h"

using namespace tierbed;

namespace {

constexpr u32 PROBE_LANES = 8;  // 8 slots are 128 bytes

// Where lines are: segment k holds 1 << (base_bits + k) of them.
struct Lines {
    const u64* segments;
    u64 room;  // lines that there is memory for
    u32 base_bits;

    TIERBED_FN u64 address(u64 row) const {
        const u64 r = row + (1ull << base_bits);
        const u32 segment = 63 - __clzll(static_cast<long long>(r)) - base_bits;
        return segments[segment] + (r - (1ull << (segment + base_bits))) * SHAPE.line_bytes;
    }
};

TIERBED_FN void claim_slot(const IndexView& index, const Slot& slot) {
    u32 at = home_slot(index, slot.hash);
    while (atomicCAS(&index.slots[at].row, 0u, slot.row) != 0) at = (at + 1) & index.mask;
    index.slots[at].hash = slot.hash;
    index.slots[at].table = slot.table;
}

}  // namespace

// lines [n]: where each of the first `count` rows is, 0 where it is absent; missing [n]: 1 where it is absent, else 0
extern "C" __global__ void find_rows(Slot* slots, u32 mask, Lines memory, const u64* hashes, const u32* tables,
                                     const u32* count, u64 n, u64* lines, i32* missing) {
    const u64 rows = *count;
    for_each_item<PROBE_LANES>(n, [&](Tile tile, u64 i) {
        const u32 row = i < rows ? find_row(tile, IndexView{slots, mask}, hashes[i], tables[i]) : 0;
        if (tile.lane != 0) return;
        lines[i] = row ? memory.address(row - 1) : 0;
        missing[i] = i < rows && row == 0;
    });
}

// ranks [n], the running sum of `missing`: puts the missing rows behind the `held` rows of the table and initialises
// them. Where they do not all fit, or after a fault, none is put and `nowhere` is the line of each.
extern "C" __global__ void insert_rows(Slot* slots, u32 mask, Lines memory, const u64* held, const u64* hashes,
                                       const u32* tables, const u32* count, const i32* ranks, u64 n, u64* lines,
                                       InitialRow initial, u64 nowhere, u32* faults) {
    const u64 before = *held;
    const bool fits = before + static_cast<u32>(ranks[n - 1]) <= memory.room;
    if (*faults || !fits) {
        if (!fits && blockIdx.x == 0 && threadIdx.x == 0) atomicOr(faults, NO_ROOM);
        for_each(*count, [&](u64 i) {
            if (lines[i] == 0) lines[i] = nowhere;
        });
        return;
    }
    for_each_item<WARP>(*count, [&](Tile tile, u64 i) {
        if (lines[i]) return;
        synchronise(tile);  // every lane has read `lines`
        const u64 row = before + static_cast<u32>(ranks[i]) - 1;
        const u64 line = memory.address(row);
        if (tile.lane == 0) {
            claim_slot(IndexView{slots, mask}, Slot{hashes[i], tables[i], static_cast<u32>(row + 1)});
            lines[i] = line;
        }
        initialise_line(tile, line, SHAPE, initial, tables[i], key_of(tables[i], hashes[i]));
    });
}

// After `insert_rows`. counts: rows held, hits, misses.
extern "C" __global__ void count_held(const i32* ranks, u64 n, u64* counts, const u32* faults) {
    if (blockIdx.x == 0 && threadIdx.x == 0 && !*faults) counts[0] += static_cast<u32>(ranks[n - 1]);
}

// Of the first `count` rows, those that were found are hits.
extern "C" __global__ void count_asked(const u32* count, const i32* ranks, u64 n, u64* counts) {
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
    const u64 missing = static_cast<u32>(ranks[n - 1]);
    counts[1] += *count - missing;
    counts[2] += missing;
}

// Puts the rows of an index into a larger one, empty before.
extern "C" __global__ void move_rows(const Slot* slots, u64 n, Slot* larger, u32 mask) {
    for_each(n, [&](u64 i) {
        if (slots[i].row) claim_slot(IndexView{larger, mask}, slots[i]);
    });
}

// Every row by its number: hashes, tables and lines [held], and how often it was written
extern "C" __global__ void list_rows(const Slot* slots, u64 n, Lines memory, u64* hashes, u32* tables, u64* lines,
                                     u32* updates) {
    for_each(n, [&](u64 i) {
        if (slots[i].row == 0) return;
        const u32 row = slots[i].row - 1;
        hashes[row] = slots[i].hash;
        tables[row] = slots[i].table;
        lines[row] = memory.address(row);
        updates[row] = record(lines[row], SHAPE)->updates;
    });
}
