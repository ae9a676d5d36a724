// One row of a lookup's output: the rows of a bag of ids, summed, or without pooling the row of an id.
//
// One tile works on one bag. Rows are added in the order of their positions, in float32 from 0, each multiplied by its
// weight if there are weights; a mean is divided by the number of rows at the end, and the result is rounded to the
// output's type. Padding is no row; an empty bag is zeros. `Row` is the type of the embeddings' numbers.
#pragma once
#include "gradients.h"
#include "half.h"
#include "line.h"
#include "portable.h"

namespace tierbed {

// The ids of each bag of a lookup, and its row of the output.
//
// Bags are numbered in the memory order of their ids: without features in order; with features, bag `column * batch +
// b` is the one of sample b for the feature of that column, and makes row `b * columns + column`.
struct Bags {
    const i64* offsets = nullptr;   // [parts + 1] ascending; null for bags of `length`
    u64 length = 1;
    const u32* features = nullptr;  // [columns], the place of each column's feature in `offsets`; null for none
    u32 columns = 0, batch = 0;     // with features: offsets are [features * batch + 1]

    // The bag's place in `offsets`.
    TIERBED_FN u64 part(u64 bag) const {
        return features ? static_cast<u64>(features[column(bag)]) * batch + sample(bag) : bag;
    }
    TIERBED_FN u64 begin(u64 bag) const { return at(part(bag)); }
    TIERBED_FN u64 end(u64 bag) const { return at(part(bag) + 1); }
    TIERBED_FN u64 row(u64 bag) const { return features ? static_cast<u64>(sample(bag)) * columns + column(bag) : bag; }

private:
    TIERBED_FN u64 at(u64 part) const { return offsets ? static_cast<u64>(offsets[part]) : part * length; }
    TIERBED_FN u32 column(u64 bag) const { return static_cast<u32>(bag) / batch; }
    TIERBED_FN u32 sample(u64 bag) const { return static_cast<u32>(bag) % batch; }
};

struct Bag {
    const i32* inverse;    // [count], the unique row of each position or -1
    const float* weights;  // [count] or null
    u32 count;
    bool mean;
    const i32* end;  // of the positions of this bag and those after it, whose rows are fetched ahead; null for none
};

constexpr u32 ROWS_AHEAD = 16;

// Fetches the row of a later position.
template <class Row>
TIERBED_FN void fetch_ahead(const u64* lines, const i32* position, const i32* end, u32 dim) {
    if (end - position > ROWS_AHEAD && position[ROWS_AHEAD] >= 0)
        prefetch_bytes(lines[position[ROWS_AHEAD]], dim * static_cast<u32>(sizeof(typename Row::Stored)));
}

template <class Row>
TIERBED_FN const typename Row::Stored* embedding_of(u64 line) {
    return reinterpret_cast<const typename Row::Stored*>(line);
}

#ifdef TIERBED_GPU
constexpr u32 POOL_BLOCK = 1;
#else
constexpr u32 POOL_BLOCK = 128;  // columns summed at a time, in registers
#endif

TIERBED_FN u32 rows_of(const Bag& bag) {
    u32 rows = 0;
    for (u32 i = 0; i < bag.count; ++i) rows += bag.inverse[i] >= 0;
    return rows;
}

// columns [begin, begin + n) of the output; n <= POOL_BLOCK
template <class Row, class Type>
TIERBED_FN void pool_block(typename Type::Stored* out, const u64* lines, const Bag& bag, u32 dim, u32 begin, u32 n,
                           float rows) {
    float memory[POOL_BLOCK], *const sum = unknown(memory);
    for (u32 j = 0; j < n; ++j) sum[j] = 0.0f;
    for (u32 i = 0; i < bag.count; ++i) {
        if (begin == 0) fetch_ahead<Row>(lines, bag.inverse + i, bag.end, dim);
        if (bag.inverse[i] < 0) continue;
        const auto* row = embedding_of<Row>(lines[bag.inverse[i]]) + begin;
        if (bag.weights) {
            const float weight = bag.weights[i];
            for (u32 j = 0; j < n; ++j) sum[j] += weight * Row::load(row[j]);
        } else {
            for (u32 j = 0; j < n; ++j) sum[j] += Row::load(row[j]);
        }
    }
    if (bag.mean && rows != 0.0f)
        for (u32 j = 0; j < n; ++j) sum[j] = sum[j] / rows;
    out += begin;
    for (u32 j = 0; j < n; ++j) out[j] = Type::store(sum[j]);
}

// out [dim]; lines [unique]
template <class Row, class Type>
TIERBED_FN void pool_row(Tile tile, typename Type::Stored* out, const u64* lines, const Bag& bag, u32 dim) {
    const float rows = bag.mean ? static_cast<float>(rows_of(bag)) : 0.0f;
    u32 begin = tile.lane * POOL_BLOCK;
    for (; begin + POOL_BLOCK <= dim; begin += tile.size * POOL_BLOCK)
        pool_block<Row, Type>(out, lines, bag, dim, begin, POOL_BLOCK, rows);
#ifndef TIERBED_GPU  // the bag's ids are read again for each block
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

// out [dim]: the embedding of a line, or zeros if `line` is 0 (padding)
template <class Row, class Type>
TIERBED_FN void gather_row(Tile tile, typename Type::Stored* out, u64 line, u32 dim) {
    if (!line)
        for (u32 c = tile.lane; c < dim; c += tile.size) out[c] = Type::store(0.0f);
    else if (sizeof(*out) == 4 && sizeof(typename Row::Stored) == 4)
        copy_bytes(tile, out, floats(line), dim * 4);
    else
        for (u32 c = tile.lane; c < dim; c += tile.size) out[c] = Type::store(Row::load(embedding_of<Row>(line)[c]));
}

// out [count]: the gradient of each weight of a bag, <grad, row>, over the number of rows for a mean; 0 for padding.
template <class Row, class Type>
TIERBED_FN void pool_weights_grad(Tile tile, float* out, const u64* lines, const Bag& bag,
                                  const typename Type::Stored* grad, u32 dim) {
    const float rows = bag.mean ? static_cast<float>(rows_of(bag)) : 0.0f;
    for (u32 i = 0; i < bag.count; ++i) {
        float product = 0.0f;
        if (bag.inverse[i] >= 0) {
            const auto* row = embedding_of<Row>(lines[bag.inverse[i]]);
            product = sum_columns(
                tile, dim, [&](i32 c) TIERBED_INLINE { return Type::load(grad[c]) * Row::load(row[c]); });
            if (bag.mean) product = product / rows;
        }
        if (tile.lane == 0) out[i] = product;
    }
}

}  // namespace tierbed
