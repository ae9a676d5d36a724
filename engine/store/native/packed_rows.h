// Checks, compares and merges one bucket's packed rows. The rows ascend strictly by (table, key).
#pragma once
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "rows.h"

namespace tierbed {

constexpr std::size_t KEY_BYTES = sizeof(u32) + sizeof(u64);

using RowKey = std::pair<u32, u64>;  // (table, key); compares in row order

// Packed rows of equal size, or row keys alone.
struct PackedRows {
    const u8* bytes;
    std::size_t row_bytes, count;

    const u8* row(std::size_t i) const { return bytes + i * row_bytes; }
    RowKey row_key(std::size_t i) const {
        RowKey key;
        std::memcpy(&key.first, row(i), sizeof key.first);
        std::memcpy(&key.second, row(i) + sizeof key.first, sizeof key.second);
        return key;
    }
};

// Validates a snapshot's bucket, passed in pieces of rows or row keys. `tables` is the number of tables,
// `int32` is true if keys are int32, and `part` is the rank that owns the rows, out of `parts` ranks.
class RowCheck {
public:
    RowCheck(u32 bucket, u32 tables, bool int32, u32 part, u32 parts)
        : bucket_(bucket), tables_(tables), part_(part), parts_(parts), int32_(int32) {}

    // Returns what is wrong with the next rows, or null.
    const char* problem(const PackedRows& rows);

private:
    const u32 bucket_, tables_, part_, parts_;
    const bool int32_;
    std::optional<RowKey> last_;
};

enum State : u8 { SAME, CHANGED, NEW };

struct Joined {
    std::vector<u8> gone, state;  // per older row: 1 if the newer rows lack this row; per newer row: the row's State
};

// Compares older and newer rows in key order, until one side ends.
Joined join_rows(const PackedRows& older, const PackedRows& newer);

struct Merged {
    std::vector<u8> rows;
    std::vector<std::size_t> rows_read;  // how many rows of each side were read
    bool has_conflict = false;           // a row key is both changed and erased
};

// Applies changed rows `after` and erased row keys `gone` to the rows `before`, up to the smallest of the last keys.
Merged merge_rows(const PackedRows& before, const PackedRows& after, const PackedRows& gone);

// Merges parts that share no rows. Stops at the end of the first part that has `more` rows to come.
Merged merge_parts(const std::vector<PackedRows>& parts, const std::vector<bool>& more);

}  // namespace tierbed
