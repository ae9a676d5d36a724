// Computes a row's initial values. Values depend only on (seed, table, key, column), so rows that were never updated
// need not be stored. The row of `zero_key`, if there is one, starts as zeros.
//
// One tile writes one whole line: embedding, optimizer state, counters, padding. Philox's key is the seed. Column c
// gets word c % 4 of the output for counter (c / 4, table, key low, key high), so each column has its own 32 bits.
#pragma once
#include "codec.h"
#include "math.h"
#include "portable.h"

namespace tierbed {

// Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
struct Words {
    u32 x[4];
};

TIERBED_FN Words philox(Words counter, u64 key) {
    u32 k0 = static_cast<u32>(key), k1 = static_cast<u32>(key >> 32);
    Words c = counter;
    for (int round = 0; round < 10; ++round) {
        const u32 high0 = multiply_high(0xD2511F53u, c.x[0]), low0 = 0xD2511F53u * c.x[0];
        const u32 high1 = multiply_high(0xCD9E8D57u, c.x[2]), low1 = 0xCD9E8D57u * c.x[2];
        c = Words{{high1 ^ c.x[1] ^ k0, low1, high0 ^ c.x[3] ^ k1, low0}};
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}

enum class Initial : u32 { constant = 0, uniform = 1, normal = 2 };

// One table's initial values for a column group. `kind` chooses the formula. u is a random number in [0, 1).
// constant: a; uniform: a + u (b - a); normal: a + b quantile(q0 + u (q1 - q0)).
struct InitialValues {
    Initial kind;
    float a, b;
    double q0, q1;
};

struct InitialRow {
    u64 seed;
    const InitialValues* values;  // [tables * groups]
    const u32* group_ends;        // [groups], each column group's end column
    u32 num_groups;
    const float* states;    // [num_states], each optimizer state's initial value
    const u32* state_ends;  // [num_states], each state's end, in words from the line's start
    u32 num_states;
    u32 has_zero_key;
    u64 zero_key;  // in every table, this key's embedding starts as zeros
};

TIERBED_FN float make_initial_value(const InitialValues& initial, u32 bits) {
    if (initial.kind == Initial::constant) return initial.a;
    if (initial.kind == Initial::uniform) {
        const float u = static_cast<float>(bits >> 8) * 5.9604644775390625e-08f;  // 2^-24
        const float range = initial.b - initial.a;
        return initial.a + u * range;
    }
    const double u = (static_cast<double>(bits) + 0.5) * 2.3283064365386962890625e-10;  // 2^-32
    const double z = normal_quantile(initial.q0 + u * (initial.q1 - initial.q0));
    return static_cast<float>(static_cast<double>(initial.a) + static_cast<double>(initial.b) * z);
}

template <class Type>
TIERBED_FN void initialise_embedding(Tile tile, u64 line, const LineShape& shape, const InitialRow& row, u32 table,
                                     u64 key) {
    auto* out = reinterpret_cast<typename Type::Stored*>(line);
    // The zero key's row has no random columns. Keys are compared first, since most keys differ from the zero key.
    const u32 random = key == row.zero_key && row.has_zero_key != 0 ? 0 : shape.dim;
    for (u32 block = tile.lane; block * 4 < random; block += tile.size) {
        const Words words = philox(Words{{block, table, static_cast<u32>(key), static_cast<u32>(key >> 32)}}, row.seed);
        u32 group = 0;
        for (u32 j = 0; j < 4 && block * 4 + j < random; ++j) {
            const u32 column = block * 4 + j;
            while (column >= row.group_ends[group]) ++group;
            out[column] = Type::store(make_initial_value(row.values[table * row.num_groups + group], words.x[j]));
        }
    }
    for (u32 column = random + tile.lane; column < shape.dim; column += tile.size) out[column] = Type::store(0.0f);
    if (sizeof(*out) == 2 && shape.dim % 2 == 1 && tile.lane == 0) out[shape.dim] = 0;
}

// Packs x twice, as a 16-bit type, into a word.
TIERBED_FN u32 pack_pair(FloatType type, float x) {
    return (type == FloatType::bfloat16 ? BFloat16::store(x) : Float16::store(x)) * 0x10001u;
}

// Writes a line's initial values. 16-bit numbers are rounded to nearest even.
TIERBED_FN void initialise_line(Tile tile, u64 line, const LineShape& shape, const InitialRow& row, u32 table,
                                u64 key) {
    with_type(shape.embedding, [&](auto type) TIERBED_INLINE {
        initialise_embedding<decltype(type)>(tile, line, shape, row, table, key);
    });
    u32* const out = reinterpret_cast<u32*>(line);
    for (u32 k = 0; k < row.num_states; ++k) {
        const bool is_16bit = k < shape.num_16bit_states;
        const u32 word = is_16bit ? pack_pair(shape.states, row.states[k]) : as_bits(row.states[k]);
        const u32 begin = k == 0 ? count_words(shape.embedding, shape.dim) : row.state_ends[k - 1];
        const u32 end = row.state_ends[k];
        for (u32 i = begin + tile.lane; i < end; i += tile.size)
            out[i] = is_16bit && shape.dim % 2 == 1 && i + 1 == end ? word & 0xFFFFu : word;  // padding is zeros
    }
    u32* tail = out + shape.width;
    for (u32 i = tile.lane; i < shape.line_bytes / 4 - shape.width; i += tile.size) tail[i] = 0;
}

}  // namespace tierbed
