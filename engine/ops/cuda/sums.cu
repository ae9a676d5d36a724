// Gradients of a batch's rows, reduced, whatever rule follows. One warp works on one row.
#include "sources.h"
#include "ops/kernels/update.h"

using namespace tierbed;

// The gradient of row u to row places[u] of out [*, dim]; null places for row u.
extern "C" __global__ void sum_rows(const __grid_constant__ Sources from, const u32* count, const float* sums,
                                    const i64* places, float* out) {
    for_each_row(from, *count, nullptr, [&](Tile tile, u64 row, const RowStart& start) {
        const RowGradient gradient(from, start, sums);
        float* const sum = out + (places ? static_cast<u64>(places[row]) : row) * SHAPE.dim;
        for_blocks(tile, SHAPE.dim, [&](u32 begin, u32) { gradient(sum + begin, begin, 1.0f); });
    });
}

// squares [count]: the sum of the squares of each row's gradient. `whole`: [warps of the grid, dim].
extern "C" __global__ void square_rows(const __grid_constant__ Sources from, const u32* count,
                                       const float* sums, float* whole, float* squares) {
    for_each_row(from, *count, nullptr, [&](Tile tile, u64 row, const RowStart& start) {
        const RowGradient gradient(from, start, sums);
        const auto sum = [&](float* g, u32 begin, u32) { gradient(g, begin, 1.0f); };
        const float square = gradient.occurrences() ? square_row(tile, SHAPE.dim, sum, memory_of_warp(whole)) : 0.0f;
        if (tile.lane == 0) squares[row] = square;
    });
}
