// The types that a lookup's output and its gradient may have. Rows are float32; a value is rounded once, to nearest
// even.
//
// A fixed sequence of operations, so that the bits are the same everywhere; a NaN becomes a quiet NaN without payload.
#pragma once
#include "portable.h"

namespace tierbed {

struct Float32 {
    using Stored = float;
    TIERBED_FN static float load(Stored x) { return x; }
    TIERBED_FN static Stored store(float x) { return x; }
};

struct BFloat16 {
    using Stored = u16;
    TIERBED_FN static float load(Stored x) { return float_of(static_cast<u32>(x) << 16); }
    TIERBED_FN static Stored store(float x) {
        const u32 bits = bits_of(x);
        const u32 rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
        return static_cast<Stored>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
    }
};

struct Float16 {
    using Stored = u16;
    TIERBED_FN static float load(Stored x) {
        const u32 sign = (x & 0x8000u) << 16, magnitude = x & 0x7FFFu;
        const float small = static_cast<float>(magnitude) * 5.9604644775390625e-08f;  // 2^-24, exact for subnormals
        const u32 normal = (magnitude << 13) + (magnitude >= 0x7C00u ? 0x70000000u : 0x38000000u);
        return float_of(sign | (magnitude < 0x400u ? bits_of(small) : normal));
    }
    TIERBED_FN static Stored store(float x) {
        const u32 bits = bits_of(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
        // adding 0.5 rounds a subnormal at its last place, 2^-24
        const u32 small = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
        const u32 normal = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
        const u32 large = magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u;
        return static_cast<Stored>(sign | (magnitude >= 0x47800000u  ? large
                                           : magnitude < 0x38800000u ? small
                                                                     : normal));
    }
};

}  // namespace tierbed
