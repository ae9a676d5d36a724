// Deduplicates the rows of one bucket.
//
// Entries are in the order of their positions, so unique rows are numbered by first occurrence, with any number of
// threads. One tile works on one bucket. `marks` is an open-addressing set of unique rows, whose `size` is a power of
// two and at least twice the number of entries.
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
    u32 count;  // entries
};

// The tag, bits of the hash that do not choose the slot, decides most probes.
struct Mark {
    u32 tag;
    u32 row;
};

// local [n]: the unique row of each entry; rows [unique]. Returns unique.
TIERBED_FN u32 unique_bucket(const Entry* entries, u32 n, Mark* marks, u32 size, u32* local, UniqueRow* rows) {
    for (u32 i = 0; i < size; ++i) marks[i] = Mark{NONE, NONE};
    u32 unique = 0;
    for (u32 i = 0; i < n; ++i) {
        const Entry entry = entries[i];
        const u32 tag = static_cast<u32>(entry.hash >> 26);
        u32 at = static_cast<u32>(entry.hash) & (size - 1);
        for (;; at = (at + 1) & (size - 1)) {
            const Mark seen = marks[at];
            if (seen.row == NONE) {
                marks[at] = Mark{tag, unique};
                rows[unique] = UniqueRow{entry.hash, entry.table, 1};
                local[i] = unique++;
                break;
            }
            UniqueRow& row = rows[seen.row];
            if (seen.tag == tag && row.hash == entry.hash && row.table == entry.table) {
                ++row.count;
                local[i] = seen.row;
                break;
            }
        }
    }
    return unique;
}

}  // namespace tierbed
