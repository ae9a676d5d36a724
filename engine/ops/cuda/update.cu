// Gradients of a batch's rows, reduced and applied. Compiled for one rule (TIERBED_RULE) and one type of gradients
// (TIERBED_GRADIENTS). One warp works on one row.
#include "sources.h"
#include "tally.h"
#include "ops/kernels/update.h"
#include "rules.h"

using namespace tierbed;

namespace {

using Rule = TIERBED_RULE;

constexpr u32 MOST_HYPERS = 24;

// What changes from step to step: `scale` multiplies gradients, `step` is the embedding's.
struct Numbers {
    double hyper[MOST_HYPERS];
    float scale;
    u32 step;
};

}  // namespace

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
