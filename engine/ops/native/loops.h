// The loops over floats, compiled once per instruction set. One build is chosen at run time. All builds run the same
// IEEE operations in the same order, so results are bit-identical.
#pragma once
#include <cstddef>

#include "ops/kernels/columns.h"
#include "ops/kernels/gradients.h"
#include "ops/kernels/line.h"
#include "ops/kernels/pool.h"

namespace tierbed {

constexpr std::size_t ROWS_PER_TASK = 1024;  // a row or a bag

// Gathers a lookup's bags [begin, end).
struct GatherJob {
    const u64* lines;    // [unique]
    const i32* inverse;  // [n], each position's row
    std::size_t n;
    Bags bags;
    const float* weights;  // [n] or null
    u32 dim;
    FloatType row_type;  // embedding type in `lines`
    bool is_pooled, is_mean;
    void* out;
};

// Writes the weights' gradients for bags [begin, end) to out [positions].
struct WeightsGradJob {
    GatherJob lookup;  // `out` and `weights` are unused
    const void* grads;
    float* out;
};

// Updates a batch's rows [begin, end) by an optimizer rule.
struct UpdateJob {
    const u64* lines;        // [unique]
    const u32* offsets;      // [unique + 1], where each row's occurrences begin
    const u32* output_rows;  // [occurrences]
    const u32* output_rows_end;
    const float* scales;  // [occurrences] or null
    OutputGradients gradients;
    FloatType type;  // gradient type
    float scale;     // multiplies each row's sum
    LineShape shape;
    const double* hyperparams;
    u32 step;
    u32* last_steps;  // [unique], receives the step of each row's previous write
};

struct CatchUpJob {
    const u64* lines;
    LineShape shape;
    const double* hyperparams;
    u32 step;
};

// Converts lines [begin, end) to or from contiguous float32 lines that begin at `float32_lines`.
struct CodecJob {
    const u64* lines;
    LineShape shape;
    u64 float32_lines;
    // for stochastic rounding: each line's row, the seed and the step; null to round to nearest
    const u32* tables;
    const u64* hashes;
    u64 seed;
    u32 step;
};

// Copies columns from sources to targets in rows [begin, end). If `should_add`, adds to the targets (for gradients).
struct ColumnsJob {
    const Matrix *sources, *targets;
    std::size_t num_targets;
    const Move* moves;
    std::size_t num_moves;
    bool should_add;
};

struct RuleLoops {
    const char* name;
    u32 num_element_states, num_row_states;
    u32 num_hyperparams;    // hyper-parameters, including limits
    bool misses_unwritten;  // true if a row can miss steps before its first write
    // Returns how many rows were written for the first time. memory [3 * dim]: scratch.
    std::size_t (*update)(const UpdateJob&, std::size_t begin, std::size_t end, float* memory);
    void (*catch_up)(const CatchUpJob&, std::size_t begin, std::size_t end);  // null if the rule does not catch up
};

struct Loops {
    const char* name;
    // These two arrays are indexed by output type.
    void (*gather[FLOAT_TYPES])(const GatherJob&, std::size_t begin, std::size_t end);
    void (*compute_weights_grad[FLOAT_TYPES])(const WeightsGradJob&, std::size_t begin, std::size_t end);
    void (*decode)(const CodecJob&, std::size_t begin, std::size_t end);
    void (*encode)(const CodecJob&, std::size_t begin, std::size_t end);
    // Writes each row's squared gradient norm to out [unique]. Reads only the job's gradients.
    void (*compute_squared_norms[FLOAT_TYPES])(const UpdateJob&, std::size_t begin, std::size_t end, float* memory,
                                               float* out);
    // Writes row u's gradient to out[indices[u]], or to out[u] if `indices` is null. memory [dim]: scratch.
    void (*sum_gradients[FLOAT_TYPES])(const UpdateJob&, std::size_t begin, std::size_t end, float* memory,
                                       const i64* indices, float* out);
    // Indexed by type; the last function is for float64.
    void (*move_columns[FLOAT_TYPES + 1])(const ColumnsJob&, std::size_t begin, std::size_t end);
    const RuleLoops* rules;
    u32 num_rules;
};

}  // namespace tierbed
