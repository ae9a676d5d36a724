// What it costs to count and time one call, as the tiers do it.
#include <atomic>
#include <cstdint>

#include "../engine/ops/native/histogram.h"

// Nanoseconds of a timed call that adds to two counters, the mean of n.
extern "C" double counted_call(std::int64_t n) {
    static tierbed::Histogram calls;
    static std::atomic<std::uint64_t> hits{0}, misses{0};
    const auto begin = std::chrono::steady_clock::now();
    for (std::int64_t i = 0; i < n; ++i) {
        const tierbed::Timer timer(calls);
        hits.fetch_add(static_cast<std::uint64_t>(i), std::memory_order_relaxed);
        misses.fetch_add(1, std::memory_order_relaxed);
    }
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
    return took.count() / static_cast<double>(n);
}
