// The shape and initial values of a table's lines. The layout owns the arrays that kernels view.
#pragma once
#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "ops/kernels/line.h"
#include "ops/kernels/initialise.h"

namespace tierbed {

constexpr Tile THREAD{0, 1};

// Numbers ids consecutively, table after table. Empty if a table is unlimited, or the limits' sum exceeds MAX_IDS.
class IdLinearizer {
public:
    static constexpr u32 MAX_IDS = 1u << 28;

    IdLinearizer() = default;
    // max_ids [tables]: each table's last id.
    explicit IdLinearizer(const std::vector<u64>& max_ids);

    u32 num_ids(u32 table) const { return starts_[table + 1] - starts_[table]; }
    u32 size() const { return starts_.empty() ? 0 : starts_.back(); }
    bool contains(u32 table, u64 key) const { return table + 1 < starts_.size() && key < num_ids(table); }
    u32 linearize(u32 table, u64 key) const { return starts_[table] + static_cast<u32>(key); }
    u32 find_table(u32 linear_id) const {
        return static_cast<u32>(std::upper_bound(starts_.begin(), starts_.end(), linear_id) - starts_.begin()) - 1;
    }
    u64 find_key(u32 linear_id, u32 table) const { return linear_id - starts_[table]; }
    bool operator==(const IdLinearizer& other) const { return starts_ == other.starts_; }

private:
    std::vector<u32> starts_;  // [tables + 1], each table's first linear id, then the last table's end
};

class Layout {
public:
    // states: each optimizer state's initial value. state_widths: how many numbers each state has per row, 1 or `dim`.
    // types: the type of embeddings, and of the first `num_16bit_states` states. zero_key: its row starts as zeros.
    Layout(u32 dim, std::vector<float> states, const std::vector<u32>& state_widths, u64 seed,
           const std::vector<u32>& columns, std::vector<InitialValues> values,
           std::pair<FloatType, FloatType> types = {FloatType::float32, FloatType::float32}, u32 num_16bit_states = 0,
           IdLinearizer linearizer = {}, std::optional<u64> zero_key = {});
    Layout(const Layout&) = delete;

    void initialise(u64 line, u32 table, u64 key) const { initialise_line(THREAD, line, shape, initial_, table, key); }

    const LineShape shape;
    const u32 num_tables;
    const u64 seed;
    const IdLinearizer linearizer;

private:
    std::vector<float> states_;
    std::vector<InitialValues> values_;
    std::vector<u32> group_ends_, state_ends_;
    InitialRow initial_;  // points to the arrays above
};

}  // namespace tierbed
