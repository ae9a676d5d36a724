// The ops of a step over a batch whose lines are set.
#pragma once
#include <string>
#include <vector>

#include "batch.h"
#include "loops.h"

namespace tierbed {

// How the rows of a lookup are pooled.
struct Pooling {
    bool mean;
    const float* weights;  // [positions] or null
    FloatType type;        // of the output
};

// out [bags, dim]: the sum or mean of each bag's rows, each times its weight; zeros for padding and for empty bags.
void gather(const Batch& batch, const Layout& layout, std::size_t lookup, const Pooling& pooling, void* out);
// out [positions]: the gradient of each weight, <grads [bags, dim] of its bag, row>, over the bag's rows for a mean.
void weights_grad(const Batch& batch, const Layout& layout, std::size_t lookup, const Pooling& pooling,
                  const void* grads, float* out);

// Writes values [size, dim] to the embeddings; the last occurrence of a row wins. Returns the number of first writes,
// and adds them to by_table [layout.tables] if it is not null.
std::size_t assign(Batch& batch, const Layout& layout, const float* values, u32 step, u64* by_table);
// A row without a line counts as new.
std::size_t count_new(const Batch& batch, const Layout& layout);
// Adds the rows with updates > 0 to by_table [layout.tables].
void count_written(const Batch& batch, const Layout& layout, u64* by_table);
// Replaces the lines of some rows by float32 copies in memory of the batch. All other lines must be float32 already.
void use_wide_lines(Batch& batch, const Layout& layout, const std::vector<std::size_t>& rows);
// Gives rows without a line one in memory of the batch, with initial values.
void initialise_missing(Batch& batch, const Layout& layout);

// The gradient of one lookup's output: rows [outputs, dim] of `pooling.type`.
struct Upstream {
    const void* rows;
    Pooling pooling;
};

// An optimizer rule with its hyper-parameters: those of its kernel (engine/optim) in order, then the limits for
// clipping, then, if it catches up, what Rates of ops/kernels/rule.h reads, or nothing. Throws std::invalid_argument for an unknown rule, a wrong number of hyper-parameters, or lines that have no
// room for its state.
struct BoundRule {
    BoundRule(const Layout& layout, const std::string& name, std::vector<double> hyper);

    const RuleLoops& loops;
    std::vector<double> hyper;
};

// Applies the rule to each row. grads: one for each lookup, all of one type. scale: factor of each row's gradient.
// Returns and counts first writes as `assign` does.
std::size_t update(Batch& batch, const Layout& layout, const std::vector<Upstream>& grads, const BoundRule& rule,
                   u32 step, float scale, u64* by_table);
// out [unique]: the sum of the squares of the gradient of each row of the batch.
void square_gradients(const Batch& batch, u32 dim, const std::vector<Upstream>& grads, float* out);
// out [*, dim]: the gradient of row u goes to row places[u], or to row u if `places` is null.
void sum_gradients(const Batch& batch, u32 dim, const std::vector<Upstream>& grads, const i64* places, float* out);
// Catches up the lines to the beginning of `step`, if the rule catches up.
void catch_up(const Layout& layout, const u64* lines, std::size_t n, const BoundRule& rule, u32 step);
// Lets lookups read the rows as they are at the beginning of `step`: rows that missed steps are caught up in copies, to
// which `views` points.
void preview_catch_up(Batch& batch, const Layout& layout, const BoundRule& rule, u32 step);

}  // namespace tierbed
