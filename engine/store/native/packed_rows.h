// Checks, compares and merges one bucket's packed rows. The rows ascend strictly by (table, key).
#pragma once
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "rows.h"

namespace tierbed {

constexpr std::size_t KEY_BYTES = sizeof(u32) + sizeof(u64);

using RowKey = std::pair<u32, u64>;  // (table, key); operator < gives the order of packed rows

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

// Validates a snapshot's bucket, passed in pieces. A piece is packed rows, or row keys alone.
// is_int32: true if keys are int32. last_step: the table's step. rank: the rank that owns the rows.
class RowValidator {
public:
    RowValidator(u32 bucket, u32 num_tables, bool is_int32, u32 last_step, u32 rank, u32 num_ranks)
        : bucket_(bucket), num_tables_(num_tables), last_step_(last_step), rank_(rank), num_ranks_(num_ranks),
          is_int32_(is_int32) {}

    // Returns a text that says what is wrong with the next rows, or null.
    const char* find_problem(const PackedRows& rows);

private:
    const u32 bucket_, num_tables_, last_step_, rank_, num_ranks_;
    const bool is_int32_;
    std::optional<RowKey> last_key_;
};

enum RowStatus : u8 { SAME, CHANGED, NEW };

struct RowDiff {
    std::vector<u8> removed, states;  // removed[i]: 1 if older row i was removed; states[i]: newer row i's RowStatus
};

// Compares older and newer rows in key order, until the older or the newer rows end.
RowDiff diff_rows(const PackedRows& older, const PackedRows& newer);

struct MergedRows {
    std::vector<u8> rows;
    std::vector<std::size_t> rows_read;  // how many rows of each input were read
};

// Merges parts that share no rows. Stops at the end of part i if has_more[i]: its other rows come in a later call.
MergedRows merge_parts(const std::vector<PackedRows>& parts, const std::vector<bool>& has_more);

}  // namespace tierbed
