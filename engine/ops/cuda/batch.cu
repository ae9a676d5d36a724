// Finds a batch's unique rows, numbered by first occurrence. The order in which threads run does not matter.
//
// `insert_rows` inserts every position into an open-addressing hash set of rows. The slot of a row keeps the row's
// smallest position, its first occurrence. The caller numbers rows by prefix sums over first occurrences, and groups
// each row's positions by a stable sort. Positions with table NONE are padding.
#include "items.h"
#include "ops/kernels/deduplicate.h"

using namespace tierbed;

// Checks offsets [bags + 1]. Writes clamped [bags + 1]: the offsets, clamped to [0, n] so that bad offsets are safe.
extern "C" __global__ void check_offsets(const i64* offsets, u64 bags, u64 n, i64* clamped, u32* faults) {
    for_each(bags + 1, [&](u64 bag) {
        const i64 begin = offsets[bag], expected = bag == bags ? static_cast<i64>(n) : 0;
        const bool is_end = bag == 0 || bag == bags;
        if ((is_end && begin != expected) || (bag > 0 && begin < offsets[bag - 1])) atomicOr(faults, FAULT_BAD_OFFSETS);
        clamped[bag] = is_end ? expected : begin < 0 ? 0 : begin > static_cast<i64>(n) ? static_cast<i64>(n) : begin;
    });
}

// An embedding's legal ids.
struct LegalIds {
    u64 padding;
    const u64* max_ids;       // [num_tables], each table's last legal id, or null
    const u8* drops_illegal;  // [num_tables], 1 if ids beyond `max_ids` become padding instead of faults; or null
    u64* dropped_counts;      // [num_tables], counts dropped ids
    u32 has_padding, num_tables;

    // Returns the id's table, or NONE for padding and illegal ids.
    TIERBED_FN u32 table(u64 key, u64 table, u32* faults) const {
        if (has_padding && key == padding) return NONE;
        if (table >= num_tables) {
            atomicOr(faults, FAULT_BAD_TABLE);
            return NONE;
        }
        if (!max_ids || key <= max_ids[table]) return static_cast<u32>(table);
        if (drops_illegal && drops_illegal[table])
            atomicAdd(&dropped_counts[table], u64{1});
        else
            atomicOr(faults, FAULT_BAD_ID);
        return NONE;
    }
};

// Writes a lookup's hashes, tables and (unless null) output rows to the batch's arrays, from `first` on. Bags begin at
// bag_offsets [bags + 1], or have `length` ids each. table_ids [bags]; if null, bag b belongs to table b % num_tables.
// feature_columns: each feature's column, or -1; null for a lookup without features. A feature has `batch_size` bags.
extern "C" __global__ void hash_ids(const u64* keys, const i64* table_ids, const i64* bag_offsets, u64 bags, u64 length,
                                    u64 n, const __grid_constant__ LegalIds ids, const i32* feature_columns,
                                    u64 num_columns, u64 batch_size, u64 first, u64 first_output_row,
                                    const __grid_constant__ SlotHash slot_hash, u64* hashes, u32* tables,
                                    u32* output_rows, u32* faults) {
    for_each(n, [&](u64 i) {
        u64 bag = bag_offsets ? 0 : i / length;
        if (bag_offsets)  // find the last bag that begins at or before i
            for (u64 end = bags; bag + 1 < end;) {
                const u64 middle = (bag + end) / 2;
                if (bag_offsets[middle] <= static_cast<i64>(i))
                    bag = middle;
                else
                    end = middle;
            }
        // if there are ids but no bags, the offsets are bad, and no id gets a column or a table
        const i32 column = bags == 0 ? -1 : feature_columns ? feature_columns[bag / batch_size] : 0;
        u32 table = NONE;
        if (column >= 0) {
            const u64 index = feature_columns ? static_cast<u64>(column) : bag;
            table = ids.table(keys[i], table_ids ? static_cast<u64>(table_ids[index]) : index % ids.num_tables, faults);
            if (feature_columns) bag = bag % batch_size * num_columns + static_cast<u64>(column);
        }
        hashes[first + i] = slot_hash(table, keys[i]);
        tables[first + i] = table;
        if (output_rows) output_rows[first + i] = static_cast<u32>(first_output_row + bag);
    });
}

// Inserts each row's first position into the array hash_set [mask + 1]. Its slots start as NONE. Sets slots [n].
extern "C" __global__ void insert_rows(const u64* hashes, const u32* tables, u64 n, u32* hash_set, u32 mask,
                                       u32* slots) {
    for_each(n, [&](u64 i) {
        const u32 position = static_cast<u32>(i), table = tables[i];
        if (table == NONE) return;
        const u64 hash = hashes[i];
        for (u32 slot = static_cast<u32>(hash) & mask;; slot = (slot + 1) & mask) {
            u32 first = atomicCAS(&hash_set[slot], NONE, position);
            if (first == NONE) first = position;
            if (hashes[first] != hash || tables[first] != table) continue;
            if (position < first) atomicMin(&hash_set[slot], position);
            slots[i] = slot;
            return;
        }
    });
}

// Writes first_flags [n]: 1 for each row's first position, 0 for other positions.
extern "C" __global__ void flag_first_positions(const u32* tables, const u32* hash_set, const u32* slots, u64 n,
                                                i32* first_flags) {
    for_each(n, [&](u64 i) { first_flags[i] = tables[i] != NONE && hash_set[slots[i]] == i; });
}

// Writes inverse [n] and each row's hash and table. prefix_sums [n]: the running sum of `first_flags`.
extern "C" __global__ void number_rows(const u64* hashes, const u32* tables, const u32* hash_set, const u32* slots,
                                       const i32* prefix_sums, u64 n, i32* inverse, u64* row_hashes, u32* row_tables) {
    for_each(n, [&](u64 i) {
        if (tables[i] == NONE) {
            inverse[i] = -1;
            return;
        }
        const u32 first = hash_set[slots[i]];
        const i32 row = prefix_sums[first] - 1;
        inverse[i] = row;
        if (first != i) return;
        row_hashes[row] = hashes[i];
        row_tables[row] = tables[i];
    });
}

// Groups positions by row. rows [n]: each position's row, sorted. order [n]: the positions in the same order. Sets
// positions [n], offsets [unique + 1], and output_rows [n] unless it is null. Row u's positions begin at offsets[u].
extern "C" __global__ void group_rows(const i32* rows, const i64* order, const u32* position_output_rows, u64 n,
                                      u32* offsets, u32* positions, u32* output_rows) {
    for_each(n, [&](u64 i) {
        const i32 row = rows[i];
        const u32 position = static_cast<u32>(order[i]);
        positions[i] = position;
        if (output_rows) output_rows[i] = position_output_rows[position];
        if (row < 0) return;
        if (i == 0 || rows[i - 1] != row) offsets[row] = static_cast<u32>(i);
        if (i + 1 == n) offsets[row + 1] = static_cast<u32>(n);
    });
}

// Recovers keys [n] from hashes and tables.
extern "C" __global__ void recover_keys(const u64* hashes, const u32* tables, u64 n, u64* keys,
                                        const __grid_constant__ SlotHash slot_hash) {
    for_each(n, [&](u64 row) { keys[row] = slot_hash.key(tables[row], hashes[row]); });
}
