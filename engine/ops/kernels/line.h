// The layout of a row's line: embedding, optimizer state, counters (docs/architecture.md).
//
// Tiers copy a line as a sequence of 4-byte words. Only code that reads numbers needs their types. It uses float32
// lines in place, and converts other lines by codec.h.
#pragma once
#include "float_types.h"

namespace tierbed {

struct LineShape {
    u32 dim;         // the number of embedding columns
    u32 width;       // how many 4-byte words the embedding and the states take
    u32 line_bytes;  // including counters and padding, a multiple of 16
    // The embedding's type, and the type of the first `num_16bit_states` states. Each has `dim` numbers, padded to a
    // whole 4-byte word. Other states are float32.
    FloatType embedding = FloatType::float32, states = FloatType::float32;
    u32 num_16bit_states = 0;

    TIERBED_FN constexpr bool has_16bit_floats() const { return embedding != FloatType::float32 || num_16bit_states; }
};

struct RowCounters {
    u32 updates;  // how often the row was written
    u32 step;     // the step of the last write
};

TIERBED_FN constexpr u32 compute_line_bytes(u32 width) {
    return (width * 4 + static_cast<u32>(sizeof(RowCounters)) + 15) / 16 * 16;
}
// Returns the size of a row in a tier on disk, in bytes: a line's size without padding.
TIERBED_FN u32 compute_stored_bytes(u32 width) { return width * 4 + static_cast<u32>(sizeof(RowCounters)); }
// Returns how many words n numbers take.
TIERBED_FN constexpr u32 count_words(FloatType type, u32 n) { return type == FloatType::float32 ? n : (n + 1) / 2; }

TIERBED_FN float* floats(u64 line) { return reinterpret_cast<float*>(line); }
TIERBED_FN RowCounters* row_counters(u64 line, const LineShape& shape) {
    return reinterpret_cast<RowCounters*>(floats(line) + shape.width);
}

// Returns the shape of the line decoded to float32.
TIERBED_FN constexpr LineShape make_float32_shape(const LineShape& shape) {
    const u32 added = shape.dim - count_words(shape.embedding, shape.dim);
    const u32 width = shape.width + added + shape.num_16bit_states * (shape.dim - count_words(shape.states, shape.dim));
    return {shape.dim, width, compute_line_bytes(width)};
}

// Copies `bytes` bytes. The memory must not overlap. `bytes` and both addresses must be multiples of 4.
#ifdef TIERBED_GPU
struct alignas(16) Bytes16 {
    u32 x[4];
};

template <class Word>
TIERBED_FN void copy_words(Tile tile, void* to, const void* from, u32 words) {
    for (u32 i = tile.lane; i < words; i += tile.size) static_cast<Word*>(to)[i] = static_cast<const Word*>(from)[i];
}

TIERBED_FN void copy_bytes(Tile tile, void* to, const void* from, u32 bytes) {
    if ((reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from) | bytes) % sizeof(Bytes16))
        copy_words<u32>(tile, to, from, bytes / 4);
    else
        copy_words<Bytes16>(tile, to, from, bytes / sizeof(Bytes16));
}
#else
TIERBED_FN void copy_bytes(Tile, void* to, const void* from, u32 bytes) {
    auto* target = static_cast<u8*>(to);
    const auto* source = static_cast<const u8*>(from);
    for (; bytes >= 64; bytes -= 64, target += 64, source += 64) __builtin_memcpy(target, source, 64);  // in registers
    __builtin_memcpy(target, source, bytes);
}
#endif

TIERBED_FN void copy_line(Tile tile, u64 to, u64 from, const LineShape& shape) {
    copy_bytes(tile, floats(to), floats(from), compute_stored_bytes(shape.width));
}

}  // namespace tierbed
