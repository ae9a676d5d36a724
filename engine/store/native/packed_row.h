// A stored row as NumPy and snapshots see it: table u32, key u64, values float32 [width], updates u32, step u32,
// packed, little-endian.
#pragma once
#include <cstring>

#include "lines/kernels/line.h"

namespace tierbed {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "rows are stored little-endian");

inline std::size_t packed_bytes_of(u32 width) { return sizeof(u32) + sizeof(u64) + stored_bytes_of(width); }

// `stored`: values and record, as they stand in a line. Returns the end of what was written.
inline u8* pack_row(u8* out, u32 table, u64 key, const void* stored, const LineShape& shape) {
    std::memcpy(out, &table, sizeof table);
    std::memcpy(out + sizeof table, &key, sizeof key);
    std::memcpy(out + sizeof table + sizeof key, stored, stored_bytes_of(shape.width));
    return out + packed_bytes_of(shape.width);
}

}  // namespace tierbed
