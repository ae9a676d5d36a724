// The row keys of rows that were written or erased since a snapshot.
#pragma once
#include <array>

#include "ops/native/batch.h"
#include "rows.h"
#include "store/kernels/index.h"

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
    std::size_t bytes() const { return arena_.bytes(); }

private:
    // Open addressing. Buckets fill evenly; each grows at a different load, so that no step has to grow all of them.
    struct Bucket {
        u64 start = 0;
        u32 slots = 0;
        std::size_t rows = 0;

        IndexView view() const { return {reinterpret_cast<Slot*>(start), slots - 1}; }
        TIERBED_INLINE void prefetch_slot(u64 hash) const { prefetch(&view().slots[home_slot(view(), hash)]); }
        void reserve(std::size_t rows, u32 bucket, Arena& arena);
        void add(u64 hash, u32 table);
        template <class Body>
        void for_each(const Body& body) const {
            for (u32 i = 0; i < slots; ++i)
                if (const Slot& slot = view().slots[i]; slot.row) body(slot);
        }
    };

    // Adds rows by bucket, repeated ones included, except those whose entry in `skipped` is not 0.
    void add(const u64* hashes, const u32* tables, const u64* skipped, const BucketOrder& order);

    Arena arena_;  // huge pages for all buckets together
    std::array<Bucket, BUCKETS> buckets_;
};

}  // namespace tierbed
