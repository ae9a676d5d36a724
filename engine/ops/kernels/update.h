// One pass over a touched row: reduce the gradients of its occurrences, apply the optimizer's rule, write line and
// record.
//
// One tile works on one row and nobody else touches its line. Gradients are summed in the order of `positions`, so the
// result depends on neither threads nor tiers. A row without occurrences is left alone.
#pragma once
#include "line.h"
#include "rules.h"

namespace tierbed {

// grads [size, dim]; positions [count] into it, ascending
struct RowGradients {
    const float* grads;
    const u32* positions;
    u32 count;
};

// columns [begin, begin + n) of the row; n <= VEC
template <class Rule>
TIERBED_FN void update_block(float* line, u32 dim, u32 begin, u32 n, const RowGradients& row, const Rule& rule,
                             bool first) {
    float g[VEC];
    const float* source = row.grads + static_cast<u64>(row.positions[0]) * dim + begin;
    for (u32 j = 0; j < n; ++j) g[j] = source[j];
    for (u32 i = 1; i < row.count; ++i) {
        source = row.grads + static_cast<u64>(row.positions[i]) * dim + begin;
        for (u32 j = 0; j < n; ++j) g[j] += source[j];
    }
    float w[VEC], states[Rule::STATES + 1][VEC];  // copies, so that the compiler need not fear overlap
    for (u32 j = 0; j < n; ++j) w[j] = line[begin + j];
    for (u32 k = 0; k < Rule::STATES; ++k)
        for (u32 j = 0; j < n; ++j) states[k][j] = line[dim * (k + 1) + begin + j];
    for (u32 j = 0; j < n; ++j) {
        float state[Rule::STATES + 1];
        for (u32 k = 0; k < Rule::STATES; ++k) state[k] = states[k][j];
        w[j] = rule.apply(w[j], g[j], state, first);
        for (u32 k = 0; k < Rule::STATES; ++k) states[k][j] = state[k];
    }
    for (u32 j = 0; j < n; ++j) line[begin + j] = w[j];
    for (u32 k = 0; k < Rule::STATES; ++k)
        for (u32 j = 0; j < n; ++j) line[dim * (k + 1) + begin + j] = states[k][j];
}

// Returns whether the row was written for the first time.
template <class Rule>
TIERBED_FN bool update_row(Tile tile, u64 line, const LineShape& shape, const RowGradients& row, const Rule& rule,
                           u32 step) {
    if (row.count == 0) return false;
    Record* lifecycle = record(line, shape);
    const bool first = lifecycle->updates == 0;
    u32 begin = tile.lane * VEC;
    for (; begin + VEC <= shape.dim; begin += tile.size * VEC)
        update_block(floats(line), shape.dim, begin, VEC, row, rule, first);
    if (begin < shape.dim) update_block(floats(line), shape.dim, begin, shape.dim - begin, row, rule, first);
    synchronise(tile);  // every lane has read `updates`
    if (tile.lane == 0) {
        if (lifecycle->updates != 0xFFFFFFFFu) lifecycle->updates += 1;
        lifecycle->step = step;
    }
    return first;
}

}  // namespace tierbed
