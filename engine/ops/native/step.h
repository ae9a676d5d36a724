// The loops of a step over a batch whose lines are set.
#pragma once
#include <mutex>
#include <string>
#include <vector>

#include "batch.h"
#include "loops.h"

namespace tierbed {

// How the rows of a lookup become its output, or the gradient of its output that of the rows.
struct Pooling {
    bool mean;
    const float* weights;  // [positions] or null
    FloatType type;        // of the output
};

void gather(const Batch& batch, const Layout& layout, std::size_t lookup, const Pooling& pooling, void* out);
void weights_grad(const Batch& batch, const Layout& layout, std::size_t lookup, const Pooling& pooling,
                  const void* grads, float* out);

// Counts the rows of a batch that were just written for the first time, by table.
class FirstWrites {
public:
    // Adds to by_table [layout.tables]; null for no counts.
    FirstWrites(const Batch& batch, const Layout& layout, u64* by_table)
        : batch_(batch), layout_(layout), by_table_(by_table) {}

    // `count` of the rows [begin, end) were. Several threads may tell of theirs.
    void add(std::size_t begin, std::size_t end, std::size_t count);
    std::size_t total() const { return total_; }

private:
    const Batch& batch_;
    const Layout& layout_;
    u64* by_table_;
    std::size_t total_ = 0;
    std::mutex mutex_;
};

// Returns how many rows were written for the first time, and adds them to `by_table`, as `FirstWrites` does.
std::size_t assign(Batch& batch, const Layout& layout, const float* values, u32 step, u64* by_table);
std::size_t count_new(const Batch& batch, const Layout& layout);
// Adds to by_table [layout.tables] the rows that were ever written.
void count_written(const Batch& batch, const Layout& layout, u64* by_table);
// Lines of float32 numbers for some rows of a batch, in memory of the batch, where all others of it are such already.
void use_wide_lines(Batch& batch, const Layout& layout, const std::vector<std::size_t>& rows);
void initialise_missing(Batch& batch, const Layout& layout);
void initialise_lines(const Layout& layout, const u32* tables, const u64* keys, const u64* lines, std::size_t n);

// Optimizer rules over the lines of a batch. A rule is called by its name, with its hyper-parameters in the order of
// its kernel (engine/optim) and the clips after them.
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
