// The keys of rows that were written or erased since a snapshot.
#pragma once
#include <array>

#include "ops/native/batch.h"
#include "rows.h"

namespace tierbed {

// A set of row keys. Not thread-safe.
class ChangedRows {
public:
    // rows: about how many rows fit before the set grows.
    explicit ChangedRows(std::size_t rows);
    ChangedRows(const ChangedRows&) = delete;

    // Adds a batch's rows, except rows whose lines are in the batch itself.
    void add_batch(const Batch& batch);
    void add_keys(const u32* tables, const u64* keys, std::size_t n);
    // Adds the rows of another set.
    void merge(const ChangedRows& other);

    // Returns the rows of a bucket, sorted by (table, key).
    RowKeys list_keys(u32 bucket) const;
    std::size_t size() const;
    std::size_t bytes() const { return sum_bytes(buckets_); }

private:
    // Adds rows; duplicates are allowed. Leaves out rows with a nonzero entry in `skipped`, if `skipped` is not null.
    void add_rows(const u64* hashes, const u32* tables, const u64* skipped, const BucketOrder& order);

    std::array<RowMap, BUCKETS> buckets_;  // each map is used as a set of rows: every value is 1
};

}  // namespace tierbed
