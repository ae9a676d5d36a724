// The loops over floats, which are compiled once for each instruction set and picked at run time. All builds do the
// same IEEE operations in the same order, so their bits agree.
#pragma once
#include <cstddef>

#include "ops/kernels/gradients.h"
#include "ops/kernels/line.h"
#include "ops/kernels/pool.h"

namespace tierbed {

constexpr std::size_t ROWS = 1024;  // rows or bags a task

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
    const u32* offsets;   // [unique + 1], where each row's occurrences start
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

// Lines [begin, end) to lines of float32 numbers, or from them: `wide` is the first of a row of such.
struct CodecJob {
    const u64* lines;
    LineShape shape;
    u64 wide;
    const u64* hashes;  // [rows], of the rows in `lines`, with seed and step for the noise; null to round to nearest
    u64 seed;
    u32 step;
};

struct RuleLoops {
    const char* name;
    u32 element_states, row_states;
    u32 hypers;  // limits included
    // Returns how many rows were written for the first time. memory [3 * dim]: of the caller.
    std::size_t (*update)(const UpdateJob&, std::size_t begin, std::size_t end, float* memory);
    void (*catch_up)(const CatchUpJob&, std::size_t begin, std::size_t end);  // null where the rule does not
};

struct Loops {
    const char* name;
    // by the type of the output
    void (*gather[FLOAT_TYPES])(const GatherJob&, std::size_t begin, std::size_t end);
    void (*weights_grad[FLOAT_TYPES])(const WeightsGradJob&, std::size_t begin, std::size_t end);
    void (*decode)(const CodecJob&, std::size_t begin, std::size_t end);
    void (*encode)(const CodecJob&, std::size_t begin, std::size_t end);
    // out [unique]: the sum of the squares of each row's gradient. Of the job it reads what is about gradients.
    void (*square[FLOAT_TYPES])(const UpdateJob&, std::size_t begin, std::size_t end, float* memory, float* out);
    // out [*, dim]: the gradient of row u goes to place places[u], null for u. memory [dim]: of the caller.
    void (*sum[FLOAT_TYPES])(const UpdateJob&, std::size_t begin, std::size_t end, float* memory, const i64* places,
                             float* out);
    const RuleLoops* rules;
    u32 rule_count;
};

}  // namespace tierbed
