// The ops of a step over a batch whose lines are set.
#pragma once
#include <mutex>
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

void gather(const Batch& batch, const Layout& layout, std::size_t lookup, const Pooling& pooling, void* out);
void weights_grad(const Batch& batch, const Layout& layout, std::size_t lookup, const Pooling& pooling,
                  const void* grads, float* out);

// Counts first writes of a batch's rows, by table.
class FirstWrites {
public:
    // by_table [layout.tables]: added to; null to count only the total.
    FirstWrites(const Batch& batch, const Layout& layout, u64* by_table)
        : batch_(batch), layout_(layout), by_table_(by_table) {}

    // Adds `count` first writes among the rows [begin, end). Thread-safe.
    void add(std::size_t begin, std::size_t end, std::size_t count);
    std::size_t total() const { return total_; }

private:
    const Batch& batch_;
    const Layout& layout_;
    u64* by_table_;
    std::size_t total_ = 0;
    std::mutex mutex_;
};

// Writes values [size, dim] to the embeddings; the last occurrence of a row wins. Returns the number of first writes,
// and adds them to by_table [layout.tables] if it is not null.
std::size_t assign(Batch& batch, const Layout& layout, const float* values, u32 step, u64* by_table);
std::size_t count_new(const Batch& batch, const Layout& layout);
// Adds the rows with updates > 0 to by_table [layout.tables].
void count_written(const Batch& batch, const Layout& layout, u64* by_table);
// Replaces the lines of some rows by float32 copies in memory of the batch. All other lines must be float32 already.
void use_wide_lines(Batch& batch, const Layout& layout, const std::vector<std::size_t>& rows);
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
