// The lines of a full table: segments that double in size and never move.
#pragma once
#include "ops/cuda/layout.h"
#include "store/kernels/index.h"

namespace tierbed {

constexpr u32 PROBE_LANES = 8;  // 8 slots are 128 bytes

struct LineSegments {
    const u64* addresses;  // segment k holds 1 << (base_bits + k) lines
    u64 num_lines;         // lines allocated
    u32 base_bits;

    TIERBED_FN u64 address(u64 row) const {
        const u64 r = row + (1ull << base_bits);
        const u32 segment = 63 - __clzll(static_cast<long long>(r)) - base_bits;
        return addresses[segment] + (r - (1ull << (segment + base_bits))) * SHAPE.line_bytes;
    }
};

// The index and the lines of a full table.
struct LineIndex {
    IndexView view;
    LineSegments segments;

    // Returns the address of the row's line, or 0 if the row is absent.
    TIERBED_FN u64 find(Tile tile, u64 hash, u32 table) const {
        const u32 row = find_value(tile, view, hash, table);
        return row ? segments.address(row - 1) : 0;
    }
};

}  // namespace tierbed
