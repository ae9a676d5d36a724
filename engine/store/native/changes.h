// The row keys of rows that were written or erased since a snapshot.
#pragma once
#include <array>

#include "ops/native/batch.h"
#include "rows.h"

namespace tierbed {

// A set of rows, not thread-safe.
class ChangedRows {
public:
    // rows: how many rows it takes, about, before it grows.
    explicit ChangedRows(std::size_t rows);
    ChangedRows(const ChangedRows&) = delete;

    // Adds the rows of a batch, except those with own lines.
    void note(const Batch& batch);
    void note(const u32* tables, const u64* keys, std::size_t n);
    // Adds the rows of another set.
    void merge(const ChangedRows& other);

    // The rows of a bucket, sorted by (table, key).
    RowKeys rows(u32 bucket) const;
    std::size_t size() const;
    std::size_t bytes() const { return bytes_of(buckets_); }

private:
    // Adds rows by bucket, repeated ones included, except those whose entry in `skipped`, which may be null, is not 0.
    void add(const u64* hashes, const u32* tables, const u64* skipped, const BucketOrder& order);

    std::array<RowMap, BUCKETS> buckets_;  // each number is 1
};

}  // namespace tierbed
