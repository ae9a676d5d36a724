// Converts lines to and from float32.
//
// Optimizer rules work on float32 lines, so a line of 16-bit floats is decoded, updated and encoded again.
// Updates round stochastically, with noise that is a pure function of (seed, row hash, step, column). Initial values,
// `put` and reads round to nearest even. Padding is zeros.
#pragma once
#include "line.h"

namespace tierbed {

// Mixes the bits of x by a bijection (lowbias32 by Chris Wellons) with only 32-bit multiplications and shifts.
TIERBED_FN u32 mix_bits(u32 x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ x >> 16;
}

// One row's rounding noise at one step. Columns are counted in the float32 line.
struct Noise {
    u32 base;

    TIERBED_FN Noise(u64 seed, u64 hash, u32 step) {
        base = mix_bits(static_cast<u32>(seed) ^ static_cast<u32>(hash));
        base = mix_bits(base + static_cast<u32>(seed >> 32));
        base = mix_bits(base ^ static_cast<u32>(hash >> 32));
        base = mix_bits(base + step * 0x9E3779B9u);
    }
    TIERBED_FN u32 operator()(u32 column) const { return mix_bits(base + column * 0x9E3779B9u); }
};

// Rounds to nearest even.
struct NoNoise {};

template <class Type>
TIERBED_FN typename Type::Stored round_to(float x, const NoNoise&, u32) {
    return Type::store(x);
}
template <class Type>
TIERBED_FN typename Type::Stored round_to(float x, const Noise& noise, u32 column) {
    return Type::store_stochastic(x, noise(column));
}

template <class Type>
TIERBED_FN void decode(Tile tile, float* to, u64 from, u32 n) {
    const auto* numbers = reinterpret_cast<const typename Type::Stored*>(from);
    for (u32 j = tile.lane; j < n; j += tile.size) to[j] = Type::load(numbers[j]);
}

// column: the first number's column, for the noise
template <class Type, class Noise>
TIERBED_FN void encode(Tile tile, u64 to, const float* from, u32 n, const Noise& noise, u32 column) {
    auto* numbers = reinterpret_cast<typename Type::Stored*>(to);
    for (u32 j = tile.lane; j < n; j += tile.size) numbers[j] = round_to<Type>(from[j], noise, column + j);
    if (sizeof(*numbers) == 2 && n % 2 == 1 && tile.lane == 0) numbers[n] = 0;
}

// Calls body(type, address, column in the float32 line) for the embedding and 16-bit states. Returns the words.
template <class Body>
TIERBED_FN u32 for_each_encoded_part(u64 line, const LineShape& shape, const Body& body) {
    const u32 state_words = count_words(shape.states, shape.dim);
    u32 word = count_words(shape.embedding, shape.dim);
    body(shape.embedding, line, 0u);
    for (u32 k = 1; k <= shape.num_16bit_states; ++k, word += state_words)
        body(shape.states, line + u64{word} * 4, k * shape.dim);
    return word;
}

// Decodes `line` to the float32 line `to`, whose shape is `make_float32_shape(shape)`. Copies the counters too.
TIERBED_FN void decode_line(Tile tile, u64 to, u64 line, const LineShape& shape) {
    const u32 word = for_each_encoded_part(line, shape, [&](FloatType type, u64 from, u32 column) TIERBED_INLINE {
        with_type(type,
                  [&](auto tag) TIERBED_INLINE { decode<decltype(tag)>(tile, floats(to) + column, from, shape.dim); });
    });
    copy_bytes(tile, floats(to) + shape.dim * (1 + shape.num_16bit_states), floats(line) + word,
               (shape.width - word) * 4 + static_cast<u32>(sizeof(RowCounters)));
}

// Encodes the float32 line `from`, whose shape is `make_float32_shape(shape)`, to `line`. Copies the counters too.
template <class Noise>
TIERBED_FN void encode_line(Tile tile, u64 line, u64 from, const LineShape& shape, const Noise& noise) {
    const u32 word = for_each_encoded_part(line, shape, [&](FloatType type, u64 to, u32 column) TIERBED_INLINE {
        with_type(type, [&](auto tag) TIERBED_INLINE {
            encode<decltype(tag)>(tile, to, floats(from) + column, shape.dim, noise, column);
        });
    });
    copy_bytes(tile, floats(line) + word, floats(from) + shape.dim * (1 + shape.num_16bit_states),
               (shape.width - word) * 4 + static_cast<u32>(sizeof(RowCounters)));
}

// Writes values [dim] to a line's embedding, rounded to nearest even.
TIERBED_FN void set_embedding(Tile tile, u64 line, const float* values, const LineShape& shape) {
    if (shape.embedding == FloatType::float32)
        copy_bytes(tile, floats(line), values, shape.dim * 4);
    else
        with_type(shape.embedding,
                  [&](auto tag) TIERBED_INLINE { encode<decltype(tag)>(tile, line, values, shape.dim, NoNoise{}, 0); });
}

}  // namespace tierbed
