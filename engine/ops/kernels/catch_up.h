// What a row does for the steps that it missed, under a rule that catches up (engine/optim/kernel.py, CatchUp).
//
// A pure function of the line, its last step and the step that is due; steps without the row had a gradient of zeros.
// One tile works on one line and nobody else touches it.
#pragma once
#include "lines/kernels/line.h"

namespace tierbed {

// Whether steps lie between the row's last one and `step`, the one that is due. A row that was never written has none.
TIERBED_FN bool is_behind(const Record& lifecycle, u32 step) {
    return lifecycle.updates != 0 && lifecycle.step + 1 < step;
}

// columns [begin, begin + n) of the line; n <= VEC
template <class Rule>
TIERBED_FN void catch_up_block(float* line, u32 dim, u32 begin, u32 n, const Rule& rule, u32 last, u32 missed) {
    float w[VEC], states[Rule::ELEMENT_STATES][VEC];
    copy_floats(w, line + begin, n);
    for (u32 k = 0; k < Rule::ELEMENT_STATES; ++k) copy_floats(states[k], line + dim * (k + 1) + begin, n);
    const auto for_elements = [&](const auto& body) TIERBED_INLINE {
        for (u32 j = 0; j < n; ++j) {
            float state[Rule::ELEMENT_STATES];
            for (u32 k = 0; k < Rule::ELEMENT_STATES; ++k) state[k] = states[k][j];
            body(w[j], state);
            for (u32 k = 0; k < Rule::ELEMENT_STATES; ++k) states[k][j] = state[k];
        }
    };
    typename Rule::Missed values;
    values.last = last;
    rule.begin_missed(values);
    const u32 limit = static_cast<u32>(rule.limit()), taken = missed < limit ? missed : limit;
    for (u32 i = 0; i < taken; ++i) {
        rule.missed_step(values);
        for_elements([&](float& weight, float* state) TIERBED_INLINE { rule.missed_element(weight, state, values); });
    }
    if (taken < missed) {
        values.rest = missed - taken;
        rule.missed_rest(values);
        for_elements([&](float& weight, float* state) TIERBED_INLINE { rule.rest_element(weight, state, values); });
    }
    copy_floats(line + begin, w, n);
    for (u32 k = 0; k < Rule::ELEMENT_STATES; ++k) copy_floats(line + dim * (k + 1) + begin, states[k], n);
}

// Embedding and state of a row that is behind, as they are when `step` begins. The record stays.
template <class Rule>
TIERBED_FN void catch_up(Tile tile, float* line, u32 dim, const Rule& rule, u32 last, u32 step) {
    const u32 missed = step - 1 - last;
    for_blocks(tile, dim,
               [&](u32 begin, u32 n) TIERBED_INLINE { catch_up_block(line, dim, begin, n, rule, last, missed); });
}

}  // namespace tierbed
