// The loops of a step over a batch whose lines are set.
#pragma once
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
std::size_t assign(Batch& batch, const Layout& layout, const float* values, u32 step);
std::size_t count_new(const Batch& batch, const Layout& layout);
void initialise_missing(Batch& batch, const Layout& layout);
void initialise_lines(const Layout& layout, const u32* tables, const u64* keys, const u64* lines, std::size_t n);

}  // namespace tierbed
