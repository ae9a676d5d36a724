// The types that stored numbers, a lookup's output and its gradient may have.
//
// `store` rounds to nearest even. `store_by_chance` rounds to one of the two neighbours, away from 0 with a probability
// of the distance from the other: the highest of 32 bits of noise are added below the last place, and what is there is
// cut off. Exact values stay; what is beyond the largest finite number becomes that number. Infinities pass both; a NaN
// becomes one quiet NaN, since processors differ in the sign and the payload of what they make. A fixed sequence of
// operations, so that the bits are the same everywhere.
#pragma once
#include "portable.h"

namespace tierbed {

// Choices without branches, so that loops of them become vectors. Numbers are below 2^31.
TIERBED_FN u32 below(u32 a, u32 b) { return static_cast<u32>(static_cast<i32>(a - b) >> 31); }  // all bits, or none
TIERBED_FN u32 either(u32 mask, u32 a, u32 b) { return (a & mask) | (b & ~mask); }
TIERBED_FN u32 smaller(u32 a, u32 b) { return a < b ? a : b; }

enum class FloatType : u32 { float32 = 0, float16 = 1, bfloat16 = 2 };
constexpr u32 FLOAT_TYPES = 3;

struct Float32 {
    static constexpr FloatType TYPE = FloatType::float32;
    using Stored = float;
    TIERBED_FN static float load(Stored x) { return x; }
    TIERBED_FN static Stored store(float x) { return x; }
    TIERBED_FN static Stored store_by_chance(float x, u32) { return x; }
};

struct BFloat16 {
    static constexpr FloatType TYPE = FloatType::bfloat16;
    using Stored = u16;
    TIERBED_FN static float load(Stored x) { return float_of(static_cast<u32>(x) << 16); }
    TIERBED_FN static Stored store(float x) {
        const u32 bits = bits_of(x);
        const u32 rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
        return static_cast<Stored>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
    }
    TIERBED_FN static Stored store_by_chance(float x, u32 noise) {
        const u32 bits = bits_of(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
        const u32 finite = sign | smaller((magnitude + (noise >> 16)) >> 16, 0x7F7Fu);
        const u32 special = either(below(0x7F800000u, magnitude), 0x7FC0u, sign | 0x7F80u);
        return static_cast<Stored>(either(below(magnitude, 0x7F800000u), finite, special));
    }
};

struct Float16 {
    static constexpr FloatType TYPE = FloatType::float16;
    using Stored = u16;
    TIERBED_FN static float load(Stored x) {
        const u32 sign = (x & 0x8000u) << 16, magnitude = x & 0x7FFFu;
        const u32 small = bits_of(static_cast<float>(static_cast<i32>(magnitude)) * 5.9604644775390625e-08f);  // 2^-24
        const u32 normal = (magnitude << 13) + 0x38000000u + (below(0x7BFFu, magnitude) & 0x38000000u);
        return float_of(sign | either(below(magnitude, 0x400u), small, normal));
    }
    TIERBED_FN static Stored store(float x) {
        const u32 bits = bits_of(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
        // adding 0.5 rounds a subnormal at its last place, 2^-24
        const u32 small = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
        const u32 normal = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
        const u32 large = either(below(0x7F800000u, magnitude), 0x7E00u, sign | 0x7C00u);
        const u32 finite = sign | either(below(magnitude, 0x38800000u), small, normal);
        return static_cast<Stored>(either(below(magnitude, 0x47800000u), finite, large));
    }
    TIERBED_FN static Stored store_by_chance(float x, u32 noise) {
        const u32 bits = bits_of(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
        const u32 is_small = below(magnitude, 0x38800000u);
        const float units = float_of(magnitude & is_small) * 16777216.0f;  // of 2^-24, the last place of a subnormal
        const i32 whole = static_cast<i32>(units);
        const i32 rest = static_cast<i32>((units - static_cast<float>(whole)) * 16777216.0f);
        const u32 small = static_cast<u32>(whole) + ((static_cast<u32>(rest) + (noise >> 8)) >> 24);
        const u32 normal = smaller((magnitude - 0x38000000u + (noise >> 19)) >> 13, 0x7BFFu);
        const u32 finite = sign | either(is_small, small, normal);
        const u32 special = either(below(0x7F800000u, magnitude), 0x7E00u, sign | 0x7C00u);
        return static_cast<Stored>(either(below(magnitude, 0x7F800000u), finite, special));
    }
};

// Calls body(Type{}) for the type of that name.
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
