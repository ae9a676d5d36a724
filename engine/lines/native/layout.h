// The line's shape and initial values, owned; the kernels see views of it.
#pragma once
#include <numeric>
#include <vector>

#include "lines/kernels/copy.h"
#include "lines/kernels/initialise.h"

namespace tierbed {

constexpr Tile THREAD{0, 1};

class Layout {
public:
    // states: the initial value of each optimizer state; state_widths: the floats of each, one a row or `dim`
    Layout(u32 dim, std::vector<float> states, const std::vector<u32>& state_widths, u64 seed,
           const std::vector<u32>& columns, std::vector<InitialValues> values)
        : shape(shape_of(dim, std::accumulate(state_widths.begin(), state_widths.end(), dim))),
          tables(static_cast<u32>(values.size() / columns.size())),
          states_(std::move(states)),
          values_(std::move(values)),
          seed_(seed) {
        u32 end = 0;
        for (u32 columns_of_group : columns) group_ends_.push_back(end += columns_of_group);
        end = dim;
        for (u32 width : state_widths) state_ends_.push_back(end += width);
    }
    Layout(const Layout&) = delete;

    void initialise(u64 line, u32 table, u64 key) const {
        const InitialRow row{seed_,
                             values_.data(),
                             group_ends_.data(),
                             static_cast<u32>(group_ends_.size()),
                             states_.data(),
                             state_ends_.data(),
                             static_cast<u32>(states_.size())};
        initialise_line(THREAD, line, shape, row, table, key);
    }

    const LineShape shape;
    const u32 tables;

private:
    static LineShape shape_of(u32 dim, u32 width) { return {dim, width, line_bytes_of(width)}; }

    std::vector<float> states_;
    std::vector<InitialValues> values_;
    std::vector<u32> group_ends_, state_ends_;
    u64 seed_;
};

}  // namespace tierbed
