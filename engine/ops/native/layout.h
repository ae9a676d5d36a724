// The line's shape and initial values, owned; the kernels see views of it.
#pragma once
#include <vector>

#include "../kernels/copy.h"
#include "../kernels/initialise.h"

namespace tierbed {

constexpr Tile THREAD{0, 1};

class Layout {
public:
    Layout(u32 dim, std::vector<float> states, u64 seed, const std::vector<u32>& columns,
           std::vector<InitialValues> values)
        : shape{dim, dim * (1 + static_cast<u32>(states.size())),
                line_bytes_of(dim * (1 + static_cast<u32>(states.size())))},
          states_(std::move(states)),
          values_(std::move(values)) {
        u32 end = 0;
        for (u32 columns_of_group : columns) group_ends_.push_back(end += columns_of_group);
        tables = static_cast<u32>(values_.size() / columns.size());
        seed_ = seed;
    }
    Layout(const Layout&) = delete;

    void initialise(u64 line, u32 table, u64 key) const {
        const InitialRow row{seed_, values_.data(), group_ends_.data(), static_cast<u32>(group_ends_.size()),
                             states_.data()};
        initialise_line(THREAD, line, shape, row, table, key);
    }

    const LineShape shape;
    u32 tables;

private:
    std::vector<float> states_;
    std::vector<InitialValues> values_;
    std::vector<u32> group_ends_;
    u64 seed_;
};

}  // namespace tierbed
