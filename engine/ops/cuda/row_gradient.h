// Sums the gradients of a batch's rows. Compiled for one gradient type (TIERBED_GRADIENTS).
//
// One warp works on one row, and sums gradients in blocks of SUM_BLOCK occurrences. The kernel `sum_blocks` has already
// summed blocks after the first, with one warp per block. Block sums are added in order, so the result equals a single
// thread's. If a row begins at occurrence `offset`, slot `offset / SUM_BLOCK + b` stores the sum of its block b > 0.
#pragma once
#include "items.h"
#include "layout.h"
#include "ops/kernels/gradients.h"

namespace tierbed {

using Type = TIERBED_GRADIENTS;

constexpr u32 MAX_OUTPUTS = 8;

struct BatchGradients {
    OutputGradient outputs[MAX_OUTPUTS];
    u32 count;
    const i32* rows;         // [n], each occurrence's row; padding (-1) comes first
    const u32* offsets;      // [unique + 1]
    const u32* output_rows;  // [n]
    const float* scales;     // [n] or null
    u64 n;

    TIERBED_FN OutputGradients gradients() const { return OutputGradients{outputs, count, SHAPE.dim}; }
    TIERBED_FN Occurrences find_occurrences(u32 begin, u32 count) const {
        return Occurrences{output_rows + begin, scales ? scales + begin : nullptr, count, nullptr};
    }
};

// How many gradients a lane loads before it adds the first one. `sum_blocks` uses BLOCK_LOADS.
constexpr u32 ROW_LOADS = 4, BLOCK_LOADS = 16;

// The next N occurrences' output rows.
template <u32 N>
struct NextOutputRows {
    u32 output_rows[N];

    TIERBED_FN void read(const u32* source, u32 count) {
        for (u32 k = 0; k < N; ++k) output_rows[k] = k < count ? source[k] : 0;
    }
};

// Sums columns [begin, begin + VEC) over occurrences [first, last), in order. Writes `sum`. `next` starts at `first`.
template <u32 N>
TIERBED_FN void sum_occurrences(float* sum, const OutputGradients& gradients, const Occurrences& row, u32 first,
                                u32 last, u32 begin, NextOutputRows<N> next) {
    for (u32 i = first; i < last; i += N) {
        float scales[N];
        Vector<typename Type::Stored> numbers[N];
        for (u32 k = 0; k < N; ++k) {
            if (i + k < last) numbers[k] = load_vector(gradients.row<Type>(next.output_rows[k]) + begin);
            scales[k] = row.scales && i + k < last ? row.scales[i + k] : 1.0f;  // multiplying by 1 is exact
        }
        if (i + N < last) next.read(row.output_rows + i + N, last - i - N);
        for (u32 k = 0; k < N; ++k)
            if (i + k < last)
                for (u32 j = 0; j < VEC; ++j) {
                    const float product = scales[k] * Type::load(numbers[k].x[j]);
                    sum[j] = k == 0 && i == first ? product : sum[j] + product;
                }
    }
}

// A row's line and occurrences, read by one lane. Then the whole warp works on the lanes' rows, one after another.
struct RowInput {
    u32 begin, count;  // occurrences
    NextOutputRows<ROW_LOADS> next;
    u64 line;

    TIERBED_FN static RowInput read(const BatchGradients& batch, const u64* lines, u64 row) {
        const u32 begin = batch.offsets[row];
        RowInput input{begin, batch.offsets[row + 1] - begin, {}, lines ? lines[row] : 0};
        input.next.read(batch.output_rows + begin, input.count);
        return input;
    }
    TIERBED_FN RowInput shuffle_from(Tile warp, u32 lane) const {
        RowInput input{shuffle(warp, begin, lane), shuffle(warp, count, lane), {}, shuffle(warp, line, lane)};
        for (u32 k = 0; k < ROW_LOADS; ++k) input.next.output_rows[k] = shuffle(warp, next.output_rows[k], lane);
        return input;
    }
};

// Calls body(warp, row, input) for rows [0, count). lines: the rows' lines, or null.
template <class Body>
TIERBED_FN void for_each_row(const BatchGradients& batch, u64 count, const u64* lines, const Body& body) {
    for_each_ahead<RowInput>(
        count, [&](u64 row) { return RowInput::read(batch, lines, row); }, body);
}

// Sums a row's gradients. sums: the results of `sum_blocks`, by slot.
class RowGradient {
public:
    TIERBED_FN RowGradient(const BatchGradients& batch, const RowInput& input, const float* sums)
        : batch_(batch), input_(input), sums_(sums) {}

    TIERBED_FN u32 num_occurrences() const { return input_.count; }

    // Sums columns [begin, begin + VEC) over the row's occurrences. Writes the result, times `scale`, to `sum`.
    TIERBED_FN void operator()(float* sum, u32 begin, float scale) const {
        const Occurrences row = batch_.find_occurrences(input_.begin, input_.count);
        const u32 first = input_.count < SUM_BLOCK ? input_.count : SUM_BLOCK;
        float total[VEC];
        sum_occurrences(total, batch_.gradients(), row, 0, first, begin, input_.next);
        const float* slot = sums_ + static_cast<u64>(input_.begin / SUM_BLOCK + 1) * SHAPE.dim + begin;
        for (u32 end = SUM_BLOCK; end < input_.count; end += SUM_BLOCK, slot += SHAPE.dim) {
            const Vector<float> part = load_vector(slot);
            for (u32 j = 0; j < VEC; ++j) total[j] += part.x[j];
        }
        for (u32 j = 0; j < VEC; ++j) sum[j] = total[j] * scale;
    }

private:
    const BatchGradients& batch_;
    RowInput input_;
    const float* sums_;
};

// Returns this warp's row of memory [warps of the grid, dim], or null.
TIERBED_FN float* warp_memory(float* memory) {
    const u64 warp = (static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x) / WARP;
    return memory ? memory + warp * SHAPE.dim : nullptr;
}

// Sums all blocks of each row except the first block. Writes each sum to row `slot` of sums [n / SUM_BLOCK + 1, dim].
extern "C" __global__ void sum_blocks(const __grid_constant__ BatchGradients batch, float* sums) {
    for_each_item<WARP>(batch.n / SUM_BLOCK + 1, [&](Tile tile, u64 slot) {
        // this slot is used only if occurrence `middle` and the occurrence before it belong to the same row
        const u64 middle = slot * SUM_BLOCK;
        if (middle == 0 || middle >= batch.n || batch.rows[middle] < 0 || batch.rows[middle - 1] != batch.rows[middle])
            return;
        const u32* const offset = batch.offsets + batch.rows[middle];
        const Occurrences all = batch.find_occurrences(offset[0], offset[1] - offset[0]);
        const u64 first = middle + offset[0] % SUM_BLOCK - offset[0];
        if (first >= all.count) return;
        const u32 last = all.count - first < SUM_BLOCK ? all.count : static_cast<u32>(first) + SUM_BLOCK;
        for_blocks(tile, SHAPE.dim, [&](u32 begin, u32 n) {
            float sum[VEC];
            NextOutputRows<BLOCK_LOADS> next;
            next.read(all.output_rows + first, last - static_cast<u32>(first));
            sum_occurrences(sum, batch.gradients(), all, static_cast<u32>(first), last, begin, next);
            store_floats(sums + slot * SHAPE.dim + begin, sum, n);
        });
    });
}

}  // namespace tierbed
