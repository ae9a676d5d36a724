// A step's operations on a batch whose line addresses are set.
#pragma once
#include <string>
#include <vector>

#include "batch.h"
#include "loops.h"

namespace tierbed {

struct Pooling {
    bool is_mean;
    const float* weights;  // [positions] or null
    FloatType output_type;
};

// Writes the sum or mean of each bag's weighted rows to out [bags, dim]; zeros for padding and empty bags.
void gather(const Batch& batch, const Layout& layout, std::size_t lookup, const Pooling& pooling, void* out);
// Writes each weight's gradient to out [positions]. It is the dot product of the position's row and the bag's gradient
// in grads [bags, dim]. For a mean, the product is divided by the bag's row count.
void compute_weights_grad(const Batch& batch, const Layout& layout, std::size_t lookup, const Pooling& pooling,
                          const void* grads, float* out);

// Writes values [positions, dim] to the embeddings; a row's last occurrence wins. Returns how many rows
// were written for the first time, and adds the counts to first_write_counts [layout.num_tables] unless it is null.
std::size_t assign(Batch& batch, const Layout& layout, const float* values, u32 step, u64* first_write_counts);
// Returns how many rows were never written. A row without a line counts as new.
std::size_t count_new_rows(const Batch& batch, const Layout& layout);
// Counts rows with updates > 0 per table, and adds the counts to row_counts [layout.num_tables].
void count_written(const Batch& batch, const Layout& layout, u64* row_counts);
// Replaces the lines of `rows` by float32 copies owned by the batch. All other lines must be float32 already.
void use_float32_lines(Batch& batch, const Layout& layout, const std::vector<std::size_t>& rows);
// Gives each row without a line a new line with initial values, owned by the batch.
void initialise_missing(Batch& batch, const Layout& layout);

// One lookup's output gradient: rows [output rows, dim] of type `pooling.output_type`.
struct LookupGradient {
    const void* rows;
    Pooling pooling;
};

// An optimizer rule with its numbers, in order: the kernel's hyper-parameters (engine/optim), the clipping limits, and
// for rules that catch up, optionally the past learning rates (`Rates` in ops/kernels/rule.h).
struct BoundRule {
    // Throws std::invalid_argument if the rule is unknown, or does not fit the hyper-parameters or the lines.
    BoundRule(const Layout& layout, const std::string& name, std::vector<double> hyperparams);

    const RuleLoops& loops;
    std::vector<double> hyperparams;
};

// Updates rows by the rule. `grads` has one gradient per lookup, all of one type. Counts first writes like `assign`.
std::size_t update(Batch& batch, const Layout& layout, const std::vector<LookupGradient>& grads, const BoundRule& rule,
                   u32 step, float scale, u64* first_write_counts);
// Writes each row's squared gradient norm to out [unique].
void compute_squared_norms(const Batch& batch, u32 dim, const std::vector<LookupGradient>& grads, float* out);
// Writes row u's gradient to row indices[u] of out [*, dim], or to row u if `indices` is null.
void sum_gradients(const Batch& batch, u32 dim, const std::vector<LookupGradient>& grads, const i64* indices,
                   float* out);
// Applies the steps before `step` that the lines missed. Does nothing for a rule that does not catch up.
void catch_up(const Layout& layout, const u64* lines, std::size_t n, const BoundRule& rule, u32 step);
// Prepares rows for lookups: if a row missed steps before `step`, `lookup_lines` gets a copy with these steps applied.
void preview_catch_up(Batch& batch, const Layout& layout, const BoundRule& rule, u32 step);

}  // namespace tierbed
