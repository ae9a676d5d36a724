#include "cache.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace tierbed {

Cache::Cache(const LineShape& shape, std::size_t budget_bytes, Replacement replacement)
    : shape_(shape), replacement_(replacement) {
    const std::size_t set_bytes = WAYS * (shape_.line_bytes + sizeof(Way) + sizeof(u8));
    const std::size_t sets = std::min<std::size_t>(budget_bytes / set_bytes, NONE / WAYS);
    if (sets == 0) throw std::invalid_argument("one set takes " + std::to_string(set_bytes) + " bytes");
    sets_ = static_cast<u32>(sets);
    tags_ = Pages(sets * WAYS);
    ways_ = Pages(sets * WAYS * sizeof(Way));
    lines_ = Pages(sets * WAYS * shape_.line_bytes);
}

std::size_t Cache::used() const { return slots() - static_cast<std::size_t>(std::count(tags(), tags() + slots(), 0)); }

}  // namespace tierbed
