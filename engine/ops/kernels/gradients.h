// Sums a row's gradient over its occurrences in a batch.
//
// An occurrence adds the gradient of its output row, times `scales` (for weights and means). Occurrences are summed in
// float32 by position, in blocks of 256. Then the block sums are added in order. So GPU warps can share a row's blocks.
#pragma once
#include "float_types.h"
#include "portable.h"

namespace tierbed {

#ifndef TIERBED_GPU
// Sums up `sums` by adding its upper half to its lower half, repeatedly. With a constant HALF, this uses vectors.
template <u32 HALF>
TIERBED_FN void add_halves(float* sums) {
    for (u32 j = 0; j < HALF; ++j) sums[j] += sums[j + HALF];
    if constexpr (HALF > 1) add_halves<HALF / 2>(sums);
}
#endif

// Sums value(c) over columns c in [0, n), in an order that suits both vector registers and warps. Columns ascend, and
// column c is added to partial sum c % 32. Then the 32 partial sums are added by halves: 16 + 16, 8 + 8, 4 + 4, 2 + 2,
// 1 + 1. Columns are signed, since compilers vectorise only indexes that cannot wrap around. Every lane gets the sum.
template <class Value>
TIERBED_FN float sum_columns(Tile tile, u32 n, const Value& value) {
#ifdef TIERBED_GPU
    float sum = 0.0f;
    for (i32 c = static_cast<i32>(tile.lane); c < static_cast<i32>(n); c += 32) sum += value(c);
    for (u32 half = 16; half > 0; half /= 2) sum += shuffle_down(sum, half);
    return shuffle(sum, 0);
#else
    static_cast<void>(tile);
    float sums[32];
    const i32 end = static_cast<i32>(n);
    i32 begin = end < 32 ? 0 : 32;
    if (begin == 0)
        for (i32 j = 0; j < 32; ++j) sums[j] = 0.0f;
    else  // each sum starts at a constant 0; clearing `sums` first would be slow with GCC
        for (i32 j = 0; j < 32; ++j) sums[j] = 0.0f + value(j);
    for (; begin + 32 <= end; begin += 32)
        for (i32 j = 0; j < 32; ++j) sums[j] += value(begin + j);
    for (i32 j = 0; begin + j < end; ++j) sums[j] += value(begin + j);
    add_halves<16>(sums);
    return sums[0];
#endif
}

constexpr u32 SUM_BLOCK = 256;

// One lookup's output gradient.
struct OutputGradient {
    const void* rows;      // [output rows, dim]
    u32 first_output_row;  // index of the first row, among the output rows of all lookups
};

struct OutputGradients {
    const OutputGradient* outputs;  // [count], ordered by `first_output_row`
    u32 count;
    u32 dim;

    template <class Type>
    TIERBED_FN const typename Type::Stored* row(u32 output_row) const {
        u32 index = 0;
        while (index + 1 < count && output_row >= outputs[index + 1].first_output_row) ++index;
        return static_cast<const typename Type::Stored*>(outputs[index].rows) +
               static_cast<u64>(output_row - outputs[index].first_output_row) * dim;
    }
};

struct Occurrences {
    const u32* output_rows;  // [count], ascending by position
    const float* scales;     // [count], or null if all are 1
    u32 count;
    const u32* end;  // end of all rows' occurrences; memory after this row's occurrences may be prefetched too
};

constexpr u32 OUTPUT_ROW_PREFETCH_DISTANCE = 16;

// Prefetches the gradient of the occurrence that is OUTPUT_ROW_PREFETCH_DISTANCE after i.
template <class Type>
TIERBED_FN void prefetch_output_row(const OutputGradients& gradients, const Occurrences& row, u32 i) {
    if (row.end - row.output_rows > i + OUTPUT_ROW_PREFETCH_DISTANCE)
        prefetch_bytes(reinterpret_cast<u64>(gradients.row<Type>(row.output_rows[i + OUTPUT_ROW_PREFETCH_DISTANCE])),
                       gradients.dim * static_cast<u32>(sizeof(typename Type::Stored)));
}

// Sums columns [begin, begin + n) over occurrences [first, last). Writes the result to the array `sum`.
template <class Type>
TIERBED_FN void sum_occurrences(float* sum, const OutputGradients& gradients, const Occurrences& row, u32 first,
                                u32 last, u32 begin, u32 n) {
    for (u32 i = first; i < last; ++i) {
        if (begin == 0) prefetch_output_row<Type>(gradients, row, i);
        const typename Type::Stored* source = gradients.row<Type>(row.output_rows[i]) + begin;
        const float scale = row.scales ? row.scales[i] : 1.0f;  // multiplying by 1 is exact
        if (i == first)
            for (u32 j = 0; j < n; ++j) sum[j] = scale * Type::load(source[j]);
        else
            for (u32 j = 0; j < n; ++j) sum[j] += scale * Type::load(source[j]);
    }
}

// Writes columns [begin, begin + n) of a row's gradient to `sum`. Uses `block` [n] as scratch memory. row.count > 0.
template <class Type>
TIERBED_FN void sum_row_gradient(float* sum, float* block, const OutputGradients& gradients, const Occurrences& row,
                                 u32 begin, u32 n) {
    sum_occurrences<Type>(sum, gradients, row, 0, row.count < SUM_BLOCK ? row.count : SUM_BLOCK, begin, n);
    for (u32 first = SUM_BLOCK; first < row.count; first += SUM_BLOCK) {
        const u32 last = row.count - first < SUM_BLOCK ? row.count : first + SUM_BLOCK;
        sum_occurrences<Type>(block, gradients, row, first, last, begin, n);
        for (u32 j = 0; j < n; ++j) sum[j] += block[j];
    }
}

}  // namespace tierbed
