// The gradient of a row: the sum over its occurrences in a batch.
//
// An occurrence is a row of the output's gradient, times a scale where its bag was weighted or averaged. They are added
// in float32 in the order of their positions, in blocks of 256 whose sums are then added in order, so that several
// warps can share a row with many.
#pragma once
#include "half.h"
#include "portable.h"

namespace tierbed {

#ifndef TIERBED_GPU
// By constants, so that each half is added as a vector.
template <u32 HALF>
TIERBED_FN void add_halves(float* sums) {
    for (u32 j = 0; j < HALF; ++j) sums[j] += sums[j + HALF];
    if constexpr (HALF > 1) add_halves<HALF / 2>(sums);
}
#endif

// The sum over the columns of a row, in an order that fits vector registers and warps alike: column c goes to partial
// sum c % 32, columns ascending, and the 32 partial sums are added by halves: 16 + 16, 8 + 8, 4 + 4, 2 + 2, 1 + 1.
// value(c) -> float for columns c in [0, n), signed numbers: vectors need an index that cannot wrap around. Every lane
// has the result.
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
    else  // zeros that are not written first, for GCC does so by a slow instruction
        for (i32 j = 0; j < 32; ++j) sums[j] = 0.0f + value(j);
    for (; begin + 32 <= end; begin += 32)
        for (i32 j = 0; j < 32; ++j) sums[j] += value(begin + j);
    for (i32 j = 0; begin + j < end; ++j) sums[j] += value(begin + j);
    add_halves<16>(sums);
    return sums[0];
#endif
}

constexpr u32 SUM_BLOCK = 256;

// The gradient of one lookup's output.
struct GradientPart {
    const void* rows;  // [outputs, dim]
    u32 begin;         // the index of its first row in the outputs of all lookups
};

struct Gradients {
    const GradientPart* parts;  // [count], by `begin`
    u32 count;
    u32 dim;

    template <class Type>
    TIERBED_FN const typename Type::Stored* row(u32 source) const {
        u32 part = 0;
        while (part + 1 < count && source >= parts[part + 1].begin) ++part;
        return static_cast<const typename Type::Stored*>(parts[part].rows) +
               static_cast<u64>(source - parts[part].begin) * dim;
    }
};

struct Occurrences {
    const u32* sources;   // [count] output rows, ascending by position
    const float* scales;  // [count], or null where all are 1
    u32 count;
    const u32* end;  // of the sources of this row and those after it, which are fetched ahead
};

constexpr u32 SOURCES_AHEAD = 16;

// Fetches a gradient that is needed soon after that of occurrence i.
template <class Type>
TIERBED_FN void fetch_ahead(const Gradients& gradients, const Occurrences& row, u32 i) {
    if (row.end - row.sources > i + SOURCES_AHEAD)
        prefetch_bytes(reinterpret_cast<u64>(gradients.row<Type>(row.sources[i + SOURCES_AHEAD])),
                       gradients.dim * static_cast<u32>(sizeof(typename Type::Stored)));
}

// sum [n]: occurrences [first, last) of columns [begin, begin + n)
template <class Type>
TIERBED_FN void sum_occurrences(float* sum, const Gradients& gradients, const Occurrences& row, u32 first, u32 last,
                                u32 begin, u32 n) {
    for (u32 i = first; i < last; ++i) {
        if (begin == 0) fetch_ahead<Type>(gradients, row, i);
        const typename Type::Stored* source = gradients.row<Type>(row.sources[i]) + begin;
        const float scale = row.scales ? row.scales[i] : 1.0f;  // a product with 1 is exact
        if (i == first)
            for (u32 j = 0; j < n; ++j) sum[j] = scale * Type::load(source[j]);
        else
            for (u32 j = 0; j < n; ++j) sum[j] += scale * Type::load(source[j]);
    }
}

// sum [n]: columns [begin, begin + n) of the row's gradient; count > 0. block [n]: memory for a block's sum.
template <class Type>
TIERBED_FN void sum_blocks_of(float* sum, float* block, const Gradients& gradients, const Occurrences& row, u32 begin,
                              u32 n) {
    sum_occurrences<Type>(sum, gradients, row, 0, row.count < SUM_BLOCK ? row.count : SUM_BLOCK, begin, n);
    for (u32 first = SUM_BLOCK; first < row.count; first += SUM_BLOCK) {
        const u32 last = row.count - first < SUM_BLOCK ? row.count : first + SUM_BLOCK;
        sum_occurrences<Type>(block, gradients, row, first, last, begin, n);
        for (u32 j = 0; j < n; ++j) sum[j] += block[j];
    }
}

}  // namespace tierbed
