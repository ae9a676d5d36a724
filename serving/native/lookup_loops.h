// The loops of lookups in row files. Like engine/ops/native/loops.h, they are compiled once for each instruction set.
#pragma once
#include <cstddef>

#include "ops/kernels/pool.h"
#include "row_file_layout.h"

namespace tierbed::serving {

// The ids of a lookup, as in `LookupArrays` of engine/ops/native/batch.h.
struct Lookup {
    const u64* keys;
    const u32* tables;  // of each bag; with features, of each column; null: bag b belongs to table b % num_tables
    std::size_t num_bags;
    Bags bags;
    bool is_pooled;
    const float* weights;  // [ids] or null
    bool is_mean;
};

struct LookupCounts {
    u64 ids = 0, unknown = 0, delta = 0, dropped = 0;  // unknown: ids without a row; delta: ids found in a delta
    u64 illegal_position = ~u64{0}, illegal_key = 0;   // the first illegal id
    u32 illegal_table = 0;
};

struct LookupJob {
    Lookup lookup;
    void* out;  // [bags, dim]
    const TableView* tables;
    u32 num_tables, dim;
    bool has_deltas, has_padding;  // without deltas, lookups read less of each table's view
    u64 padding_key;
    const u64* max_ids;        // [tables], or null if all ids are legal
    const u32* drops_illegal;  // [tables]
    // Returns the initial row of an unknown id, which may be in `memory` [2 * dim + 8]. Null: zeros.
    const float* (*make_initial_row)(const void* context, u32 table, u64 key, float* memory);
    const void* context;
    float* memory;  // [3 * dim + 8]
};

struct LookupLoops {
    void (*look_up[ENCODINGS][FLOAT_TYPES])(const LookupJob&, LookupCounts&);  // by encoding and output type
};

}  // namespace tierbed::serving
