// The shape and the initial values of a table's lines. The layout owns the arrays that kernels get views of.
#pragma once
#include <utility>
#include <vector>

#include "ops/kernels/line.h"
#include "ops/kernels/initialise.h"

namespace tierbed {

constexpr Tile THREAD{0, 1};

class Layout {
public:
    // states: the initial value of each optimizer state. state_widths: the numbers of each in a row, 1 or `dim`. types:
    // of the embedding, and of the first `narrow_states` states.
    Layout(u32 dim, std::vector<float> states, const std::vector<u32>& state_widths, u64 seed,
           const std::vector<u32>& columns, std::vector<InitialValues> values,
           std::pair<FloatType, FloatType> types = {FloatType::float32, FloatType::float32}, u32 narrow_states = 0);
    Layout(const Layout&) = delete;

    void initialise(u64 line, u32 table, u64 key) const;

    const LineShape shape;
    const u32 tables;
    const u64 seed;

private:
    std::vector<float> states_;
    std::vector<InitialValues> values_;
    std::vector<u32> group_ends_, state_ends_;
};

}  // namespace tierbed
