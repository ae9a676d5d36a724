// The index of one bucket of the full table: open addressing with linear probing over the low bits of the hash.
//
// A slot is free when its row is NONE, so every key value is legal. `find` may run concurrently with itself; `insert`
// is exclusive within a bucket, and the caller keeps the load factor below one.
#pragma once
#include "hash.h"
#include "unique.h"

namespace tierbed {

struct Slot {
    u64 key;
    u32 table;
    u32 row;
};

struct IndexView {
    Slot* slots;
    u32 mask;  // slots - 1, a power of two
};

TIERBED_FN u32 home_slot(const IndexView& index, u64 hash) { return static_cast<u32>(hash) & index.mask; }

// The row, or NONE.
TIERBED_FN u32 find_row(Tile tile, const IndexView& index, u64 hash, u32 table, u64 key) {
    for (u32 base = home_slot(index, hash);; base = (base + tile.size) & index.mask) {
        const Slot& slot = index.slots[(base + tile.lane) & index.mask];
        const bool free = slot.row == NONE;
        const u32 stops = ballot(tile, free || (slot.key == key && slot.table == table));
        if (stops) {
            const u32 row = index.slots[(base + lowest_bit(stops)) & index.mask].row;
            return row;
        }
    }
}

// Puts a row that the index does not hold.
TIERBED_FN void insert_row(const IndexView& index, u64 hash, u32 table, u64 key, u32 row) {
    u32 at = home_slot(index, hash);
    while (index.slots[at].row != NONE) at = (at + 1) & index.mask;
    index.slots[at] = Slot{key, table, row};
}

}  // namespace tierbed
