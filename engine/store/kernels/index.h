// The index of a bucket of the full table: open addressing with linear probing over the low bits of the hash.
//
// A slot is free while its row is 0, so zeroed memory is an empty index and every key is legal. `find_row` may run
// concurrently with itself; `insert_row` and `erase_row` are exclusive within a bucket, `erase_row` of readers as well,
// and the caller keeps some slots free.
#pragma once
#include "ops/kernels/hash.h"

namespace tierbed {

struct Slot {
    u64 hash;
    u32 table;
    u32 row;  // the row's number + 1
};

struct IndexView {
    Slot* slots;
    u32 mask;  // slots - 1, a power of two
};

TIERBED_FN u32 home_slot(const IndexView& index, u64 hash) { return static_cast<u32>(hash) & index.mask; }

// The row's number + 1, or 0.
TIERBED_FN u32 find_row(Tile tile, const IndexView& index, u64 hash, u32 table) {
    for (u32 base = home_slot(index, hash);; base = (base + tile.size) & index.mask) {
        const Slot& slot = index.slots[(base + tile.lane) & index.mask];
        const u32 stops = ballot(tile, slot.row == 0 || (slot.hash == hash && slot.table == table));
        if (stops) return index.slots[(base + lowest_bit(stops)) & index.mask].row;
    }
}

// Inserts a row that the index does not have.
TIERBED_FN void insert_row(const IndexView& index, const Slot& slot) {
    u32 at = home_slot(index, slot.hash);
    while (index.slots[at].row != 0) at = (at + 1) & index.mask;
    index.slots[at] = slot;
}

// Erases a row and returns its number + 1, or 0 if the index does not have it. Later rows whose probe sequence crosses
// the free slot are shifted back, so no tombstones remain. For one thread or lane.
TIERBED_FN u32 erase_row(const IndexView& index, u64 hash, u32 table) {
    u32 hole = home_slot(index, hash);
    while (index.slots[hole].row != 0 && (index.slots[hole].hash != hash || index.slots[hole].table != table))
        hole = (hole + 1) & index.mask;
    const u32 row = index.slots[hole].row;
    if (row == 0) return 0;
    for (u32 at = (hole + 1) & index.mask; index.slots[at].row != 0; at = (at + 1) & index.mask) {
        const u32 from_home = (at - home_slot(index, index.slots[at].hash)) & index.mask;
        if (from_home < ((at - hole) & index.mask)) continue;  // its home is after the hole
        index.slots[hole] = index.slots[at];
        hole = at;
    }
    index.slots[hole].row = 0;
    return row;
}

}  // namespace tierbed
