// One pass over a touched row: sum the gradients of its occurrences, scale and clip the sum, apply the optimizer's
// rule, write line and record. A rule that catches up first takes the steps that the row missed.
//
// One tile works on one row and nobody else touches its line. Sums and reductions have a fixed order (gradients.h), so
// the result depends on neither threads nor tiers.
//
// Rules are the structs that engine/optim/kernel.py makes; element states follow the embedding in the line, then one
// float a row for each row state.
#pragma once
#include "gradients.h"
#include "line.h"
#include "rule.h"

namespace tierbed {

// To catch up is to apply the steps that a row missed (engine/optim/kernel.py, CatchUp): a pure function of the line, its
// last step and the step that is due. The gradient of a missed step is zero. One tile works on one line.

// Whether steps lie between the row's last one and `step`, the one that is due. The last step of a row that was never
// written is 0; it has missed steps by some rules alone (`unwritten`: MISSES_UNWRITTEN of the rule).
TIERBED_FN bool is_behind(const Record& lifecycle, u32 step, bool unwritten) {
    return (unwritten || lifecycle.updates != 0) && lifecycle.step + 1 < step;
}

// columns [begin, begin + n) of the line; n <= VEC
template <class Rule>
TIERBED_FN void catch_up_block(float* line, u32 dim, u32 begin, u32 n, const Rule& rule, const Record& was,
                               u32 missed) {
    float w[VEC], states[Rule::ELEMENT_STATES][VEC];
    load_floats(w, line + begin, n);
    for (u32 k = 0; k < Rule::ELEMENT_STATES; ++k) load_floats(states[k], line + dim * (k + 1) + begin, n);
    const auto for_elements = [&](const auto& body) TIERBED_INLINE {
        for (u32 j = 0; j < n; ++j) {
            float state[Rule::ELEMENT_STATES];
            for (u32 k = 0; k < Rule::ELEMENT_STATES; ++k) state[k] = states[k][j];
            body(w[j], state);
            for (u32 k = 0; k < Rule::ELEMENT_STATES; ++k) states[k][j] = state[k];
        }
    };
    typename Rule::Missed values;
    values.last = was.step;
    rule.begin_missed(values);
    Rates rates = rule.rates();
    const bool rests = Rule::RESTS_UNWRITTEN && was.updates == 0;
    const u32 limit = static_cast<u32>(rule.limit()), singly = missed < limit ? missed : limit;
    u32 taken = 0;
    for (; taken < singly && !rests; ++taken) {
        values.rate = rates.at(was.step + 1 + taken);
        rule.missed_step(values);
        for_elements([&](float& weight, float* state) TIERBED_INLINE { rule.missed_element(weight, state, values); });
    }
    while (taken < missed) {
        const u32 from = was.step + 1 + taken, left = missed - taken;
        const double first = rates.at(from);
        const u32 on_line = rates.last() - from + 1;
        values.rest = taken < singly ? 1 : on_line < left ? on_line : left;
        const double last = rates.at(from + values.rest - 1);
        values.rate = 0.5 * (first + last);
        values.is_constant = first == last;
        rule.missed_rest(values);
        for_elements([&](float& weight, float* state) TIERBED_INLINE { rule.rest_element(weight, state, values); });
        taken += values.rest;
    }
    store_floats(line + begin, w, n);
    for (u32 k = 0; k < Rule::ELEMENT_STATES; ++k) store_floats(line + dim * (k + 1) + begin, states[k], n);
}

// Embedding and state of a row that is behind, as they are when `step` begins. The record stays.
template <class Rule>
TIERBED_FN void catch_up(Tile tile, float* line, u32 dim, const Rule& rule, Record was, u32 step) {
    const u32 missed = step - 1 - was.step;
    for_blocks(tile, dim,
               [&](u32 begin, u32 n) TIERBED_INLINE { catch_up_block(line, dim, begin, n, rule, was, missed); });
}

// Columns [begin, begin + n) of a line, which `change` changes by body(w, states, j); n <= VEC.
#ifdef TIERBED_GPU
template <class Rule>
class Elements {
public:
    // Reads them, so that they are on the way while gradients are summed.
    TIERBED_FN Elements(float* line, u32 dim, u32 begin) : line_(line + begin), dim_(dim) {
        for (u32 k = 0; k <= Rule::ELEMENT_STATES; ++k) load_floats(numbers_[k], line_ + dim_ * k, VEC);
    }
    template <class Body>
    TIERBED_FN void change(u32, const Body& body) {
        for (u32 j = 0; j < VEC; ++j) {
            float state[Rule::ELEMENT_STATES + 1];
            for (u32 k = 0; k < Rule::ELEMENT_STATES; ++k) state[k] = numbers_[k + 1][j];
            body(numbers_[0][j], state, j);
            for (u32 k = 0; k < Rule::ELEMENT_STATES; ++k) numbers_[k + 1][j] = state[k];
        }
        for (u32 k = 0; k <= Rule::ELEMENT_STATES; ++k) store_floats(line_ + dim_ * k, numbers_[k], VEC);
    }

private:
    float* line_;
    u32 dim_;
    float numbers_[Rule::ELEMENT_STATES + 1][VEC];
};
#else
template <class Rule>
class Elements {
public:
    TIERBED_FN Elements(float* line, u32 dim, u32 begin) : line_(line + begin), dim_(dim) {}
    template <class Body>
    TIERBED_FN void change(u32 n, const Body& body) {
        float* const w = line_;
        const u64 next = dim_;  // from an element to its states
        TIERBED_NO_OVERLAP
        for (u32 j = 0; j < n; ++j) {
            float state[Rule::ELEMENT_STATES + 1], element = w[j];
            for (u32 k = 0; k < Rule::ELEMENT_STATES; ++k) state[k] = w[next * (k + 1) + j];
            body(element, state, j);
            w[j] = element;
            for (u32 k = 0; k < Rule::ELEMENT_STATES; ++k) w[next * (k + 1) + j] = state[k];
        }
    }

private:
    float* line_;
    u32 dim_;
};
#endif

// The passes of a rule with norms. whole [dim]: the row's gradient, and what `element` makes of it.
template <class Rule>
TIERBED_FN void update_by_norms(Tile tile, float* line, u32 dim, float* whole, const Rule& rule,
                                typename Rule::Row& row) {
    for_blocks(tile, dim, [&](u32 begin, u32 n) TIERBED_INLINE {
        float* const g = whole + begin;
        Elements<Rule>(line, dim, begin).change(n, [&](float& w, float* state, u32 j) TIERBED_INLINE {
            float step = g[j];
            rule.element(w, step, state, row);
            g[j] = step;
        });
    });
    synchronise(tile);
    float sums[Rule::NORMS];
    for (u32 i = 0; i < Rule::NORMS; ++i)
        sums[i] = sum_columns(tile, dim, [&](i32 c) TIERBED_INLINE { return rule.norm(i, line[c], whole[c]); });
    rule.after(row, sums);
    for_blocks(tile, dim, [&](u32 begin, u32 n) TIERBED_INLINE {
        const float* const g = whole + begin;
        Elements<Rule>(line, dim, begin).change(n, [&](float& w, float* state, u32 j) TIERBED_INLINE {
            rule.finish(w, g[j], state, row);
        });
    });
}

// Whether `update_row` needs the whole gradient of a row before it changes its first element.
template <class Rule>
TIERBED_FN bool reduces_rows(const Rule& rule) {
    return Rule::REDUCES || Rule::NORMS > 0 || rule.clip_norm > 0.0f;
}

// One step of a row whose gradient is given by sum(g, begin, n), which sets g [n] to that of columns [begin, begin +
// n). whole [dim]: memory of the tile, used where `reduces_rows(rule)`. Returns whether the row was written for the
// first time.
template <class Rule, class Sum>
TIERBED_FN bool apply_rule(Tile tile, u64 address, const LineShape& shape, const Sum& sum, const Rule& rule, u32 step,
                           float* whole) {
    const u32 dim = shape.dim;
    float* line = floats(address);
    Record* lifecycle = record(address, shape);
    const auto sum_block = [&](float* g, u32 begin, u32 n) TIERBED_INLINE {
        sum(g, begin, n);
        if (rule.clip_value > 0.0f)
            for (u32 j = 0; j < n; ++j) g[j] = rule.clipped(g[j]);
    };
    if constexpr (Rule::CATCHES_UP)
        if (is_behind(*lifecycle, step, Rule::MISSES_UNWRITTEN)) catch_up(tile, line, dim, rule, *lifecycle, step);
    typename Rule::Row row;
    row.first = lifecycle->updates == 0;
    row.step = step;
    row.dim = static_cast<float>(dim);
    row.total = 0.0f;
    if (reduces_rows(rule)) {
        for_blocks(tile, dim, [&](u32 begin, u32 n) TIERBED_INLINE { sum_block(whole + begin, begin, n); });
        synchronise(tile);
        if (rule.clip_norm > 0.0f) {
            const float squares = sum_columns(tile, dim, [&](i32 c) TIERBED_INLINE { return square(whole[c]); });
            const float scale = norm_scale(squares, rule.clip_norm);
            for_blocks(tile, dim, [&](u32 begin, u32 n) TIERBED_INLINE {
                float* block = whole + begin;
                for (u32 j = 0; j < n; ++j) block[j] *= scale;
            });
            synchronise(tile);
        }
        if constexpr (Rule::REDUCES)
            row.total = sum_columns(tile, dim, [&](i32 c) TIERBED_INLINE { return rule.term(line[c], whole[c]); });
    }
    float row_states[Rule::ROW_STATES + 1];
    for (u32 k = 0; k < Rule::ROW_STATES; ++k) row_states[k] = line[dim * (1 + Rule::ELEMENT_STATES) + k];
    rule.row(row, row_states);
    if constexpr (Rule::NORMS > 0)
        update_by_norms(tile, line, dim, whole, rule, row);
    else
        for_blocks(tile, dim, [&](u32 begin, u32 n) TIERBED_INLINE {
            Elements<Rule> elements(line, dim, begin);
            float block[VEC];
            const float* g = block;
            if (reduces_rows(rule))
                g = loaded(block, whole + begin, n);
            else
                sum_block(block, begin, n);
            elements.change(n, [&](float& w, float* state, u32 j) TIERBED_INLINE {
                rule.element(w, g[j], state, row);
            });
        });
    synchronise(tile);  // every lane has read the record and the row states
    if (tile.lane == 0) {
        for (u32 k = 0; k < Rule::ROW_STATES; ++k) line[dim * (1 + Rule::ELEMENT_STATES) + k] = row_states[k];
        if (lifecycle->updates != 0xFFFFFFFFu) lifecycle->updates += 1;
        lifecycle->step = step;
    }
    return row.first;
}

// Scales a row that a step has written to the largest norm that it may have.
TIERBED_FN void limit_row(Tile tile, u64 address, u32 dim, float most) {
    float* line = floats(address);
    const float scale =
        norm_scale(sum_columns(tile, dim, [&](i32 c) TIERBED_INLINE { return square(line[c]); }), most);
    for_blocks(tile, dim, [&](u32 begin, u32 n) TIERBED_INLINE {
        for (u32 j = 0; j < n; ++j) line[begin + j] *= scale;
    });
}

// The sum of the squares of a row's gradient, which sum(g, begin, n) gives as for `apply_rule`. whole [dim]: memory of
// the tile.
template <class Sum>
TIERBED_FN float square_row(Tile tile, u32 dim, const Sum& sum, float* whole) {
    for_blocks(tile, dim, [&](u32 begin, u32 n) TIERBED_INLINE { sum(whole + begin, begin, n); });
    synchronise(tile);
    return sum_columns(tile, dim, [&](i32 c) TIERBED_INLINE { return square(whole[c]); });
}

}  // namespace tierbed
