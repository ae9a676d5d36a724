// Deduplicates a step's lookups to unique rows, in an order that depends only on the ids.
//
// Ids are deduplicated by hash, in 64 buckets that threads process independently. If all tables have a known number of
// ids and consecutive bags share a table, each table's ids are radix-sorted instead. Either way, positions are grouped
// by row (`occurrences`), so that a row's gradient is summed in a fixed order, independent of threads.
#pragma once
#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "layout.h"
#include "memory.h"
#include "ops/kernels/deduplicate.h"
#include "ops/kernels/pool.h"

namespace tierbed {

// One lookup's ids in bags. Each bag is pooled to one output row. Without pooling, every id is a bag.
struct LookupArrays {
    const u64* keys;  // [n]
    // The table of each bag [bags], or of each column [columns] if the lookup has features (see pool.h). If null, bag b
    // belongs to table b % num_tables.
    const u32* tables;
    std::size_t num_ids;          // the number of ids, including ids of features that are not looked up
    std::size_t num_bags;         // the number of bags that are looked up; each bag has one output row
    Bags bags;                    // the bags' offsets ascend from 0 to num_ids
    std::size_t num_offset_bags;  // the number of bags, including bags of features that are not looked up
    bool is_pooled;
};

// The ids that a table accepts.
struct LegalIds {
    std::vector<u64> max_ids;         // [tables]; empty if all ids are legal
    std::vector<bool> drops_illegal;  // [tables], true if ids above the table's max id become padding, not errors
};

// Rows grouped by bucket, and ordered by position within each bucket.
struct BucketedRows {
    Buffer<Entry> entries;
    std::size_t bucket_offsets[BUCKETS + 1];
};

// Groups row keys by bucket. Each row's position is its index in the arrays.
BucketedRows group_by_bucket(const u32* tables, const u64* keys, std::size_t n);

// A batch's unique rows by bucket.
struct BucketOrder {
    Buffer<u32> rows;  // [unique], the rows in bucket order; empty if the batch's rows already are in bucket order
    std::array<std::size_t, BUCKETS + 1> bucket_offsets{};

    std::size_t row(std::size_t k) const { return rows.size() ? rows[k] : k; }
};

// The part of a batch that depends only on the ids. Immutable, and shared by several embeddings' batches. Linear ids
// number the ids of all tables consecutively (IdLinearizer). Radix-sorted rows are ordered by linear id. Rows that were
// deduplicated by hash are ordered by bucket, then by first occurrence.
struct UniqueRows {
    // Keys equal to `padding` are padding. Throws std::out_of_range for a table id >= num_tables.
    UniqueRows(const std::vector<LookupArrays>& inputs, u32 num_tables, std::optional<u64> padding,
               const LegalIds& legal);

    // A lookup's arrays, without the ids and table ids.
    struct LookupSpan {
        std::size_t first_position;    // the lookup's first position
        std::size_t first_output_row;  // the lookup's first row among all output rows
        LookupArrays arrays;           // with null `keys` and `tables`
        Buffer<i64> offsets;
        Buffer<u32> features;
    };

    std::vector<LookupSpan> lookups;
    std::size_t num_positions = 0;
    std::size_t num_output_rows = 0;
    std::size_t num_unique = 0;          // the number of unique rows; "unique" in the shapes below
    bool is_pooled = false;              // true if any lookup is pooled
    Buffer<u64> hashes;                  // [unique]
    Buffer<u32> tables;                  // [unique]
    Buffer<u32> linear_ids;              // [unique], the rows' linear ids; empty if rows are ordered by bucket
    Buffer<i32> inverse;                 // [positions], the row at each position; -1 if the position is padding
    Buffer<u32> occurrences;             // the positions that are not padding, grouped by row
    Buffer<u32> occurrence_output_rows;  // each occurrence's output row; empty if nothing is pooled
    Buffer<u32> occurrence_offsets;      // [unique + 1], the index in `occurrences` where each row's occurrences begin
    std::vector<u64> dropped_counts;     // [tables], how many ids were dropped; empty if all ids are legal
    std::optional<std::pair<u32, u64>> first_illegal_id;  // (table, key); an illegal id counts as padding
    const IdLinearizer linearizer;

    // Thread-safe; the first call may sort rows.
    const BucketOrder& buckets() const;

private:
    mutable std::once_flag ordered_;
    mutable BucketOrder buckets_;
};

// Unique rows and their lines in one embedding.
class Batch {
    const std::shared_ptr<const UniqueRows> shared_;

public:
    explicit Batch(std::shared_ptr<const UniqueRows> shared);
    Batch(const Batch&) = delete;
    using LookupSpan = UniqueRows::LookupSpan;
    const std::shared_ptr<const UniqueRows>& shared() const { return shared_; }
    const BucketOrder& buckets() const { return shared_->buckets(); }
    u64 key(std::size_t row) const { return get_key(tables[row], hashes[row]); }
    u64 row_hash(std::size_t row) const { return slot_hash.row_hash(tables[row], hashes[row]); }
    // Returns the keys [unique]. The first call computes them.
    Buffer<u64>& keys();
    // Allocates `n` lines that live as long as the batch. Returns their addresses.
    std::vector<u64> allocate_lines(std::size_t n, const LineShape& shape);
    // Replaces each row's line by the row's element in `refused_lines`, if this element is not 0.
    void use_refused_lines() {
        for (std::size_t row = 0; row < refused_lines.size(); ++row)
            if (refused_lines[row]) lines[row] = refused_lines[row];
    }

    const std::vector<LookupSpan>& lookups = shared_->lookups;
    const std::size_t num_positions = shared_->num_positions, num_unique = shared_->num_unique;
    const std::size_t num_output_rows = shared_->num_output_rows;
    const bool is_pooled = shared_->is_pooled;
    const Buffer<u64>& hashes = shared_->hashes;
    const Buffer<u32>& tables = shared_->tables;
    const Buffer<u32>& linear_ids = shared_->linear_ids;
    const Buffer<i32>& inverse = shared_->inverse;
    const Buffer<u32>& occurrences = shared_->occurrences;
    const Buffer<u32>& occurrence_output_rows = shared_->occurrence_output_rows;
    const Buffer<u32>& occurrence_offsets = shared_->occurrence_offsets;

    Buffer<u64> lines;               // [unique], addresses
    Buffer<u64> lookup_lines;        // [unique], the lines that lookups read; empty if lookups read `lines`
    bool has_float32_lines = false;  // true if `lines` are float32 though the table stores 16-bit floats
    Buffer<u32> last_steps;          // [unique], the step of each row's last write before `update`; empty until then
    Buffer<u64> refused_lines;       // empty, or [unique]: a row's line if the row must not enter a tier, otherwise 0

private:
    Buffer<u64> keys_;
    std::vector<std::unique_ptr<char[]>> owned_;
};

}  // namespace tierbed
