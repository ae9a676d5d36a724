// What a step and the tiers do with lines by their addresses: gather and pool to the output, copy, initialise, assign.
#include "ops/kernels/pool.h"
#include "ops/kernels/hash.h"
#include "layout.h"
#include "items.h"

using namespace tierbed;

// out [n, dim]: the embedding of each position, zeros for padding (-1)
template <class Type>
TIERBED_FN void gather_rows(const u64* lines, const i32* inverse, u64 n, void* out) {
    auto* rows = static_cast<typename Type::Stored*>(out);
    for_each_item<COPY_LANES>(n, [&](Tile tile, u64 i) {
        gather_row<Row, Type>(tile, rows + i * SHAPE.dim, inverse[i] < 0 ? 0 : lines[inverse[i]], SHAPE.dim);
    });
}

// The ids of a lookup, in bags.
struct PooledIds {
    const i32* inverse;
    const float* weights;
    u64 count;
    u32 mean;
    Bags bags;

    TIERBED_FN u64 begin(u64 bag) const { return bags.begin(bag); }
    TIERBED_FN Bag at(u64 bag) const {
        const u64 first = bags.begin(bag), last = bags.end(bag);
        return Bag{inverse + first, weights ? weights + first : nullptr,
                   last < first ? 0 : static_cast<u32>(last - first), mean != 0};
    }
};

// out [bags, dim]
template <class Type>
TIERBED_FN void pool_rows(const u64* lines, const PooledIds& ids, void* out) {
    auto* rows = static_cast<typename Type::Stored*>(out);
    for_each_item<COLUMN_LANES>(ids.count, [&](Tile tile, u64 bag) {
        pool_row<Row, Type>(tile, rows + ids.bags.row(bag) * SHAPE.dim, lines, ids.at(bag), SHAPE.dim);
    });
}

// grads [bags, dim] -> out [n]
template <class Type>
TIERBED_FN void pool_weights_grads(const u64* lines, const PooledIds& ids, const void* grads, float* out) {
    const auto* rows = static_cast<const typename Type::Stored*>(grads);
    for_each_item<WARP>(ids.count, [&](Tile tile, u64 bag) {
        pool_weights_grad<Row, Type>(tile, out + ids.begin(bag), lines, ids.at(bag),
                                     rows + ids.bags.row(bag) * SHAPE.dim, SHAPE.dim);
    });
}

// scales [n]: what the gradient of each position is multiplied by, its weight and for a mean its share of the bag
extern "C" __global__ void scale_positions(PooledIds ids, float* scales) {
    for_each(ids.count, [&](u64 number) {
        const Bag bag = ids.at(number);
        const float share = bag.mean ? 1.0f / static_cast<float>(rows_of(bag)) : 1.0f;
        float* out = scales + ids.begin(number);
        for (u32 i = 0; i < bag.count; ++i) out[i] = bag.weights ? bag.weights[i] * share : share;
    });
}

extern "C" __global__ void gather_float32(const u64* lines, const i32* inverse, u64 n, void* out) {
    gather_rows<Float32>(lines, inverse, n, out);
}
extern "C" __global__ void gather_float16(const u64* lines, const i32* inverse, u64 n, void* out) {
    gather_rows<Float16>(lines, inverse, n, out);
}
extern "C" __global__ void gather_bfloat16(const u64* lines, const i32* inverse, u64 n, void* out) {
    gather_rows<BFloat16>(lines, inverse, n, out);
}
extern "C" __global__ void pool_float32(const u64* lines, PooledIds ids, void* out) {
    pool_rows<Float32>(lines, ids, out);
}
extern "C" __global__ void pool_float16(const u64* lines, PooledIds ids, void* out) {
    pool_rows<Float16>(lines, ids, out);
}
extern "C" __global__ void pool_bfloat16(const u64* lines, PooledIds ids, void* out) {
    pool_rows<BFloat16>(lines, ids, out);
}
extern "C" __global__ void weights_grad_float32(const u64* lines, PooledIds ids, const void* grads, float* out) {
    pool_weights_grads<Float32>(lines, ids, grads, out);
}
extern "C" __global__ void weights_grad_float16(const u64* lines, PooledIds ids, const void* grads, float* out) {
    pool_weights_grads<Float16>(lines, ids, grads, out);
}
extern "C" __global__ void weights_grad_bfloat16(const u64* lines, PooledIds ids, const void* grads, float* out) {
    pool_weights_grads<BFloat16>(lines, ids, grads, out);
}

// Copies line from[i] to to[i]; 0 in either stays.
extern "C" __global__ void copy_lines(const u64* from, const u64* to, u64 n) {
    for_each_item<COPY_LANES>(n, [&](Tile tile, u64 i) {
        if (from[i] && to[i]) copy_line(tile, to[i], from[i], SHAPE);
    });
}

// Gives each of the first `count` lines that is not 0 its row's initial values; with `only`, those flagged there alone.
extern "C" __global__ void initialise_lines(const u64* hashes, const u32* tables, const u32* count, const u64* lines,
                                            const u8* only, InitialRow initial, const __grid_constant__ SlotHash slot_hash) {
    for_each_item<WARP>(*count, [&](Tile tile, u64 i) {
        if (lines[i] == 0 || (only && !only[i])) return;
        initialise_line(tile, lines[i], SHAPE, initial, tables[i], slot_hash.key(tables[i], hashes[i]));
    });
}

// Lines of 0 among the first `count` become lines of `memory`, in order, by ranks [n], the running sum of the zeros.
extern "C" __global__ void place_lines(const i32* ranks, const u32* count, u64 memory, u64* lines) {
    for_each(*count, [&](u64 i) {
        if (lines[i] == 0) lines[i] = memory + static_cast<u64>(ranks[i] - 1) * SHAPE.line_bytes;
    });
}

// total [1] takes the number of the first `count` lines that were never written; a line of 0 is such.
extern "C" __global__ void count_new(const u64* lines, const u32* count, u64* total) {
    u64 found = 0;
    for_each(*count, [&](u64 i) { found += lines[i] == 0 || record(lines[i], SHAPE)->updates == 0; });
    if (found) atomicAdd(total, found);
}

// written [tables]: how many of the first `count` lines were ever written.
extern "C" __global__ void count_written(const u64* lines, const u32* tables, const u32* count, u64* written) {
    Tally counted(written);
    for_each(*count, [&](u64 i) {
        if (lines[i] && record(lines[i], SHAPE)->updates) counted.add(tables[i]);
    });
    counted.end();
}

// values [size, dim] -> the embeddings of their rows, the last occurrence standing. written [tables] counts first
// writes.
extern "C" __global__ void assign_rows(const u64* lines, const u32* tables, const u32* offsets, const u32* positions,
                                       const u32* count, const float* values, u32 step, u64* written,
                                       const u32* faults) {
    if (*faults) return;
    Tally counted(written);
    for_each_item<WARP>(*count, [&](Tile tile, u64 i) {
        const u64 last = positions[offsets[i + 1] - 1];
        set_embedding(tile, lines[i], values + last * SHAPE.dim, SHAPE);
        if (tile.lane != 0) return;
        Record* lifecycle = record(lines[i], SHAPE);
        if (lifecycle->updates == 0) counted.add(tables[i]);
        if (lifecycle->updates != 0xFFFFFFFFu) lifecycle->updates += 1;
        lifecycle->step = step;
    });
    counted.end();
}
