// Rows by their names alone.
#pragma once
#include <vector>

#include "lines/kernels/portable.h"

namespace tierbed {

// Distinct rows, buckets ascending.
struct RowNames {
    std::vector<u32> tables;
    std::vector<u64> keys;
};

}  // namespace tierbed
