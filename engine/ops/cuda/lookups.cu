// Lookup outputs and weight gradients. Compiled for an output type (TIERBED_GRADIENTS) and a row type (TIERBED_ROW).
#include "ops/kernels/pool.h"
#include "layout.h"
#include "items.h"

using namespace tierbed;

using Type = TIERBED_GRADIENTS;
using Row = TIERBED_ROW;

// Writes each position's embedding to out [n, dim], zeros for padding (-1).
extern "C" __global__ void gather(const u64* lines, const i32* inverse, u64 n, Type::Stored* out) {
    for_each_item<COPY_LANES>(n, [&](Tile tile, u64 i) {
        gather_row<Row, Type>(tile, out + i * SHAPE.dim, inverse[i] < 0 ? 0 : lines[inverse[i]], SHAPE.dim);
    });
}

struct PooledIds {
    const i32* inverse;
    const float* weights;
    u64 num_bags;
    u32 is_mean;
    Bags bags;

    TIERBED_FN u64 begin(u64 bag) const { return bags.begin(bag); }
    TIERBED_FN Bag get_bag(u64 bag) const {
        const u64 first = bags.begin(bag), last = bags.end(bag);
        return Bag{inverse + first, weights ? weights + first : nullptr,
                   last < first ? 0 : static_cast<u32>(last - first), is_mean != 0};
    }
};

// Pools bags to out [bags, dim].
extern "C" __global__ void pool(const u64* lines, PooledIds ids, Type::Stored* out) {
    for_each_item<COLUMN_LANES>(ids.num_bags, [&](Tile tile, u64 bag) {
        pool_row<Row, Type>(tile, out + ids.bags.output_row(bag) * SHAPE.dim, lines, ids.get_bag(bag), SHAPE.dim);
    });
}

// Writes each weight's gradient to out [n], from the output's gradient grad [bags, dim].
extern "C" __global__ void compute_weights_grad(const u64* lines, PooledIds ids, const Type::Stored* grad, float* out) {
    for_each_item<WARP>(ids.num_bags, [&](Tile tile, u64 bag) {
        compute_bag_weights_grad<Row, Type>(tile, out + ids.begin(bag), lines, ids.get_bag(bag),
                                            grad + ids.bags.output_row(bag) * SHAPE.dim, SHAPE.dim);
    });
}

// Sets scales [n], each position's gradient factor: the weight for a sum, or weight / (rows in the bag) for a mean.
extern "C" __global__ void scale_positions(PooledIds ids, float* scales) {
    for_each(ids.num_bags, [&](u64 index) {
        const Bag bag = ids.get_bag(index);
        const float factor = bag.is_mean ? 1.0f / static_cast<float>(count_rows(bag)) : 1.0f;
        float* out = scales + ids.begin(index);
        for (u32 i = 0; i < bag.count; ++i) out[i] = bag.weights ? bag.weights[i] * factor : factor;
    });
}
