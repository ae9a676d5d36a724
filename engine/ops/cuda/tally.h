// Counts in device memory that many threads add to.
#pragma once
#include "items.h"

namespace tierbed {

// A thread's part of it: what it adds to one place in a row takes one addition there.
class Tally {
public:
    TIERBED_FN explicit Tally(u64* counts) : counts_(counts) {}
    TIERBED_FN void add(u32 place) {
        if (place != place_) end();
        place_ = place;
        ++found_;
    }
    // To be called once nothing more is added.
    TIERBED_FN void end() {
        if (found_) atomicAdd(&counts_[place_], found_);
        found_ = 0;
    }

private:
    u64* counts_;
    u64 found_ = 0;
    u32 place_ = 0;
};

// Of counts [tables, 2], hits and misses: where a row that was asked for counts.
TIERBED_FN u32 place_of(u32 table, bool missed) { return 2 * table + missed; }

}  // namespace tierbed
