#pragma once
#include "batch.h"
#include "bind.h"

namespace tierbed {

// Parses a lookup, (keys [n], table ids, bags[, features, batch]). Appends the arrays to `keep_alive`; if it
// is null, the caller keeps the tuple. Throws std::invalid_argument or a Python TypeError.
//
// The table ids are one per bag (with features, one per column), or None: bag i belongs to table i % num_tables.
// `bags` is the length of all bags, or ascending offsets [bags + 1] from 0 to n, or None for no pooling.
// `features` [columns] are the distinct features to look up. Offsets are then [features * batch + 1], ordered by
// feature. Bag b * columns + c is sample b of features[c].
LookupArrays parse_lookup(const nb::tuple& lookup, std::vector<nb::object>* keep_alive);

}  // namespace tierbed
