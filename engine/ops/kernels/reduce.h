// The sum over the columns of a row, in an order that fits vector registers and warps alike: column c goes to partial
// sum c % 32, columns ascending, and the 32 partial sums are added by halves: 16 + 16, 8 + 8, 4 + 4, 2 + 2, 1 + 1.
#pragma once
#include "lines/kernels/portable.h"

namespace tierbed {

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
    for (u32 half = 16; half > 0; half /= 2)
        for (u32 j = 0; j < half; ++j) sums[j] += sums[j + half];
    return sums[0];
#endif
}

}  // namespace tierbed
