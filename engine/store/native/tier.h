// A tier below a cache: the full table, RocksDB, or another cache.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

#include "ops/kernels/hash.h"
#include "ops/kernels/portable.h"

namespace tierbed {

// Distinct rows (table, hash), buckets ascending, each with the address of a line.
struct RowSpan {
    const u32* tables;
    const u64* hashes;
    const u64* lines;
    std::size_t n;

    // Where each bucket begins, and the end.
    std::array<std::size_t, BUCKETS + 1> begins() const {
        std::array<std::size_t, BUCKETS + 1> begin{};
        for (u32 b = 0; b < BUCKETS; ++b) {
            const auto is_in = [&](u64 hash) { return bucket_of(hash) == b; };
            begin[b + 1] = static_cast<std::size_t>(std::partition_point(hashes + begin[b], hashes + n, is_in) - hashes);
        }
        return begin;
    }
};

// May be called by several threads at once for different rows.
class Tier {
public:
    virtual ~Tier() = default;
    // Copies each row that the tier has to its line, and writes `found` [n]. The lines of other rows do not change.
    // touch: the read counts for recency.
    virtual void read(const RowSpan& rows, bool* found, bool touch) = 0;
    // Inserts or replaces rows.
    virtual void write(const RowSpan& rows) = 0;
    // Erases rows; rows that the tier does not have are ignored, and so are the lines.
    virtual void erase(const RowSpan& rows) = 0;
    // Waits for the tier's own writes and drops their errors. Rows whose write failed are written again later.
    virtual void forget_errors() {}
    // Whether a cache above should write back in a separate thread.
    virtual bool on_disk() const = 0;
};

// Hits and misses of each table. Each task of a loop adds to its own part, without a lock and without sharing CPU cache
// lines.
class TableCounts {
public:
    explicit TableCounts(u32 tables) : tables_(tables) {}

    struct Part {
        u64* counts;
        u32 tables;
        void add(u32 table, bool hit, u64 rows = 1) {
            if (table < tables) counts[2 * std::size_t{table} + hit] += rows;
        }
        // Turns a hit that was added into a miss.
        void missed(u32 table) {
            if (table >= tables) return;
            --counts[2 * std::size_t{table} + 1];
            ++counts[2 * std::size_t{table}];
        }
    };
    // The part of a task, one of BUCKETS.
    Part part(std::size_t task) {
        parts_[task].resize(2 * std::size_t{tables_} + APART);
        return {parts_[task].data(), tables_};
    }

    // [tables, 2], hits and misses. No thread may add meanwhile.
    std::vector<u64> sums() const {
        std::vector<u64> all(2 * std::size_t{tables_});
        for (const std::vector<u64>& counts : parts_)
            for (std::size_t i = 0; i < all.size() && !counts.empty(); ++i) all[i ^ 1] += counts[i];
        return all;
    }
    // The hits and misses of all tables together.
    std::array<u64, 2> totals() const {
        std::array<u64, 2> all{};
        const std::vector<u64> of_tables = sums();
        for (std::size_t i = 0; i < of_tables.size(); ++i) all[i % 2] += of_tables[i];
        return all;
    }

private:
    static constexpr std::size_t APART = 16;  // counts between two parts, which so share no CPU cache line

    u32 tables_;
    std::array<std::vector<u64>, BUCKETS> parts_;  // [tables, 2], misses and hits; empty until they are used
};

}  // namespace tierbed
