#include "layout.h"

namespace tierbed {
namespace {

LineShape make_shape(u32 dim, const std::vector<u32>& state_widths, std::pair<FloatType, FloatType> types,
                     u32 num_16bit_states) {
    u32 width = count_words(types.first, dim);
    for (std::size_t k = 0; k < state_widths.size(); ++k)
        width += k < num_16bit_states ? count_words(types.second, dim) : state_widths[k];
    return {dim, width, compute_line_bytes(width), types.first, types.second, num_16bit_states};
}

}  // namespace

IdLinearizer::IdLinearizer(const std::vector<u64>& max_ids) {
    u64 first = 0;
    for (const u64 id : max_ids) {
        if (id >= MAX_IDS - first) {
            starts_.clear();
            return;
        }
        starts_.push_back(static_cast<u32>(first));
        first += id + 1;
    }
    if (first > 0) starts_.push_back(static_cast<u32>(first));
}

Layout::Layout(u32 dim, std::vector<float> states, const std::vector<u32>& state_widths, u64 seed,
               const std::vector<u32>& columns, std::vector<InitialValues> values,
               std::pair<FloatType, FloatType> types, u32 num_16bit_states, IdLinearizer id_linearizer,
               std::optional<u64> zero_key)
    : shape(make_shape(dim, state_widths, types, num_16bit_states)),
      num_tables(static_cast<u32>(values.size() / columns.size())),
      seed(seed),
      linearizer(std::move(id_linearizer)),
      states_(std::move(states)),
      values_(std::move(values)) {
    u32 end = 0;
    for (u32 group_columns : columns) group_ends_.push_back(end += group_columns);
    end = count_words(types.first, dim);
    for (std::size_t k = 0; k < state_widths.size(); ++k)
        state_ends_.push_back(end += k < num_16bit_states ? count_words(types.second, dim) : state_widths[k]);
    initial_ = {seed,
                values_.data(),
                group_ends_.data(),
                static_cast<u32>(group_ends_.size()),
                states_.data(),
                state_ends_.data(),
                static_cast<u32>(states_.size()),
                zero_key.has_value(),
                zero_key.value_or(0)};
}

}  // namespace tierbed
