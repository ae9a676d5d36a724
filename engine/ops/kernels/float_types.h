// Float types for stored rows, lookup outputs and gradients.
//
// `store` rounds to nearest even. `store_stochastic` rounds to one of the two neighbours, mostly to the nearer one. It
// adds the top bits of the random number `noise` to the low bits that do not fit, then drops the low bits. Before this,
// it rounds a subnormal float16 to the nearest multiple of 2^-37. Exact values and infinities do not change. Values
// beyond the largest finite number become this number. Every NaN becomes the same quiet NaN, since a NaN's bits depend
// on the processor. Operations and their order are fixed, so results have the same bits everywhere.
#pragma once
#include "portable.h"

namespace tierbed {

// Comparison and selection without branches, so that compilers vectorise loops. Operands are below 2^31.
TIERBED_FN u32 less_mask(u32 a, u32 b) { return static_cast<u32>(static_cast<i32>(a - b) >> 31); }  // a < b ? ~0 : 0
TIERBED_FN u32 select(u32 mask, u32 a, u32 b) { return (a & mask) | (b & ~mask); }
TIERBED_FN u32 minimum(u32 a, u32 b) { return a < b ? a : b; }

enum class FloatType : u32 { float32 = 0, float16 = 1, bfloat16 = 2 };
constexpr u32 FLOAT_TYPES = 3;

struct Float32 {
    static constexpr FloatType TYPE = FloatType::float32;
    using Stored = float;
    TIERBED_FN static float load(Stored x) { return x; }
    TIERBED_FN static Stored store(float x) { return x; }
    TIERBED_FN static Stored store_stochastic(float x, u32) { return x; }
};

struct BFloat16 {
    static constexpr FloatType TYPE = FloatType::bfloat16;
    using Stored = u16;
    TIERBED_FN static float load(Stored x) { return as_float(static_cast<u32>(x) << 16); }
    TIERBED_FN static Stored store(float x) {
        const u32 bits = as_bits(x);
        const u32 rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
        return static_cast<Stored>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
    }
    TIERBED_FN static Stored store_stochastic(float x, u32 noise) {
        const u32 bits = as_bits(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
        const u32 finite = sign | minimum((magnitude + (noise >> 16)) >> 16, 0x7F7Fu);
        const u32 special = select(less_mask(0x7F800000u, magnitude), 0x7FC0u, sign | 0x7F80u);
        return static_cast<Stored>(select(less_mask(magnitude, 0x7F800000u), finite, special));
    }
};

struct Float16 {
    static constexpr FloatType TYPE = FloatType::float16;
    static constexpr float SMALLEST_NORMAL = 6.103515625e-05f;  // 2^-14, the bits 0x38800000
    using Stored = u16;
    TIERBED_FN static float load(Stored x) {
        const u32 sign = (x & 0x8000u) << 16, magnitude = (x & 0x7FFFu) << 13;
        const u32 small = as_bits(as_float(magnitude + 0x38800000u) - SMALLEST_NORMAL);
        const u32 normal = magnitude + 0x38000000u + (less_mask(0xF7FFFFFu, magnitude) & 0x38000000u);
        return as_float(sign | select(less_mask(magnitude, 0x800000u), small, normal));
    }
    TIERBED_FN static Stored store(float x) {
        const u32 bits = as_bits(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
        // adding 0.5 rounds a subnormal to a multiple of 2^-24, its last place
        const u32 small = as_bits(as_float(magnitude) + 0.5f) - 0x3F000000u;
        const u32 normal = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
        const u32 large = select(less_mask(0x7F800000u, magnitude), 0x7E00u, sign | 0x7C00u);
        const u32 finite = sign | select(less_mask(magnitude, 0x38800000u), small, normal);
        return static_cast<Stored>(select(less_mask(magnitude, 0x47800000u), finite, large));
    }
    TIERBED_FN static Stored store_stochastic(float x, u32 noise) {
        const u32 bits = as_bits(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
        const u32 small = as_bits(as_float(magnitude) + SMALLEST_NORMAL) - 0x38800000u;  // in units of 2^-37
        const u32 units = select(less_mask(magnitude, 0x38800000u), small, magnitude - 0x38000000u);
        const u32 finite = sign | minimum((units + (noise >> 19)) >> 13, 0x7BFFu);
        const u32 special = select(less_mask(0x7F800000u, magnitude), 0x7E00u, sign | 0x7C00u);
        return static_cast<Stored>(select(less_mask(magnitude, 0x7F800000u), finite, special));
    }
};

// Calls body(T{}) with the struct T for `type`.
template <class Body>
TIERBED_FN void with_type(FloatType type, const Body& body) {
    if (type == FloatType::bfloat16)
        body(BFloat16{});
    else if (type == FloatType::float16)
        body(Float16{});
    else
        body(Float32{});
}

}  // namespace tierbed
