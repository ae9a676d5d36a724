// Distributes items to threads. Each item goes to one tile (SIZE threads of a warp); tiles stride over the items.
#pragma once
#include "ops/kernels/portable.h"

namespace tierbed {

// Calls body(tile, item) for items [0, n).
template <u32 SIZE, class Body>
TIERBED_FN void for_each_item(u64 n, const Body& body) {
    const Tile tile{threadIdx.x % SIZE, SIZE};
    const u64 num_tiles = static_cast<u64>(gridDim.x) * blockDim.x / SIZE;
    for (u64 item = (static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x) / SIZE; item < n; item += num_tiles)
        body(tile, item);
}

// Calls body(item) for items [0, n), each on one thread.
template <class Body>
TIERBED_FN void for_each(u64 n, const Body& body) {
    for_each_item<1>(n, [&](Tile, u64 item) { body(item); });
}

// Calls body(warp, item, data) for items [0, n), each on a whole warp. Each lane reads one item's Data by read(item).
// shuffle_from(warp, lane) then copies one lane's Data to all lanes. So a warp waits for memory once per 32 items.
template <class Data, class Read, class Body>
TIERBED_FN void for_each_ahead(u64 n, const Read& read, const Body& body) {
    const Tile warp{threadIdx.x % 32, 32};
    const u64 num_warps = static_cast<u64>(gridDim.x) * blockDim.x / 32;
    u64 item = (static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    while (item < n) {
        const Data own = item + warp.lane * num_warps < n ? read(item + warp.lane * num_warps) : Data{};
        for (u32 lane = 0; lane < 32 && item < n; ++lane, item += num_warps)
            body(warp, item, own.shuffle_from(warp, lane));
    }
}

// Fault bits: errors that kernels find. The host raises these errors in the next call at the latest.
constexpr u32 FAULT_NO_ROOM = 1, FAULT_BAD_TABLE = 2, FAULT_BAD_OFFSETS = 4, FAULT_BAD_ID = 16;

// Counters in device memory to which many threads add. A counter is a sum over NUM_COPIES elements. Blocks add to
// different copies, since additions to the same element wait for each other.
constexpr u32 NUM_COPIES = 64;

struct DeviceCounters {
    u64* counts;  // [NUM_COPIES, size]
    u64 size;
};

// One thread's additions to N counters, added to device memory at the end.
template <u32 N>
struct ThreadCounters {
    u64 values[N] = {};

    TIERBED_FN void add_to(u64* counts) const {
        for (u32 k = 0; k < N; ++k)
            if (values[k]) atomicAdd(&counts[k], values[k]);
    }
};

// A thread's additions to counters. Combines consecutive additions to the same element into one.
class CoalescingCounter {
public:
    TIERBED_FN explicit CoalescingCounter(u64* counts) : counts_(counts) {}
    TIERBED_FN explicit CoalescingCounter(const DeviceCounters& counters)
        : counts_(counters.counts + blockIdx.x % NUM_COPIES * counters.size) {}
    TIERBED_FN void add(u32 index) {
        if (index != index_) flush();
        index_ = index;
        ++pending_;
    }
    // Call this after the last `add`.
    TIERBED_FN void flush() {
        if (pending_) atomicAdd(&counts_[index_], pending_);
        pending_ = 0;
    }

private:
    u64* counts_;
    u64 pending_ = 0;
    u32 index_ = 0;
};

// Returns the index of a table's hits or misses in counters [tables, 2].
TIERBED_FN u32 hit_index(u32 table, bool is_hit) { return 2 * table + !is_hit; }

}  // namespace tierbed
