// How many rows were asked for of each table, and found.
#pragma once
#include <vector>

#include "../kernels/hash.h"

namespace tierbed {

// Buckets count apart, so that tasks which own buckets add without a lock.
class TableCounts {
public:
    explicit TableCounts(u32 tables)
        : tables_(tables), stride_((2 * std::size_t{tables} + LINE - 1) / LINE * LINE), counts_(BUCKETS * stride_) {}

    class Bucket {
    public:
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
        friend class TableCounts;
        Bucket(u64* counts, u32 tables) : counts_(counts), tables_(tables) {}

        u64* counts_;  // [tables, 2], misses and hits
        u32 tables_;
    };
    Bucket of(std::size_t bucket) { return {counts_.data() + bucket * stride_, tables_}; }

    // [tables, 2], hits and misses
    std::vector<u64> sums() const {
        std::vector<u64> all(2 * std::size_t{tables_});
        for (std::size_t bucket = 0; bucket < BUCKETS; ++bucket)
            for (std::size_t i = 0; i < all.size(); ++i) all[i ^ 1] += counts_[bucket * stride_ + i];
        return all;
    }

private:
    static constexpr std::size_t LINE = 8;  // counts of a line of the processor's cache, which two buckets do not share

    u32 tables_;
    std::size_t stride_;
    std::vector<u64> counts_;
};

}  // namespace tierbed
