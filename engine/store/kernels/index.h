// The index of one bucket of the full table: open addressing with linear probing by the low bits of the hash.
//
// A slot with value 0 is free, so zeroed memory is an empty index. No key marks a free slot, so all keys are valid.
// The caller keeps some slots free. `find_value` may run concurrently with itself. Only one thread at a time may call
// `insert_row` or `erase_row` for a bucket. No thread may read the bucket during `erase_row`.
#pragma once
#include "ops/kernels/hash.h"

namespace tierbed {

struct Slot {
    u64 hash;
    u32 table;
    u32 value;  // in the full table: row number + 1; 0 if the slot is free
};

struct IndexView {
    Slot* slots;
    u32 mask;  // slots - 1; the number of slots is a power of two
};

TIERBED_FN u32 get_home_slot(const IndexView& index, u64 hash) { return static_cast<u32>(hash) & index.mask; }

// Returns the row's value, or 0 if the row is absent.
TIERBED_FN u32 find_value(Tile tile, const IndexView& index, u64 hash, u32 table) {
    for (u32 base = get_home_slot(index, hash);; base = (base + tile.size) & index.mask) {
        const Slot& slot = index.slots[(base + tile.lane) & index.mask];
        const u32 stops = ballot(tile, slot.value == 0 || (slot.hash == hash && slot.table == table));
        if (stops) return index.slots[(base + lowest_bit(stops)) & index.mask].value;
    }
}

// Inserts a row that is not in the index.
TIERBED_FN void insert_row(const IndexView& index, const Slot& slot) {
    u32 position = get_home_slot(index, slot.hash);
    while (index.slots[position].value != 0) position = (position + 1) & index.mask;
    index.slots[position] = slot;
}

// Erases a row and returns its value, or 0 if the row is absent. For one thread or lane. Later rows whose probe
// sequence crosses the free slot move back, so no tombstones remain.
TIERBED_FN u32 erase_row(const IndexView& index, u64 hash, u32 table) {
    u32 hole = get_home_slot(index, hash);
    while (index.slots[hole].value != 0 && (index.slots[hole].hash != hash || index.slots[hole].table != table))
        hole = (hole + 1) & index.mask;
    const u32 value = index.slots[hole].value;
    if (value == 0) return 0;
    for (u32 next = (hole + 1) & index.mask; index.slots[next].value != 0; next = (next + 1) & index.mask) {
        const u32 from_home = (next - get_home_slot(index, index.slots[next].hash)) & index.mask;
        if (from_home < ((next - hole) & index.mask)) continue;  // the row's home slot is after the hole
        index.slots[hole] = index.slots[next];
        hole = next;
    }
    index.slots[hole].value = 0;
    return value;
}

}  // namespace tierbed
