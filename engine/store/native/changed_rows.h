// The keys of rows that were written or erased since a snapshot.
#pragma once
#include <array>
#include <limits>

#include "ops/native/batch.h"
#include "ops/native/memory.h"
#include "rows.h"

namespace tierbed {

// A list of row keys. A step adds a row only once: a row whose last step is later than `since_step` is in the list
// already, because it was written since. Other duplicates are dropped when the list is sorted. Not thread-safe.
class ChangedRows {
public:
    static constexpr u32 ALL_STEPS = std::numeric_limits<u32>::max();

    // since_step: the step of the table when the list begins; ALL_STEPS if last steps say nothing.
    explicit ChangedRows(u32 since_step) : since_step_(since_step) {}
    ChangedRows(const ChangedRows&) = delete;

    // Adds a pinned batch's rows after they are written, except rows whose lines are in the batch itself.
    void add_batch(const Batch& batch);
    void add_keys(const u32* tables, const u64* keys, std::size_t n);
    // Adds the rows of another list.
    void merge(const ChangedRows& other);

    // Returns the rows of a bucket, sorted by (table, key), without duplicates.
    RowKeys list_keys(u32 bucket);
    // Returns true if the list has the row. Call `list_keys` since the last change of the list.
    bool contains(u32 table, u64 key) const;
    std::size_t size() const { return size_; }  // may count a row more than once
    std::size_t bytes() const { return blocks_.size() * BLOCK_ROWS * sizeof(Row); }

private:
    struct __attribute__((packed)) Row {
        u32 table;
        u64 hash;  // not the key, which would take most of a step's time for the list
        bool operator<(const Row& other) const {
            return table != other.table ? table < other.table : u64{hash} < u64{other.hash};
        }
        bool operator==(const Row& other) const { return table == other.table && hash == other.hash; }
    };

    Row& row(std::size_t i) const { return blocks_[i / BLOCK_ROWS][i % BLOCK_ROWS]; }
    void reserve(std::size_t size);
    void add(u32 table, u64 hash);
    // Drops duplicates if there may be many, as of a row that is put or deleted again and again.
    void limit_duplicates();
    void sort();

    static constexpr std::size_t BLOCK_ROWS = 1024;

    const u32 since_step_;
    std::vector<Row*> blocks_;  // of BLOCK_ROWS rows each: blocks never move, unlike a growing vector's rows
    Arena memory_;
    std::size_t size_ = 0;
    std::size_t num_sorted_ = 0;                             // how many rows the last `sort` left
    std::array<std::size_t, BUCKETS + 1> bucket_offsets_{};  // valid if all rows are sorted
};

}  // namespace tierbed
