// Computes one row of a lookup's output: a bag's sum or mean, or a copy of the id's row if nothing is pooled.
//
// One tile (a thread, or part of a warp) works on one bag. Rows (times weights, if any) are added in float32, ordered
// by position, starting from 0. A mean divides the sum by the row count. The result is rounded to the output type.
// Padding does not count as a row; an empty bag yields zeros. `Row` is the rows' float type; `Type` is the output type.
#pragma once
#include "gradients.h"
#include "float_types.h"
#include "line.h"
#include "portable.h"

namespace tierbed {

// Maps a lookup's bags to their ids and output rows.
//
// Without features, bag b's ids begin at offsets[b], and the bag's output row is b. With features, each column looks up
// one feature. In a column, sample b has bag `column * batch_size + b` and output row `b * num_columns + column`.
struct Bags {
    const i64* offsets = nullptr;  // [bags + 1] ascending; null if all bags have `length` ids
    u64 length = 1;
    const u32* features = nullptr;        // [columns], each column's feature; null without features
    u32 num_columns = 0, batch_size = 0;  // with features: offsets are [features * batch_size + 1]

    // Returns the bag's index in `offsets`.
    TIERBED_FN u64 offset_index(u64 bag) const {
        return features ? static_cast<u64>(features[column(bag)]) * batch_size + sample(bag) : bag;
    }
    TIERBED_FN u64 begin(u64 bag) const { return get_offset(offset_index(bag)); }
    TIERBED_FN u64 end(u64 bag) const { return get_offset(offset_index(bag) + 1); }
    TIERBED_FN u64 output_row(u64 bag) const {
        return features ? static_cast<u64>(sample(bag)) * num_columns + column(bag) : bag;
    }

private:
    TIERBED_FN u64 get_offset(u64 index) const { return offsets ? static_cast<u64>(offsets[index]) : index * length; }
    TIERBED_FN u32 column(u64 bag) const { return static_cast<u32>(bag) / batch_size; }
    TIERBED_FN u32 sample(u64 bag) const { return static_cast<u32>(bag) % batch_size; }
};

struct Bag {
    const i32* inverse;    // [count], each position's unique row or -1
    const float* weights;  // [count] or null
    u32 count;
    bool is_mean;
    const i32* end;  // where prefetch stops, at the end of this bag or a later bag; null for no prefetch
};

constexpr u32 ROW_PREFETCH_DISTANCE = 16;

// Prefetches the row of the position that is ROW_PREFETCH_DISTANCE later.
template <class Row>
TIERBED_FN void prefetch_row(const u64* lines, const i32* position, const i32* end, u32 dim) {
    if (end - position > ROW_PREFETCH_DISTANCE && position[ROW_PREFETCH_DISTANCE] >= 0)
        prefetch_bytes(lines[position[ROW_PREFETCH_DISTANCE]], dim * static_cast<u32>(sizeof(typename Row::Stored)));
}

template <class Row>
TIERBED_FN const typename Row::Stored* embedding(u64 line) {
    return reinterpret_cast<const typename Row::Stored*>(line);
}

#ifdef TIERBED_GPU
constexpr u32 POOL_BLOCK = 1;
#else
constexpr u32 POOL_BLOCK = 128;  // how many columns are summed together, in registers
#endif

TIERBED_FN u32 count_rows(const Bag& bag) {
    u32 rows = 0;
    for (u32 i = 0; i < bag.count; ++i) rows += bag.inverse[i] >= 0;
    return rows;
}

// Writes columns [begin, begin + n) of the output row. n <= POOL_BLOCK.
template <class Row, class Type>
TIERBED_FN void pool_block(typename Type::Stored* out, const u64* lines, const Bag& bag, u32 dim, u32 begin, u32 n,
                           float rows) {
    float memory[POOL_BLOCK], *const sum = hide_origin(memory);
    for (u32 j = 0; j < n; ++j) sum[j] = 0.0f;
    for (u32 i = 0; i < bag.count; ++i) {
        if (begin == 0) prefetch_row<Row>(lines, bag.inverse + i, bag.end, dim);
        if (bag.inverse[i] < 0) continue;
        const auto* row = embedding<Row>(lines[bag.inverse[i]]) + begin;
        if (bag.weights) {
            const float weight = bag.weights[i];
            for (u32 j = 0; j < n; ++j) sum[j] += weight * Row::load(row[j]);
        } else {
            for (u32 j = 0; j < n; ++j) sum[j] += Row::load(row[j]);
        }
    }
    if (bag.is_mean && rows != 0.0f)
        for (u32 j = 0; j < n; ++j) sum[j] = sum[j] / rows;
    out += begin;
    for (u32 j = 0; j < n; ++j) out[j] = Type::store(sum[j]);
}

// Pools a bag to out [dim]. lines [unique]: each row's line.
template <class Row, class Type>
TIERBED_FN void pool_row(Tile tile, typename Type::Stored* out, const u64* lines, const Bag& bag, u32 dim) {
    const float rows = bag.is_mean ? static_cast<float>(count_rows(bag)) : 0.0f;
    u32 begin = tile.lane * POOL_BLOCK;
    for (; begin + POOL_BLOCK <= dim; begin += tile.size * POOL_BLOCK)
        pool_block<Row, Type>(out, lines, bag, dim, begin, POOL_BLOCK, rows);
#ifndef TIERBED_GPU  // few large blocks, since each block reads the bag's ids again
    const auto pool_rest = [&](u32 n) TIERBED_INLINE {
        if (begin + n > dim) return;
        pool_block<Row, Type>(out, lines, bag, dim, begin, n, rows);
        begin += n;
    };
    pool_rest(64);
    pool_rest(32);
    pool_rest(16);
#endif
    if (begin < dim) pool_block<Row, Type>(out, lines, bag, dim, begin, dim - begin, rows);
}

// Copies a line's embedding to out [dim], zeros if `line` is 0 (padding).
template <class Row, class Type>
TIERBED_FN void gather_row(Tile tile, typename Type::Stored* out, u64 line, u32 dim) {
    if (!line)
        for (u32 c = tile.lane; c < dim; c += tile.size) out[c] = Type::store(0.0f);
    else if (sizeof(*out) == 4 && sizeof(typename Row::Stored) == 4)
        copy_bytes(tile, out, floats(line), dim * 4);
    else
        for (u32 c = tile.lane; c < dim; c += tile.size) out[c] = Type::store(Row::load(embedding<Row>(line)[c]));
}

// Writes a bag's weight gradients to out [count], 0 for padding. A gradient is the dot product of `grad` and the row.
// For a mean, the product is divided by the row count.
template <class Row, class Type>
TIERBED_FN void compute_bag_weights_grad(Tile tile, float* out, const u64* lines, const Bag& bag,
                                         const typename Type::Stored* grad, u32 dim) {
    const float rows = bag.is_mean ? static_cast<float>(count_rows(bag)) : 0.0f;
    for (u32 i = 0; i < bag.count; ++i) {
        float product = 0.0f;
        if (bag.inverse[i] >= 0) {
            const auto* row = embedding<Row>(lines[bag.inverse[i]]);
            product =
                sum_columns(tile, dim, [&](i32 c) TIERBED_INLINE { return Type::load(grad[c]) * Row::load(row[c]); });
            if (bag.is_mean) product = product / rows;
        }
        if (tile.lane == 0) out[i] = product;
    }
}

}  // namespace tierbed
