// Deduplicates the (table, key) pairs of one bucket.
//
// Entries come in the order of their positions, so unique rows are numbered by first occurrence, whatever the threads.
// One tile works on one bucket. `scratch` is an open-addressing set of entry numbers, `slots` (a power of two) at least
// twice the entries.
#pragma once
#include "hash.h"

namespace tierbed {

struct Entry {
    u64 key;
    u32 table;
    u32 position;
};

constexpr u32 NONE = 0xFFFFFFFFu;

// local [n]: the unique row of each entry; firsts [unique]: the entry that introduced it; counts [unique]. Returns
// unique.
TIERBED_FN u32 unique_bucket(const Entry* entries, u32 n, u32* scratch, u32 slots, u32* local, u32* firsts,
                             u32* counts) {
    for (u32 i = 0; i < slots; ++i) scratch[i] = NONE;
    u32 unique = 0;
    for (u32 i = 0; i < n; ++i) {
        const Entry& entry = entries[i];
        u32 slot = static_cast<u32>(hash_row(entry.table, entry.key)) & (slots - 1);
        u32 row = scratch[slot];
        while (row != NONE && (entries[firsts[row]].key != entry.key || entries[firsts[row]].table != entry.table)) {
            slot = (slot + 1) & (slots - 1);
            row = scratch[slot];
        }
        if (row == NONE) {
            row = unique++;
            scratch[slot] = row;
            firsts[row] = i;
            counts[row] = 0;
        }
        local[i] = row;
        ++counts[row];
    }
    return unique;
}

}  // namespace tierbed
