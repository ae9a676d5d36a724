// Deduplicates one bucket's rows. One thread works on one bucket.
//
// Entries are ordered by position, so unique rows are numbered by first occurrence, with any number of threads.
#pragma once
#include "hash.h"

namespace tierbed {

constexpr u32 NONE = 0xFFFFFFFFu;

struct Entry {
    u64 hash;
    u32 table;
    u32 position;
};

struct UniqueRow {
    u64 hash;
    u32 table;
    u32 num_entries;
};

// A slot of the hash set. The tag has hash bits that do not choose the slot. Most comparisons need only the tag.
struct HashSlot {
    u32 tag;
    u32 row;
};

// Writes each entry's unique row to local_rows [n] and the unique rows to `rows`. Returns their number.
// hash_slots [num_slots]: memory for an open-addressing hash set; num_slots: a power of two, at least 2 * n.
TIERBED_FN u32 deduplicate_bucket(const Entry* entries, u32 n, HashSlot* hash_slots, u32 num_slots, u32* local_rows,
                                  UniqueRow* rows) {
    for (u32 i = 0; i < num_slots; ++i) hash_slots[i] = HashSlot{NONE, NONE};
    u32 num_unique = 0;
    for (u32 i = 0; i < n; ++i) {
        const Entry entry = entries[i];
        const u32 tag = static_cast<u32>(entry.hash >> 26);
        u32 slot = static_cast<u32>(entry.hash) & (num_slots - 1);
        for (;; slot = (slot + 1) & (num_slots - 1)) {
            const HashSlot occupant = hash_slots[slot];
            if (occupant.row == NONE) {
                hash_slots[slot] = HashSlot{tag, num_unique};
                rows[num_unique] = UniqueRow{entry.hash, entry.table, 1};
                local_rows[i] = num_unique++;
                break;
            }
            UniqueRow& row = rows[occupant.row];
            if (occupant.tag == tag && row.hash == entry.hash && row.table == entry.table) {
                ++row.num_entries;
                local_rows[i] = occupant.row;
                break;
            }
        }
    }
    return num_unique;
}

}  // namespace tierbed
