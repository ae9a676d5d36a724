// The unique rows of one or several lookups, in an order that depends on the ids alone.
#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "../kernels/unique.h"
#include "layout.h"

namespace tierbed {

// Keys [n] with their table ids [n], or null where position i belongs to table i % num_tables.
struct Segment {
    const u64* keys;
    const u32* tables;
    std::size_t n;
};

// Entries grouped by bucket, within one in the order of their positions.
struct Grouped {
    std::vector<Entry> entries;
    std::size_t begin[BUCKETS + 1];
};

Grouped group_by_bucket(const std::vector<Segment>& segments, u32 num_tables, std::optional<u64> padding);
inline Grouped group_by_bucket(const u32* tables, const u64* keys, std::size_t n) {
    return group_by_bucket({{keys, tables, n}}, NONE, std::nullopt);
}

class Batch {
public:
    Batch(const std::vector<Segment>& segments, u32 num_tables, std::optional<u64> padding);
    Batch(const Batch&) = delete;

    // Memory for `n` lines that lives as long as the batch.
    std::vector<u64> allocate(std::size_t n, const LineShape& shape);

    std::size_t size = 0;
    std::vector<u64> keys;                  // [unique]
    std::vector<u32> tables;                // [unique]
    std::vector<u64> lines;                 // [unique]
    std::vector<i32> inverse;               // [size]
    std::vector<u32> occurrences;           // [size - padding]
    std::vector<u32> offsets;               // [unique + 1]
    std::size_t bucket_begin[BUCKETS + 1];  // unique rows by bucket

private:
    std::vector<std::unique_ptr<char[]>> owned_;
};

}  // namespace tierbed
