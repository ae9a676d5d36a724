#include "cache.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace tierbed {

Cache::Cache(const LineShape& shape, std::size_t budget_bytes) : line_bytes_(shape.line_bytes) {
    const std::size_t set_bytes = WAYS * (std::size_t{line_bytes_} + sizeof(Way) + 1);
    std::size_t sets = std::min<std::size_t>(budget_bytes / set_bytes, NONE / WAYS);
    if (sets == 0) throw std::invalid_argument("one set takes " + std::to_string(set_bytes) + " bytes");
    if (sets > BUCKETS) sets = sets / BUCKETS * BUCKETS;
    sets_ = static_cast<u32>(sets);
    tags_ = Pages(sets * WAYS);
    ways_ = Pages(sets * WAYS * sizeof(Way));
    lines_ = Pages(sets * WAYS * line_bytes_);
}

std::size_t Cache::used() const {
    return capacity() - static_cast<std::size_t>(std::count(tags(), tags() + capacity(), u8{0}));
}

}  // namespace tierbed
