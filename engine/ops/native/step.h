// The loops of a step over a batch whose lines are set.
#pragma once
#include <string>
#include <vector>

#include "batch.h"

namespace tierbed {

void gather(const Batch& batch, const Layout& layout, std::size_t begin, std::size_t n, float* out);
std::size_t update(Batch& batch, const Layout& layout, const float* grads, const std::string& rule,
                   const std::vector<float>& hyper, u32 step);
std::size_t assign(Batch& batch, const Layout& layout, const float* values, u32 step);
std::size_t count_new(const Batch& batch, const Layout& layout);
void initialise_missing(Batch& batch, const Layout& layout);
void initialise_lines(const Layout& layout, const u32* tables, const u64* keys, const u64* lines, std::size_t n);

}  // namespace tierbed
