// Optimizer rules over the lines of a batch. A rule is called by its name, with its hyper-parameters in the order of
// its kernel (engine/optim) and the clips after them.
#pragma once
#include <string>
#include <vector>

#include "step.h"

namespace tierbed {

// The gradient of one lookup's output, [outputs, dim] of `pooling.type`.
struct Upstream {
    const void* rows;
    Pooling pooling;
};

// Throws std::invalid_argument for an unknown rule, hyper-parameters that are not its own, or lines without its state.
struct BoundRule {
    BoundRule(const Layout& layout, const std::string& name, std::vector<double> hyper);

    const RuleLoops& loops;
    std::vector<double> hyper;
};

// `grads`: one a lookup of the batch, all of one type; `scale`: of their sums. Returns as `assign`, with `by_table`.
std::size_t update(Batch& batch, const Layout& layout, const std::vector<Upstream>& grads, const BoundRule& rule,
                   u32 step, float scale, u64* by_table);
// out [unique]: the sum of the squares of the gradient of each row of the batch.
void square_gradients(const Batch& batch, u32 dim, const std::vector<Upstream>& grads, float* out);
// The gradient of row u of the batch to row places[u] of out [*, dim]; null places for row u.
void sum_gradients(const Batch& batch, u32 dim, const std::vector<Upstream>& grads, const i64* places, float* out);
// Brings embedding and state of `lines` to the beginning of `step`, where the rule catches up.
void catch_up(const Layout& layout, const u64* lines, std::size_t n, const BoundRule& rule, u32 step);
// Lets lookups of the batch see its rows at the beginning of `step`; those that are behind are caught up in copies.
void settle(Batch& batch, const Layout& layout, const BoundRule& rule, u32 step);

}  // namespace tierbed
