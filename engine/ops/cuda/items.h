// How kernels share their items: tiles of SIZE lanes stride over the grid, each item is one tile's.
#pragma once
#include "ops/kernels/portable.h"

namespace tierbed {

// Calls body(tile, item) for items [0, n).
template <u32 SIZE, class Body>
TIERBED_FN void for_each_item(u64 n, const Body& body) {
    const Tile tile{threadIdx.x % SIZE, SIZE};
    const u64 tiles = static_cast<u64>(gridDim.x) * blockDim.x / SIZE;
    for (u64 item = (static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x) / SIZE; item < n; item += tiles)
        body(tile, item);
}

// The same for single threads: body(item).
template <class Body>
TIERBED_FN void for_each(u64 n, const Body& body) {
    for_each_item<1>(n, [&](Tile, u64 item) { body(item); });
}

// Calls body(warp, item, what) for items [0, n), each on all lanes of a warp. what: a What that one lane read for its
// warp by read(item), and passed on by what.of_lane(warp, lane): a warp waits once for what it needs of 32 items.
template <class What, class Read, class Body>
TIERBED_FN void for_each_ahead(u64 n, const Read& read, const Body& body) {
    const Tile warp{threadIdx.x % 32, 32};
    const u64 warps = static_cast<u64>(gridDim.x) * blockDim.x / 32;
    u64 item = (static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    while (item < n) {
        What mine{};
        if (item + warp.lane * warps < n) mine = read(item + warp.lane * warps);
        for (u32 lane = 0; lane < 32 && item < n; ++lane, item += warps) body(warp, item, mine.of_lane(warp, lane));
    }
}

// Faults that a kernel finds. The host raises them, at the latest in the next call.
constexpr u32 NO_ROOM = 1, BAD_TABLE = 2, BAD_OFFSETS = 4, BAD_ID = 16;

// Counts in device memory that many threads add to: the sum of COPIES arrays, of which blocks take one each in turn,
// since additions to one place wait for each other.
constexpr u32 COPIES = 64;

struct Counters {
    u64* counts;  // [COPIES, size]
    u64 size;
};

// A thread's part of N counts.
template <u32 N>
struct CountsOf {
    u64 found[N] = {};

    TIERBED_FN void add_to(u64* counts) const {
        for (u32 k = 0; k < N; ++k)
            if (found[k]) atomicAdd(&counts[k], found[k]);
    }
};

// A thread's part of counts: what it adds to one place in a row takes one addition there.
class Tally {
public:
    TIERBED_FN explicit Tally(u64* counts) : counts_(counts) {}
    TIERBED_FN explicit Tally(const Counters& all) : counts_(all.counts + blockIdx.x % COPIES * all.size) {}
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

// The element of counts [tables, 2], hits and misses, that a lookup of a row adds to.
TIERBED_FN u32 place_of(u32 table, bool missed) { return 2 * table + missed; }

}  // namespace tierbed
