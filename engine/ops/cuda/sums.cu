// Gradients of a batch's rows, reduced, whatever rule follows. One warp works on one row.
#include "sources.h"
#include "ops/kernels/update.h"

using namespace tierbed;

// The gradient of row u to row places[u] of out [*, dim]; null places for row u.
extern "C" __global__ void sum_rows(const __grid_constant__ Sources from, const u32* count, float* sums,
                                    const i64* places, float* out) {
    for_each_item<WARP>(*count, [&](Tile tile, u64 row) {
        with_gradients(
            tile, from, row, sums, [&](auto type, const Gradients& gradients, const Occurrences& occurrences) {
                float* const sum = out + (places ? static_cast<u64>(places[row]) : row) * SHAPE.dim;
                for_blocks(tile, SHAPE.dim, [&](u32 begin, u32 n) {
                    sum_gradients<decltype(type)>(sum + begin, gradients, occurrences, begin, n);
                });
            });
    });
}

// squares [count]: the sum of the squares of each row's gradient. `whole`: [warps of the grid, dim].
extern "C" __global__ void square_rows(const __grid_constant__ Sources from, const u32* count, float* sums,
                                       float* whole, float* squares) {
    for_each_item<WARP>(*count, [&](Tile tile, u64 row) {
        with_gradients(
            tile, from, row, sums, [&](auto type, const Gradients& gradients, const Occurrences& occurrences) {
                const float square = square_row<decltype(type)>(tile, gradients, occurrences, memory_of_warp(whole));
                if (tile.lane == 0) squares[row] = square;
            });
    });
}
