// The unique rows of a batch, numbered by first occurrence whatever the order of threads.
//
// `mark_rows` puts every position into an open-addressing set by its row; of equal rows the smallest position stands.
// Prefix sums over first occurrences (by the caller) number the rows, and a stable sort by row (by the caller) groups
// their occurrences. A position whose table is NONE is padding.
#include "items.h"
#include "ops/kernels/deduplicate.h"

using namespace tierbed;

// offsets [bags + 1] -> begins [bags + 1], the same made safe to follow: within [0, n] and ascending where they were.
extern "C" __global__ void check_offsets(const i64* offsets, u64 bags, u64 n, i64* begins, u32* faults) {
    for_each(bags + 1, [&](u64 bag) {
        const i64 begin = offsets[bag], wanted = bag == bags ? static_cast<i64>(n) : 0;
        const bool ends = bag == 0 || bag == bags;
        if ((ends && begin != wanted) || (bag > 0 && begin < offsets[bag - 1])) atomicOr(faults, BAD_OFFSETS);
        begins[bag] = ends ? wanted : begin < 0 ? 0 : begin > static_cast<i64>(n) ? static_cast<i64>(n) : begin;
    });
}

// What the tables of an embedding take for an id.
struct Ids {
    u64 padding;
    const u64* last;  // [num_tables], the last legal id of each table, or null
    const u8* drops;  // [num_tables], whether ids beyond it are padding, and no mistake; or null
    u64* dropped;     // [num_tables], counts them
    u32 has_padding, num_tables;

    // The table of an id, or NONE where the id is no row.
    TIERBED_FN u32 table(u64 key, u64 table, u32* faults) const {
        if (has_padding && key == padding) return NONE;
        if (table >= num_tables) {
            atomicOr(faults, BAD_TABLE);
            return NONE;
        }
        if (!last || key <= last[table]) return static_cast<u32>(table);
        if (drops && drops[table])
            atomicAdd(&dropped[table], u64{1});
        else
            atomicOr(faults, BAD_ID);
        return NONE;
    }
};

// A lookup's positions [n] -> hashes, tables and, unless null, sources (output rows) from `first` on.
// Bags: by begins [bags + 1], or of `length` ids each. table_ids [bags], or null where bag b is of table b %
// num_tables. places [features]: the column of each feature, or -1, where begins are of features * batch bags; there
// table_ids are [columns].
extern "C" __global__ void hash_ids(const u64* keys, const i64* table_ids, const i64* begins, u64 bags, u64 length,
                                    u64 n, const __grid_constant__ Ids ids, const i32* places, u64 columns, u64 batch,
                                    u64 first, u64 first_source, const __grid_constant__ SlotHash slot_hash,
                                    u64* hashes, u32* tables, u32* sources, u32* faults) {
    for_each(n, [&](u64 i) {
        u64 bag = begins ? 0 : i / length;
        if (begins)  // the last bag that begins at i or before
            for (u64 end = bags; bag + 1 < end;) {
                const u64 middle = (bag + end) / 2;
                if (begins[middle] <= static_cast<i64>(i))
                    bag = middle;
                else
                    end = middle;
            }
        const i32 column = bags == 0 ? -1 : places ? places[bag / batch] : 0;  // ids of no bag: bad offsets
        u32 table = NONE;
        if (column >= 0) {
            const u64 owner = places ? static_cast<u64>(column) : bag;
            table = ids.table(keys[i], table_ids ? static_cast<u64>(table_ids[owner]) : owner % ids.num_tables, faults);
            if (places) bag = bag % batch * columns + static_cast<u64>(column);
        }
        hashes[first + i] = slot_hash(table, keys[i]);
        tables[first + i] = table;
        if (sources) sources[first + i] = static_cast<u32>(first_source + bag);
    });
}

// marks [mask + 1], all NONE before: the smallest position of each row. places [n]: where a position's row is in them.
extern "C" __global__ void mark_rows(const u64* hashes, const u32* tables, u64 n, u32* marks, u32 mask, u32* places) {
    for_each(n, [&](u64 i) {
        const u32 position = static_cast<u32>(i), table = tables[i];
        if (table == NONE) return;
        const u64 hash = hashes[i];
        for (u32 at = static_cast<u32>(hash) & mask;; at = (at + 1) & mask) {
            u32 first = atomicCAS(&marks[at], NONE, position);
            if (first == NONE) first = position;
            if (hashes[first] != hash || tables[first] != table) continue;
            if (position < first) atomicMin(&marks[at], position);
            places[i] = at;
            return;
        }
    });
}

// firsts [n]: 1 where a position is the first of its row, else 0
extern "C" __global__ void find_firsts(const u32* tables, const u32* marks, const u32* places, u64 n, i32* firsts) {
    for_each(n, [&](u64 i) { firsts[i] = tables[i] != NONE && marks[places[i]] == i; });
}

// ranks [n], the running sum of firsts -> inverse [n] and each row's hash and table
extern "C" __global__ void number_rows(const u64* hashes, const u32* tables, const u32* marks, const u32* places,
                                       const i32* ranks, u64 n, i32* inverse, u64* row_hashes, u32* row_tables) {
    for_each(n, [&](u64 i) {
        if (tables[i] == NONE) {
            inverse[i] = -1;
            return;
        }
        const u32 first = marks[places[i]];
        const i32 row = ranks[first] - 1;
        inverse[i] = row;
        if (first != i) return;
        row_hashes[row] = hashes[i];
        row_tables[row] = tables[i];
    });
}

// rows [n], the inverse sorted, and order [n], the positions in that order -> offsets [unique + 1], where each row's
// occurrences begin in positions [n], and unless null their output rows
extern "C" __global__ void group_rows(const i32* rows, const i64* order, const u32* source_of, u64 n, u32* offsets,
                                      u32* positions, u32* sources) {
    for_each(n, [&](u64 i) {
        const i32 row = rows[i];
        const u32 position = static_cast<u32>(order[i]);
        positions[i] = position;
        if (sources) sources[i] = source_of[position];
        if (row < 0) return;
        if (i == 0 || rows[i - 1] != row) offsets[row] = static_cast<u32>(i);
        if (i + 1 == n) offsets[row + 1] = static_cast<u32>(n);
    });
}

// keys [n]
extern "C" __global__ void recover_keys(const u64* hashes, const u32* tables, u64 n, u64* keys,
                                        const __grid_constant__ SlotHash slot_hash) {
    for_each(n, [&](u64 row) { keys[row] = slot_hash.key(tables[row], hashes[row]); });
}
