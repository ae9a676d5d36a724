// Sums the gradients of a batch's rows and applies an optimizer rule. Compiled for one rule (TIERBED_RULE) and one
// gradient type (TIERBED_GRADIENTS). One warp works on one row.
#include "row_gradient.h"
#include "items.h"
#include "ops/kernels/hash.h"
#include "ops/kernels/update.h"
#include "rules.h"

using namespace tierbed;

namespace {

using Rule = TIERBED_RULE;

constexpr LineShape FLOAT32_SHAPE = make_float32_shape(SHAPE);

constexpr u32 MAX_HYPERPARAMS = 504;

// The values that change from step to step.
struct StepParams {
    double hyperparams[MAX_HYPERPARAMS];  // hyper-parameters, limits, numbers for Rates (rule.h), zeros
    float scale;                          // multiplies gradients
    u32 step;                             // the embedding's step
};

}  // namespace

// Kernels read the values from memory, since a captured launch's arguments cannot change.
extern "C" __global__ void write_step_params(const __grid_constant__ StepParams values, StepParams* step_params) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *step_params = values;
}

// Returns this warp's line in `float32_lines` [warps of the grid], which is used if stored lines hold 16-bit floats.
TIERBED_FN u64 get_warp_line(u64 float32_lines) {
    return float32_lines + (static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x) / WARP * FLOAT32_SHAPE.line_bytes;
}

// Calls body(line) to change a float32 line. A 16-bit line is decoded first, and encode(line, decoded) writes it back.
template <class Body, class Encode>
TIERBED_FN void change_line(Tile tile, u64 line, u64 float32_lines, const Body& body, const Encode& encode) {
    if constexpr (SHAPE.has_16bit_floats()) {
        const u64 decoded = get_warp_line(float32_lines);
        synchronise(tile);  // wait until the previous row is encoded
        decode_line(tile, decoded, line, SHAPE);
        synchronise(tile);
        body(decoded);
        synchronise(tile);
        encode(line, decoded);
    } else {
        body(line);
    }
}

// Updates all rows. Counts first writes by table. memory [warps of the grid, dim]: scratch. hashes, seed: for rounding.
extern "C" __global__ void update_rows(const __grid_constant__ BatchGradients batch, const u64* lines,
                                       const u32* tables, const u32* count, const StepParams* step_params,
                                       const float* sums, float* memory, u64* first_write_counts, const u32* faults,
                                       u64 float32_lines, const u64* hashes, u64 seed,
                                       const __grid_constant__ SlotHash slot_hash) {
    if (*faults) return;
    const Rule rule(step_params->hyperparams);
    const float scale = step_params->scale;
    const u32 step = step_params->step;
    CoalescingCounter counter(first_write_counts);
    for_each_row(batch, *count, lines, [&](Tile tile, u64 row, const RowInput& input) {
        const RowGradient gradient(batch, input, sums);
        if (gradient.num_occurrences() == 0) return;
        const auto update = [&](u64 line) {
            const auto sum = [&](float* g, u32 begin, u32) { gradient(g, begin, scale); };
            const bool is_first_write = apply_rule(tile, line, FLOAT32_SHAPE, sum, rule, step, warp_memory(memory));
            if (rule.row_norm > 0.0f) limit_row_norm(tile, line, SHAPE.dim, rule.row_norm);
            if (is_first_write && tile.lane == 0) counter.add(tables[row]);
        };
        change_line(tile, input.line, float32_lines, update, [&](u64 line, u64 decoded) {
            encode_line(tile, line, decoded, SHAPE, Noise(seed, slot_hash.row_hash(tables[row], hashes[row]), step));
        });
    });
    counter.flush();
}

// A template, because rules that cannot catch up lack members that are used here. `catch_up_all` skips such rules.
template <class Rule>
TIERBED_FN void catch_up_line(Tile tile, u64 line, const Rule& rule, RowCounters before, u32 step, u64 float32_lines) {
    change_line(
        tile, line, float32_lines,
        [&](u64 float_line) { catch_up(tile, floats(float_line), SHAPE.dim, rule, before, step); },
        [&](u64 out, u64 decoded) { encode_line(tile, out, decoded, SHAPE, NoNoise{}); });
}

template <class Rule>
TIERBED_FN void catch_up_all(const u64* lines, u64 n, const Rule& rule, u32 step, u64 memory, u64* copies,
                             u64 float32_lines) {
    if constexpr (Rule::CATCHES_UP)
        for_each_item<WARP>(n, [&](Tile tile, u64 row) {
            const RowCounters counters = *row_counters(lines[row], SHAPE);
            const bool has_missed_steps = is_behind(counters, step, Rule::MISSES_UNWRITTEN);
            const u64 line = has_missed_steps && copies ? memory + row * SHAPE.line_bytes : lines[row];
            if (copies && tile.lane == 0) copies[row] = line;
            if (!has_missed_steps) return;
            if (copies) copy_line(tile, line, lines[row], SHAPE);
            synchronise(tile);
            catch_up_line(tile, line, rule, counters, step, float32_lines);
        });
}

// Catches up the first `count` lines to the beginning of the step. With copies [count], the lines do not change. Rows
// that missed steps are copied to `memory`, and the copies are caught up. `memory` has room for `count` lines.
// copies[i] becomes the address of row i's copy, or of row i's line if the row missed no step.
extern "C" __global__ void catch_up_lines(const u64* lines, const u32* count, const StepParams* step_params, u64 memory,
                                          u64* copies, u64 float32_lines) {
    catch_up_all(lines, *count, Rule(step_params->hyperparams), step_params->step, memory, copies, float32_lines);
}
