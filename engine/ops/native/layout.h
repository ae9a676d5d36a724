// The line's shape and initial values, owned; the kernels see views of it.
#pragma once
#include <utility>
#include <vector>

#include "ops/kernels/line.h"
#include "ops/kernels/initialise.h"

namespace tierbed {

constexpr Tile THREAD{0, 1};

class Layout {
public:
    // states: the initial value of each optimizer state; state_widths: the numbers of each, one a row or `dim`; types:
    // of embedding and narrow states, of which there are `narrow_states`
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
