// The interface of a tier below a cache: the full table, RocksDB, or another cache.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

#include "ops/kernels/hash.h"
#include "ops/kernels/portable.h"

namespace tierbed {

// Distinct rows (table, hash) with their line addresses, in ascending order of buckets.
struct RowSpan {
    const u32* tables;
    const u64* hashes;
    const u64* lines;
    std::size_t n;

    // Returns the index where each bucket begins, and `n` as the end of the last bucket.
    std::array<std::size_t, BUCKETS + 1> bucket_offsets() const {
        std::array<std::size_t, BUCKETS + 1> begin{};
        for (u32 b = 0; b < BUCKETS; ++b) {
            const auto is_in = [&](u64 hash) { return get_bucket(hash) == b; };
            begin[b + 1] =
                static_cast<std::size_t>(std::partition_point(hashes + begin[b], hashes + n, is_in) - hashes);
        }
        return begin;
    }
};

// A tier. Threads may call its methods concurrently for different rows.
class Tier {
public:
    virtual ~Tier() = default;
    // Copies rows to their lines, except rows that the tier lacks. Sets `is_hit` [n]. should_touch: caches count a use.
    virtual void read(const RowSpan& rows, bool* is_hit, bool should_touch) = 0;
    // Inserts or replaces rows.
    virtual void write(const RowSpan& rows) = 0;
    // Like `write`, for rows that a flush will follow.
    virtual void write_for_flush(const RowSpan& rows) { write(rows); }
    // Erases rows. Ignores missing rows, and the span's `lines`.
    virtual void erase(const RowSpan& rows) = 0;
    // For a tier that writes in threads: waits for its writes and drops their errors. The cache writes the rows again.
    virtual void forget_errors() {}
    // True if a cache above should write back in a separate thread.
    virtual bool is_on_disk() const = 0;
};

// Counts hits and misses per table. Each task has separate counts, so tasks share no locks and no CPU cache lines.
class HitCounts {
public:
    explicit HitCounts(u32 num_tables) : num_tables_(num_tables) {}

    struct TaskCounts {
        u64* counts;
        u32 num_tables;
        void add(u32 table, bool is_hit, u64 num_rows = 1) {
            if (table < num_tables) counts[2 * std::size_t{table} + is_hit] += num_rows;
        }
        // Subtracts a hit that `add` has counted, and adds a miss.
        void turn_into_miss(u32 table) {
            if (table >= num_tables) return;
            --counts[2 * std::size_t{table} + 1];
            ++counts[2 * std::size_t{table}];
        }
    };
    // Returns a task's counts. A task's number is below BUCKETS.
    TaskCounts task_counts(std::size_t task) {
        task_counts_[task].resize(2 * std::size_t{num_tables_} + PADDING);
        return {task_counts_[task].data(), num_tables_};
    }

    // Returns hits and misses [tables, 2]. No task may add to its counts meanwhile.
    std::vector<u64> sums() const {
        std::vector<u64> all(2 * std::size_t{num_tables_});
        for (const std::vector<u64>& counts : task_counts_)
            for (std::size_t i = 0; i < all.size() && !counts.empty(); ++i) all[i ^ 1] += counts[i];
        return all;
    }
    // Returns the hits and misses of all tables together.
    std::array<u64, 2> totals() const {
        std::array<u64, 2> all{};
        const std::vector<u64> table_sums = sums();
        for (std::size_t i = 0; i < table_sums.size(); ++i) all[i % 2] += table_sums[i];
        return all;
    }

private:
    static constexpr std::size_t PADDING = 16;  // unused counts, so that tasks share no CPU cache line

    u32 num_tables_;
    std::array<std::vector<u64>, BUCKETS> task_counts_;  // for each task: misses and hits [tables, 2]; empty until used
};

}  // namespace tierbed
