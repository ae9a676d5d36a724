// Moves whole lines, and embeddings out of lines.
//
// `bytes` is a multiple of 4 and both sides are aligned to 4; source and destination do not overlap.
#pragma once
#include "line.h"

namespace tierbed {

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
TIERBED_FN void copy_bytes(Tile tile, void* to, const void* from, u32 bytes) {
    for (u32 i = tile.lane; i < bytes / 4; i += tile.size) static_cast<u32*>(to)[i] = static_cast<const u32*>(from)[i];
}
#else
TIERBED_FN void copy_bytes(Tile, void* to, const void* from, u32 bytes) { __builtin_memcpy(to, from, bytes); }
#endif

TIERBED_FN void copy_line(Tile tile, u64 to, u64 from, const LineShape& shape) {
    copy_bytes(tile, floats(to), floats(from), stored_bytes_of(shape.width));
}

// out [dim]: the embedding of a line, or zeros where `line` is 0 (padding)
TIERBED_FN void gather_row(Tile tile, float* out, u64 line, const LineShape& shape) {
    if (line)
        copy_bytes(tile, out, floats(line), shape.dim * 4);
    else
        for (u32 c = tile.lane; c < shape.dim; c += tile.size) out[c] = 0.0f;
}

}  // namespace tierbed
