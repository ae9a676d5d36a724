// Where things lie in a row's line: embedding, optimizer state, lifecycle record (docs/architecture.md).
#pragma once
#include "portable.h"

namespace tierbed {

struct LineShape {
    u32 dim;         // floats of the embedding
    u32 width;       // floats of embedding and state: dim, dim for each element state, 1 for each row state
    u32 line_bytes;  // record and padding included, a multiple of 16
};

struct Record {
    u32 updates;
    u32 step;
};

TIERBED_FN u32 line_bytes_of(u32 width) { return (width * 4 + static_cast<u32>(sizeof(Record)) + 15) / 16 * 16; }
// what a tier on disk stores: the line without its padding
TIERBED_FN u32 stored_bytes_of(u32 width) { return width * 4 + static_cast<u32>(sizeof(Record)); }

TIERBED_FN float* floats(u64 line) { return reinterpret_cast<float*>(line); }
TIERBED_FN Record* record(u64 line, const LineShape& shape) {
    return reinterpret_cast<Record*>(floats(line) + shape.width);
}

}  // namespace tierbed
