// Checks, compares and merges packed rows of one bucket, which ascend strictly by (table, key).
#pragma once
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "rows.h"

namespace tierbed {

constexpr std::size_t KEY_BYTES = sizeof(u32) + sizeof(u64);

using RowKey = std::pair<u32, u64>;  // (table, key), in the order of rows

// Packed rows of one length, or row keys alone.
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

// Finds invalid rows of a bucket of a snapshot, whose rows or row keys are passed in pieces. tables: their number.
// int32: whether keys are. part: the owner of the rows among `parts`.
class RowCheck {
public:
    RowCheck(u32 bucket, u32 tables, bool int32, u32 part, u32 parts)
        : bucket_(bucket), tables_(tables), part_(part), parts_(parts), int32_(int32) {}

    // The error of the next rows, or null.
    const char* problem(const PackedRows& rows);

private:
    const u32 bucket_, tables_, part_, parts_;
    const bool int32_;
    std::optional<RowKey> last_;
};

enum State : u8 { SAME, CHANGED, NEW };

struct Joined {
    std::vector<u8> gone, state;  // for older rows: 1 if the newer ones lack it; for newer rows: their State
};

// Compares rows to the end of the shorter side.
Joined join_rows(const PackedRows& older, const PackedRows& newer);

struct Merged {
    std::vector<u8> rows;
    std::vector<std::size_t> taken;  // how many rows of each side were read
    bool both = false;               // a row key is both among the changed rows and among the erased ones
};

// Replaces or adds the rows of `after`, and removes the row keys `gone`, up to the least of the last keys.
Merged merge_rows(const PackedRows& before, const PackedRows& after, const PackedRows& gone);

// Merges parts that have no row in common, to the end of the first part of which `more` will come.
Merged merge_parts(const std::vector<PackedRows>& parts, const std::vector<bool>& more);

}  // namespace tierbed
