// Moves whole lines between tiers.
//
// `bytes` is a multiple of 4 and both sides are aligned to 4; source and destination do not overlap.
#pragma once
#include "line.h"

namespace tierbed {

#ifdef TIERBED_GPU
struct alignas(16) Sixteen {
    u32 x[4];
};

template <class Word>
TIERBED_FN void copy_words(Tile tile, void* to, const void* from, u32 words) {
    for (u32 i = tile.lane; i < words; i += tile.size) static_cast<Word*>(to)[i] = static_cast<const Word*>(from)[i];
}

TIERBED_FN void copy_bytes(Tile tile, void* to, const void* from, u32 bytes) {
    if ((reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from) | bytes) % sizeof(Sixteen))
        copy_words<u32>(tile, to, from, bytes / 4);
    else
        copy_words<Sixteen>(tile, to, from, bytes / sizeof(Sixteen));
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
    copy_bytes(tile, floats(to), floats(from), stored_bytes_of(shape.width));
}

}  // namespace tierbed
