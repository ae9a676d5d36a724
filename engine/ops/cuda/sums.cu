// Sums the gradients of a batch's rows. One warp works on one row.
#include "row_gradient.h"
#include "ops/kernels/update.h"

using namespace tierbed;

// Writes row u's gradient to row indices[u] of out [*, dim], or to row u if `indices` is null.
extern "C" __global__ void sum_gradients(const __grid_constant__ BatchGradients batch, const u32* count,
                                         const float* sums, const i64* indices, float* out) {
    for_each_row(batch, *count, nullptr, [&](Tile tile, u64 row, const RowInput& input) {
        const RowGradient gradient(batch, input, sums);
        float* const sum = out + (indices ? static_cast<u64>(indices[row]) : row) * SHAPE.dim;
        for_blocks(tile, SHAPE.dim, [&](u32 begin, u32) { gradient(sum + begin, begin, 1.0f); });
    });
}

// Writes each row's squared gradient norm to squares [count]. memory [warps of the grid, dim]: scratch.
extern "C" __global__ void compute_squared_norms(const __grid_constant__ BatchGradients batch, const u32* count,
                                                 const float* sums, float* memory, float* squares) {
    for_each_row(batch, *count, nullptr, [&](Tile tile, u64 row, const RowInput& input) {
        const RowGradient gradient(batch, input, sums);
        const auto sum = [&](float* g, u32 begin, u32) { gradient(g, begin, 1.0f); };
        const float square = gradient.num_occurrences() ? sum_squares(tile, SHAPE.dim, sum, warp_memory(memory)) : 0.0f;
        if (tile.lane == 0) squares[row] = square;
    });
}
