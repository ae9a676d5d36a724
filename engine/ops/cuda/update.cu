// Gradients of a batch's rows, reduced and applied. Compiled for one rule (TIERBED_RULE) and one type of gradients
// (TIERBED_GRADIENTS). One warp works on one row.
#include "sources.h"
#include "items.h"
#include "ops/kernels/hash.h"
#include "ops/kernels/update.h"
#include "rules.h"

using namespace tierbed;

namespace {

using Rule = TIERBED_RULE;

constexpr LineShape WIDE = widened(SHAPE);

constexpr u32 MAX_HYPERS = 504;

// What changes from step to step: `scale` multiplies gradients, `step` is the embedding's. hyper: those of the rule, the
// limits, and what Rates reads, as zeros where there are no past rates.
struct Numbers {
    double hyper[MAX_HYPERS];
    float scale;
    u32 step;
};

}  // namespace

// Kernels read the numbers from memory: a launch that is recorded keeps its arguments for good.
extern "C" __global__ void write_numbers(const __grid_constant__ Numbers given, Numbers* numbers) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *numbers = given;
}

// Lines of float32 numbers that a warp works on: [warps of the grid] of them, where lines are narrow.
TIERBED_FN u64 line_of_warp(u64 wide) {
    return wide + (static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x) / WARP * WIDE.line_bytes;
}

// body(line) with a line of float32 numbers, which becomes the row's by encode(line, that line).
template <class Body, class Encode>
TIERBED_FN void change_line(Tile tile, u64 line, u64 wide, const Body& body, const Encode& encode) {
    if constexpr (SHAPE.is_narrow()) {
        const u64 decoded = line_of_warp(wide);
        synchronise(tile);  // the row before has been encoded
        decode_line(tile, decoded, line, SHAPE);
        synchronise(tile);
        body(decoded);
        synchronise(tile);
        encode(line, decoded);
    } else {
        body(line);
    }
}

// `whole`: [warps of the grid, dim]. written [tables] counts first writes. hashes, seed: of the rows, for the noise.
extern "C" __global__ void update_rows(const __grid_constant__ Sources from, const u64* lines, const u32* tables,
                                       const u32* count, const Numbers* numbers, const float* sums, float* whole,
                                       u64* written, const u32* faults, u64 wide, const u64* hashes, u64 seed,
                                       const __grid_constant__ SlotHash slot_hash) {
    if (*faults) return;
    const Rule rule(numbers->hyper);
    const float scale = numbers->scale;
    const u32 step = numbers->step;
    Tally counted(written);
    for_each_row(from, *count, lines, [&](Tile tile, u64 row, const RowStart& start) {
        const RowGradient gradient(from, start, sums);
        if (gradient.occurrences() == 0) return;
        const auto update = [&](u64 line) {
            const auto sum = [&](float* g, u32 begin, u32) { gradient(g, begin, scale); };
            const bool first = apply_rule(tile, line, WIDE, sum, rule, step, memory_of_warp(whole));
            if (rule.row_norm > 0.0f) limit_row(tile, line, SHAPE.dim, rule.row_norm);
            if (first && tile.lane == 0) counted.add(tables[row]);
        };
        change_line(tile, start.line, wide, update, [&](u64 line, u64 decoded) {
            encode_line(tile, line, decoded, SHAPE, Noise(seed, slot_hash.row_hash(tables[row], hashes[row]), step));
        });
    });
    counted.end();
}

// Those below do nothing for a rule that does not catch up; templates, since such a rule has not what it takes.
template <class Rule>
TIERBED_FN void catch_up_line(Tile tile, u64 line, const Rule& rule, Record was, u32 step, u64 wide) {
    change_line(
        tile, line, wide, [&](u64 at) { catch_up(tile, floats(at), SHAPE.dim, rule, was, step); },
        [&](u64 at, u64 decoded) { encode_line(tile, at, decoded, SHAPE, NoNoise{}); });
}

template <class Rule>
TIERBED_FN void catch_up_all(const u64* lines, u64 count, const Rule& rule, u32 step, u64 memory, u64* views, u64 wide) {
    if constexpr (Rule::CATCHES_UP)
        for_each_item<WARP>(count, [&](Tile tile, u64 row) {
            const Record lifecycle = *record(lines[row], SHAPE);
            const bool behind = is_behind(lifecycle, step, Rule::MISSES_UNWRITTEN);
            const u64 line = behind && views ? memory + row * SHAPE.line_bytes : lines[row];
            if (views && tile.lane == 0) views[row] = line;
            if (!behind) return;
            if (views) copy_line(tile, line, lines[row], SHAPE);
            synchronise(tile);
            catch_up_line(tile, line, rule, lifecycle, step, wide);
        });
}

// Brings embedding and state of the first `count` lines to the beginning of the step. With views [count], lines stay as
// they are: views become the lines, or for rows that are behind caught-up copies in `memory`, which has room for `count`.
extern "C" __global__ void catch_up_lines(const u64* lines, const u32* count, const Numbers* numbers, u64 memory,
                                          u64* views, u64 wide) {
    catch_up_all(lines, *count, Rule(numbers->hyper), numbers->step, memory, views, wide);
}
