// The loops over floats, which are compiled once for each instruction set and chosen at run time. All builds do the
// same IEEE operations in the same order, so their results are bit-identical.
#pragma once
#include <cstddef>

#include "ops/kernels/columns.h"
#include "ops/kernels/gradients.h"
#include "ops/kernels/line.h"
#include "ops/kernels/pool.h"

namespace tierbed {

constexpr std::size_t ROWS = 1024;  // rows or bags of a task

// Bags [begin, end) of one lookup.
struct GatherJob {
    const u64* lines;      // [unique]
    const i32* inverse;    // [n], the positions of the lookup
    std::size_t n;
    Bags bags;
    const float* weights;  // [n] or null
    u32 dim;
    FloatType row_type;  // of the embeddings in `lines`
    bool pooled, mean;
    void* out;
};

// The gradient of weights for bags [begin, end): out [positions].
struct WeightsGradJob {
    GatherJob lookup;  // `out` and `weights` unused
    const void* grads;
    float* out;
};

// Rows [begin, end) of a batch under an optimizer's rule.
struct UpdateJob {
    const u64* lines;     // [unique]
    const u32* offsets;   // [unique + 1], the beginning of each row's occurrences
    const u32* sources;   // [occurrences]
    const u32* sources_end;
    const float* scales;  // [occurrences] or null
    Gradients gradients;
    FloatType type;  // of the gradients
    float scale;  // of each row's sum
    LineShape shape;
    const double* hyper;
    u32 step;
};

struct CatchUpJob {
    const u64* lines;
    LineShape shape;
    const double* hyper;
    u32 step;
};

// Lines [begin, end) to or from float32 lines, which are contiguous and begin at `wide`.
struct CodecJob {
    const u64* lines;
    LineShape shape;
    u64 wide;
    const u32* tables;  // [rows] of `lines`, and
    const u64* hashes;  // for the noise with seed and step; null to round to nearest
    u64 seed;
    u32 step;
};

// Rows [begin, end) of targets, whose columns come from the sources; with `adds` they are gradients, and summed.
struct ColumnsJob {
    const Matrix *sources, *targets;
    std::size_t target_count;
    const Move* moves;
    std::size_t move_count;
    bool adds;
};

struct RuleLoops {
    const char* name;
    u32 element_states, row_states;
    u32 hypers;  // limits included
    bool misses_unwritten;  // whether rows that were never written miss steps
    // Returns the number of rows written for the first time. memory [3 * dim]: scratch.
    std::size_t (*update)(const UpdateJob&, std::size_t begin, std::size_t end, float* memory);
    void (*catch_up)(const CatchUpJob&, std::size_t begin, std::size_t end);  // null if the rule does not catch up
};

struct Loops {
    const char* name;
    // Indexed by the type of the output.
    void (*gather[FLOAT_TYPES])(const GatherJob&, std::size_t begin, std::size_t end);
    void (*weights_grad[FLOAT_TYPES])(const WeightsGradJob&, std::size_t begin, std::size_t end);
    void (*decode)(const CodecJob&, std::size_t begin, std::size_t end);
    void (*encode)(const CodecJob&, std::size_t begin, std::size_t end);
    // out [unique]: the sum of the squares of each row's gradient. Of the job, only the gradients are read.
    void (*square[FLOAT_TYPES])(const UpdateJob&, std::size_t begin, std::size_t end, float* memory, float* out);
    // out [*, dim]: the gradient of row u goes to row places[u], or to row u if `places` is null. memory [dim]:
    // scratch.
    void (*sum[FLOAT_TYPES])(const UpdateJob&, std::size_t begin, std::size_t end, float* memory, const i64* places,
                             float* out);
    // The last is for float64.
    void (*columns[FLOAT_TYPES + 1])(const ColumnsJob&, std::size_t begin, std::size_t end);
    const RuleLoops* rules;
    u32 rule_count;
};

}  // namespace tierbed
