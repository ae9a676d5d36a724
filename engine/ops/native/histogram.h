// Latency histograms, and a tier's metrics.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace tierbed {

// A latency histogram with 8 buckets per power of two, so quantiles are accurate to 6.25 %. Threads add concurrently
// without a lock; a concurrent reader may see part of an addition.
class Histogram {
public:
    void add(std::uint64_t nanoseconds) {
        buckets_[get_bucket(nanoseconds)].fetch_add(1, std::memory_order_relaxed);
        std::uint64_t seen = max_.load(std::memory_order_relaxed);
        while (seen < nanoseconds && !max_.compare_exchange_weak(seen, nanoseconds, std::memory_order_relaxed)) {
        }
    }

    std::uint64_t count() const { return std::accumulate(buckets_.begin(), buckets_.end(), std::uint64_t{0}); }

    // Returns the q-quantile in seconds; 0 <= q <= 1. It is a bucket's middle or `max`. Returns 0 if nothing was added.
    double quantile(double q) const {
        const std::uint64_t all = count();
        if (all == 0) return 0;
        const double target = q * static_cast<double>(all);
        std::uint64_t count = 0;
        std::size_t b = 0;
        for (; b + 1 < kBuckets; ++b) {
            count += buckets_[b].load(std::memory_order_relaxed);
            if (count > 0 && static_cast<double>(count) >= target) break;
        }
        const double middle = std::max(lower_bound(b), (lower_bound(b) + lower_bound(b + 1) - 1) / 2) * 1e-9;
        return b + 1 < kBuckets && middle < max() ? middle : max();
    }

    double max() const { return static_cast<double>(max_.load(std::memory_order_relaxed)) * 1e-9; }  // seconds

private:
    static constexpr std::size_t kBuckets = 8 * 40;  // up to 2^40 ns (18 minutes); the last bucket takes larger values

    static std::size_t get_bucket(std::uint64_t nanoseconds) {
        int exponent;
        const double part = std::frexp(static_cast<double>(nanoseconds) + 1, &exponent);  // in [1/2, 1)
        const auto bucket = static_cast<std::size_t>(8 * exponent + static_cast<int>(16 * part) - 16);
        return std::min(bucket, kBuckets - 1);
    }

    // Returns a bucket's smallest value.
    static double lower_bound(std::size_t bucket) {
        return std::ldexp(8.0 + static_cast<double>(bucket % 8), static_cast<int>(bucket / 8) - 3) - 1;
    }

    std::array<std::atomic<std::uint64_t>, kBuckets> buckets_{};
    std::atomic<std::uint64_t> max_{0};
};

// Adds the time from construction to destruction to a histogram, even if an exception ends the block.
class Timer {
public:
    explicit Timer(Histogram& histogram) : histogram_(histogram), begin_(std::chrono::steady_clock::now()) {}
    ~Timer() {
        const auto time = std::chrono::steady_clock::now() - begin_;
        histogram_.add(static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(time).count()));
    }
    Timer(const Timer&) = delete;

private:
    Histogram& histogram_;
    std::chrono::steady_clock::time_point begin_;
};

struct Metrics {
    std::vector<std::pair<std::string, std::uint64_t>> counts;  // rows, bytes, events
    std::vector<std::pair<std::string, double>> reals;          // seconds, ratios

    void add(const std::string& name, const Histogram& latencies) {
        reals.emplace_back(name + "_seconds_p50", latencies.quantile(0.5));
        reals.emplace_back(name + "_seconds_p90", latencies.quantile(0.9));
        reals.emplace_back(name + "_seconds_p99", latencies.quantile(0.99));
        reals.emplace_back(name + "_seconds_max", latencies.max());
    }
};

}  // namespace tierbed
