// A place for rows below a cache: the full table, RocksDB, or another cache.
#pragma once
#include <array>
#include <cstddef>
#include <mutex>
#include <stdexcept>
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
};

// May be called by several threads at once for different rows.
class Tier {
public:
    virtual ~Tier() = default;
    // Copies each held row to its line and sets found; other lines stay. `touch`: the read counts for recency.
    virtual void read(const RowSpan& rows, bool* found, bool touch) = 0;
    // Inserts or replaces.
    virtual void write(const RowSpan& rows) = 0;
    // Lines are not looked at; rows that are not there are fine.
    virtual void erase(const RowSpan& rows) = 0;
    // Waits for writes of its own that are under way, and forgets why some failed: their rows are tried again.
    virtual void forget_errors() {}
    // Whether writes are worth a thread of their own.
    virtual bool on_disk() const = 0;
};

// How many rows were asked for of each table, and found.
// Threads count apart, so that they add without a lock, to memory that stays in their caches.
class TableCounts {
    struct Part {
        std::mutex mutex;
        std::vector<u64> counts;  // [tables, 2], misses and hits; empty until it is used
    };

public:
    explicit TableCounts(u32 tables) : tables_(tables) {}

    // A part that no other thread adds to while this lives.
    class Share {
    public:
        // `any`: whether there is a row to add; without one no part is taken.
        Share(TableCounts& all, bool any) : counts_(any ? all.take(lock_) : nullptr), tables_(all.tables_) {}
        void add(u32 table, bool hit) {
            if (table < tables_) ++counts_[2 * std::size_t{table} + hit];
        }
        // A row that was added as a hit is a miss.
        void missed(u32 table) {
            if (table >= tables_) return;
            --counts_[2 * std::size_t{table} + 1];
            ++counts_[2 * std::size_t{table}];
        }

    private:
        std::unique_lock<std::mutex> lock_;
        u64* counts_;
        u32 tables_;
    };

    // [tables, 2], hits and misses; not while any is added
    std::vector<u64> sums() const {
        std::vector<u64> all(2 * std::size_t{tables_});
        for (const Part& part : parts_)
            for (std::size_t i = 0; i < all.size() && !part.counts.empty(); ++i) all[i ^ 1] += part.counts[i];
        return all;
    }

private:
    static constexpr std::size_t APART = 16;  // counts between two parts: they share no line of the processor's cache

    // The counts of a part that is free. There is one for each of the tasks of a loop over buckets.
    u64* take(std::unique_lock<std::mutex>& lock) {
        for (Part& part : parts_) {
            lock = std::unique_lock(part.mutex, std::try_to_lock);
            if (!lock) continue;
            if (part.counts.empty()) part.counts.resize(2 * std::size_t{tables_} + APART);
            return part.counts.data();
        }
        throw std::logic_error("rows are counted by two loops at a time");
    }

    u32 tables_;
    std::array<Part, BUCKETS> parts_;
};

}  // namespace tierbed
