// Where each bag of a lookup lies among its ids, and which row of its output it makes.
//
// Bags are numbered as their ids lie in memory: without features in order; with features, bag `column * batch + b` is
// the one of sample b for the feature of that column, and makes row `b * columns + column`.
#pragma once
#include "lines/kernels/portable.h"

namespace tierbed {

struct Bags {
    const i64* offsets = nullptr;   // [parts + 1] ascending; null for bags of `length`
    u64 length = 1;
    const u32* features = nullptr;  // [columns], the place of each column's feature in `offsets`; null for none
    u32 columns = 0, batch = 0;     // with features: offsets are [features * batch + 1]

    // The bag's place in `offsets`.
    TIERBED_FN u64 part(u64 bag) const {
        return features ? static_cast<u64>(features[column(bag)]) * batch + sample(bag) : bag;
    }
    TIERBED_FN u64 begin(u64 bag) const { return at(part(bag)); }
    TIERBED_FN u64 end(u64 bag) const { return at(part(bag) + 1); }
    TIERBED_FN u64 row(u64 bag) const { return features ? static_cast<u64>(sample(bag)) * columns + column(bag) : bag; }

private:
    TIERBED_FN u64 at(u64 part) const { return offsets ? static_cast<u64>(offsets[part]) : part * length; }
    TIERBED_FN u32 column(u64 bag) const { return static_cast<u32>(bag) / batch; }
    TIERBED_FN u32 sample(u64 bag) const { return static_cast<u32>(bag) % batch; }
};

}  // namespace tierbed
