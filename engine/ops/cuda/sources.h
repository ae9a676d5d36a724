// The gradients of a batch's rows, of one type (TIERBED_GRADIENTS).
//
// One warp works on one row. Of a row with more than SUM_BLOCK occurrences, blocks after the first are summed by warps
// of their own before (`sum_blocks`), then added in order, so the result is that of one thread that does it all. Block
// b of a row whose occurrences begin at `offset` has slot offset / SUM_BLOCK + b: no two blocks after the first share
// one.
#pragma once
#include "layout.h"
#include "ops/kernels/gradients.h"

namespace tierbed {

using Type = TIERBED_GRADIENTS;

constexpr u32 MOST_PARTS = 8;

// The gradients of all lookups, and the occurrences of all rows.
struct Sources {
    GradientPart parts[MOST_PARTS];
    u32 count;
    const i32* rows;      // [n], the row of each occurrence; padding, -1, comes first
    const u32* offsets;   // [unique + 1]
    const u32* sources;   // [n]
    const float* scales;  // [n] or null
    u64 n;

    TIERBED_FN Gradients gradients() const { return Gradients{parts, count, SHAPE.dim}; }
    TIERBED_FN Occurrences of(u64 row) const {
        const u32 begin = offsets[row];
        return Occurrences{sources + begin, scales ? scales + begin : nullptr, offsets[row + 1] - begin};
    }
};

// `body(gradients, occurrences)` with what gives the row's sum: its own occurrences, or of many one that is their sum.
template <class Body>
TIERBED_FN void with_gradients(Tile tile, const Sources& from, u64 row, float* sums, const Body& body) {
    const Occurrences all = from.of(row);
    if (all.count <= SUM_BLOCK) {
        body(Type{}, from.gradients(), all);
        return;
    }
    const u32 slot = from.offsets[row] / SUM_BLOCK + 1, blocks = (all.count + SUM_BLOCK - 1) / SUM_BLOCK;
    for_blocks(tile, SHAPE.dim, [&](u32 begin, u32 n) {
        float sum[VEC];
        sum_occurrences<Type>(sum, from.gradients(), all, 0, SUM_BLOCK, begin, n);
        float* total = sums + static_cast<u64>(slot) * SHAPE.dim + begin;
        for (u32 block = 0; block + 1 < blocks; ++block)
            for (u32 j = 0; j < n; ++j) sum[j] += total[static_cast<u64>(block) * SHAPE.dim + j];
        for (u32 j = 0; j < n; ++j) total[j] = sum[j];
    });
    const GradientPart part{sums, 0};
    body(Float32{}, Gradients{&part, 1, SHAPE.dim}, Occurrences{&slot, nullptr, 1});
}

TIERBED_FN float* memory_of_warp(float* whole) {
    const u64 warp = (static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x) / WARP;
    return whole ? whole + warp * SHAPE.dim : nullptr;
}

// sums [n / SUM_BLOCK + 1, dim]: of blocks after a row's first, by slot
extern "C" __global__ void sum_blocks(const __grid_constant__ Sources from, float* sums) {
    for_each_item<WARP>(from.n / SUM_BLOCK + 1, [&](Tile tile, u64 slot) {
        // a block of this slot belongs to the row on both sides of the slot's begin
        const u64 middle = slot * SUM_BLOCK;
        if (middle == 0 || middle >= from.n || from.rows[middle] < 0 || from.rows[middle - 1] != from.rows[middle])
            return;
        const u64 row = static_cast<u64>(from.rows[middle]);
        const Occurrences all = from.of(row);
        const u64 first = middle + from.offsets[row] % SUM_BLOCK - from.offsets[row];
        if (first >= all.count) return;
        const u32 last = all.count - first < SUM_BLOCK ? all.count : static_cast<u32>(first) + SUM_BLOCK;
        for_blocks(tile, SHAPE.dim, [&](u32 begin, u32 n) {
            sum_occurrences<Type>(sums + slot * SHAPE.dim + begin, from.gradients(), all, static_cast<u32>(first), last,
                                  begin, n);
        });
    });
}

}  // namespace tierbed
