// The names of rows that were written or erased since a snapshot.
#pragma once
#include <array>

#include "ops/native/batch.h"
#include "rows.h"
#include "store/kernels/index.h"

namespace tierbed {

// A set of rows. Nothing is safe in several threads.
class ChangedRows {
public:
    // With room for about that many.
    explicit ChangedRows(std::size_t rows);
    ChangedRows(const ChangedRows&) = delete;

    // The rows of a batch, but for those that no tier may hold.
    void note(const Batch& batch);
    void note(const u32* tables, const u64* keys, std::size_t n);
    // Takes in what another set has.
    void merge(const ChangedRows& other);

    // Those of a bucket in the order of (table, key).
    RowKeys rows(u32 bucket) const;
    std::size_t size() const;
    std::size_t bytes() const { return arena_.bytes(); }

private:
    // Open addressing. Buckets fill alike, and each grows at a load of its own, so that no step pays for all of them.
    struct Bucket {
        u64 start = 0;
        u32 slots = 0;
        std::size_t rows = 0;

        IndexView view() const { return {reinterpret_cast<Slot*>(start), slots - 1}; }
        TIERBED_INLINE void fetch(u64 hash) const { prefetch(&view().slots[home_slot(view(), hash)]); }
        void reserve(std::size_t rows, u32 bucket, Arena& arena);
        void add(u64 hash, u32 table);
        template <class Body>
        void for_each(const Body& body) const {
            for (u32 i = 0; i < slots; ++i)
                if (const Slot& slot = view().slots[i]; slot.row) body(slot);
        }
    };

    // Rows by bucket, any of them perhaps more than once; those with an entry in `left_out` that is not 0 stay out.
    void add(const u64* hashes, const u32* tables, const u64* left_out, const std::size_t* begin);

    Arena arena_;  // in huge pages, though a bucket alone is small
    std::array<Bucket, BUCKETS> buckets_;
};

}  // namespace tierbed
