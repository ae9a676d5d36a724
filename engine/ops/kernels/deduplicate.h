// Deduplicates one bucket's rows. One tile works on one bucket.
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
    u32 count;  // entries
};

// A slot of the hash set. The tag has hash bits that do not choose the slot. Comparing tags settles most probes.
struct Mark {
    u32 tag;
    u32 row;
};

// Writes each entry's unique row to local [n] and the unique rows to `rows`. Returns their number.
// marks [size]: memory for an open-addressing hash set; size: a power of two, at least 2 * n.
TIERBED_FN u32 unique_bucket(const Entry* entries, u32 n, Mark* marks, u32 size, u32* local, UniqueRow* rows) {
    for (u32 i = 0; i < size; ++i) marks[i] = Mark{NONE, NONE};
    u32 unique = 0;
    for (u32 i = 0; i < n; ++i) {
        const Entry entry = entries[i];
        const u32 tag = static_cast<u32>(entry.hash >> 26);
        u32 slot = static_cast<u32>(entry.hash) & (size - 1);
        for (;; slot = (slot + 1) & (size - 1)) {
            const Mark seen = marks[slot];
            if (seen.row == NONE) {
                marks[slot] = Mark{tag, unique};
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
