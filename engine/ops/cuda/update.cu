// Gradients of a batch's rows, reduced and applied. Compiled for one rule (TIERBED_RULE) and one type of gradients
// (TIERBED_GRADIENTS).
//
// One warp works on one row. Of a row with more than SUM_BLOCK occurrences, blocks after the first are summed by warps
// of their own before (`sum_blocks`), then added in order, so the result is that of one thread that does it all. Block
// b of a row whose occurrences begin at `offset` has slot offset / SUM_BLOCK + b: no two blocks after the first share
// one.
#include "layout.h"
#include "tally.h"
#include "ops/kernels/update.h"
#include "rules.h"

using namespace tierbed;

namespace {

using Rule = TIERBED_RULE;
using Type = TIERBED_GRADIENTS;

constexpr u32 MOST_PARTS = 8, MOST_HYPERS = 24;

// What changes from step to step: `scale` multiplies gradients, `step` is the embedding's.
struct Numbers {
    double hyper[MOST_HYPERS];
    float scale;
    u32 step;
};

// The gradients of all lookups, and the occurrences of all rows.
struct Sources {
    GradientPart parts[MOST_PARTS];
    u32 count;
    const i32* rows;      // [n], the row of each occurrence; padding, -1, comes first
    const u32* offsets;   // [unique + 1]
    const u32* sources;   // [n]
    const float* scales;  // [n] or null
    u64 n;

    TIERBED_FN Gradients gradients() const { return Gradients{parts, count, SHAPE.dim}; }
    TIERBED_FN Occurrences of(u64 row) const {
        const u32 begin = offsets[row];
        return Occurrences{sources + begin, scales ? scales + begin : nullptr, offsets[row + 1] - begin};
    }
};

// `body(gradients, occurrences)` with what gives the row's sum: its own occurrences, or of many one that is their sum.
template <class Body>
TIERBED_FN void with_gradients(Tile tile, const Sources& from, u64 row, float* sums, const Body& body) {
    const Occurrences all = from.of(row);
    if (all.count <= SUM_BLOCK) {
        body(Type{}, from.gradients(), all);
        return;
    }
    const u32 slot = from.offsets[row] / SUM_BLOCK + 1, blocks = (all.count + SUM_BLOCK - 1) / SUM_BLOCK;
    for_blocks(tile, SHAPE.dim, [&](u32 begin, u32 n) {
        float sum[VEC];
        sum_occurrences<Type>(sum, from.gradients(), all, 0, SUM_BLOCK, begin, n);
        float* total = sums + static_cast<u64>(slot) * SHAPE.dim + begin;
        for (u32 block = 0; block + 1 < blocks; ++block)
            for (u32 j = 0; j < n; ++j) sum[j] += total[static_cast<u64>(block) * SHAPE.dim + j];
        for (u32 j = 0; j < n; ++j) total[j] = sum[j];
    });
    const GradientPart part{sums, 0};
    body(Float32{}, Gradients{&part, 1, SHAPE.dim}, Occurrences{&slot, nullptr, 1});
}

TIERBED_FN float* memory_of_warp(float* whole) {
    const u64 warp = (static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x) / WARP;
    return whole ? whole + warp * SHAPE.dim : nullptr;
}

}  // namespace

// sums [n / SUM_BLOCK + 1, dim]: of blocks after a row's first, by slot
extern "C" __global__ void sum_blocks(const __grid_constant__ Sources from, float* sums) {
    for_each_item<WARP>(from.n / SUM_BLOCK + 1, [&](Tile tile, u64 slot) {
        // a block of this slot belongs to the row on both sides of the slot's begin
        const u64 middle = slot * SUM_BLOCK;
        if (middle == 0 || middle >= from.n || from.rows[middle] < 0 || from.rows[middle - 1] != from.rows[middle])
            return;
        const u64 row = static_cast<u64>(from.rows[middle]);
        const Occurrences all = from.of(row);
        const u64 first = middle + from.offsets[row] % SUM_BLOCK - from.offsets[row];
        if (first >= all.count) return;
        const u32 last = all.count - first < SUM_BLOCK ? all.count : static_cast<u32>(first) + SUM_BLOCK;
        for_blocks(tile, SHAPE.dim, [&](u32 begin, u32 n) {
            sum_occurrences<Type>(sums + slot * SHAPE.dim + begin, from.gradients(), all, static_cast<u32>(first), last,
                                  begin, n);
        });
    });
}

// Kernels read the numbers from memory: a launch that is recorded keeps its arguments for good.
extern "C" __global__ void write_numbers(const __grid_constant__ Numbers given, Numbers* numbers) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *numbers = given;
}

// `whole`: [warps of the grid, dim]. written [tables] counts first writes.
extern "C" __global__ void update_rows(const __grid_constant__ Sources from, const u64* lines, const u32* tables,
                                       const u32* count, const Numbers* numbers, float* sums, float* whole,
                                       u64* written, const u32* faults) {
    if (*faults) return;
    const Rule rule(numbers->hyper);
    const float scale = numbers->scale;
    const u32 step = numbers->step;
    Tally counted(written);
    for_each_item<WARP>(*count, [&](Tile tile, u64 row) {
        with_gradients(
            tile, from, row, sums, [&](auto type, const Gradients& gradients, const Occurrences& occurrences) {
                const bool first = update_row<decltype(type)>(tile, lines[row], SHAPE, gradients, occurrences, scale,
                                                              rule, step, memory_of_warp(whole));
                if (first && tile.lane == 0) counted.add(tables[row]);
            });
    });
    counted.end();
}

// squares [count]: the sum of the squares of each row's gradient. `whole`: [warps of the grid, dim].
extern "C" __global__ void square_rows(const __grid_constant__ Sources from, const u32* count, float* sums,
                                       float* whole, float* squares) {
    for_each_item<WARP>(*count, [&](Tile tile, u64 row) {
        with_gradients(
            tile, from, row, sums, [&](auto type, const Gradients& gradients, const Occurrences& occurrences) {
                const float square = square_row<decltype(type)>(tile, gradients, occurrences, memory_of_warp(whole));
                if (tile.lane == 0) squares[row] = square;
            });
    });
}

// The two below do nothing for a rule that does not catch up; templates, since such a rule has not what it takes.
template <class Rule>
TIERBED_FN void settle(const u64* lines, u64 count, const Rule& rule, u32 step, u64 memory, u64* views) {
    if constexpr (Rule::CATCHES_UP)
        for_each_item<WARP>(count, [&](Tile tile, u64 row) {
            const bool behind = is_behind(*record(lines[row], SHAPE), step);
            const u64 view = behind ? memory + row * SHAPE.line_bytes : lines[row];
            if (tile.lane == 0) views[row] = view;
            if (!behind) return;
            copy_line(tile, view, lines[row], SHAPE);
            synchronise(tile);
            catch_up(tile, floats(view), SHAPE.dim, rule, record(lines[row], SHAPE)->step, step);
        });
}

template <class Rule>
TIERBED_FN void catch_up_all(const u64* lines, u64 count, const Rule& rule, u32 step) {
    if constexpr (Rule::CATCHES_UP)
        for_each_item<WARP>(count, [&](Tile tile, u64 i) {
            const Record lifecycle = *record(lines[i], SHAPE);
            if (is_behind(lifecycle, step)) catch_up(tile, floats(lines[i]), SHAPE.dim, rule, lifecycle.step, step);
        });
}

// Lets lookups see rows at the beginning of the step: views [count] are the lines, or for rows that are behind caught-up
// copies in `memory`, which has room for `count` lines.
extern "C" __global__ void settle_rows(const u64* lines, const u32* count, const Numbers* numbers, u64 memory,
                                       u64* views) {
    settle(lines, *count, Rule(numbers->hyper), numbers->step, memory, views);
}

// Brings embedding and state of the first `count` lines to the beginning of the step.
extern "C" __global__ void catch_up_lines(const u64* lines, const u32* count, const Numbers* numbers) {
    catch_up_all(lines, *count, Rule(numbers->hyper), numbers->step);
}
