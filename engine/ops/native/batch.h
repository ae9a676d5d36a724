// A batch: the unique rows of one or several lookups, in an order that depends on the ids alone.
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

// The ids of one lookup, in bags that are pooled to one output row each. Without pooling every id is a bag.
struct Segment {
    const u64* keys;          // [n]
    const u32* tables;        // [bags], or [columns] with features; null if bag b is of table b % num_tables
    std::size_t n;            // positions, those of features that are not looked up included
    std::size_t count;        // bags, each a row of the output
    Bags bags;                // offsets ascend from 0 to n
    std::size_t parts;        // bags that the offsets have, if there are offsets
    bool pooled;
};

// The ids that a table accepts.
struct LegalIds {
    std::vector<u64> last;    // [tables] the last legal id; empty if all ids are legal
    std::vector<bool> drops;  // [tables] whether an id beyond `last` is padding rather than an error
};

// Rows grouped by bucket, in the order of their positions within one.
struct Grouped {
    Buffer<Entry> entries;
    std::size_t begin[BUCKETS + 1];
};

// Positions are the indices of the rows.
Grouped group_by_bucket(const u32* tables, const u64* keys, std::size_t n);

// The unique rows of a batch by bucket.
struct BucketOrder {
    Buffer<u32> rows;                       // [unique], buckets ascending; empty for all in their order
    std::array<std::size_t, BUCKETS + 1> begin{};

    std::size_t row(std::size_t k) const { return rows.size() ? rows[k] : k; }
};

// The part of a batch that depends on the ids alone. It is immutable, and batches of several embeddings share it. Rows
// are in the order of their numbers, if ids have numbers and neighbouring bags have one table; else by bucket, and
// within one in the order of their first occurrence.
struct Deduplicated {
    // Keys equal to `padding` are padding. Throws std::out_of_range for a table id beyond num_tables - 1.
    Deduplicated(const std::vector<Segment>& segments, u32 num_tables, std::optional<u64> padding,
                 const LegalIds& legal);

    // A segment without ids and table ids, which are no longer needed.
    struct LookupSpan {
        std::size_t begin;   // its first position
        std::size_t source;  // its first row among the output rows of all segments
        Segment segment;     // `keys` and `tables` null
        Buffer<i64> offsets;
        Buffer<u32> features;
    };

    std::vector<LookupSpan> lookups;
    std::size_t size = 0;     // positions
    std::size_t sources = 0;  // output rows
    std::size_t unique = 0;
    bool pooled = false;                    // any segment
    Buffer<u64> hashes;                     // [unique]
    Buffer<u32> tables;                     // [unique]
    Buffer<u32> numbers;                    // [unique]; empty if rows are by bucket
    Buffer<i32> inverse;                    // [size]
    Buffer<u32> occurrences;                // [size - padding], positions
    Buffer<u32> occurrence_sources;         // [size - padding] their output rows; empty if those are the positions
    Buffer<u32> offsets;                    // [unique + 1]
    std::vector<u64> dropped;               // [tables] ids that were dropped; empty if all ids are legal
    std::optional<std::pair<u32, u64>> illegal;  // the first (table, key) that is an error; such ids are padding
    const Numbering numbering;

    // Thread-safe; the first call may sort rows.
    const BucketOrder& buckets() const;

private:
    mutable std::once_flag ordered_;
    mutable BucketOrder buckets_;
};

// The unique rows of lookups, and their lines in one embedding.
class Batch {
    const std::shared_ptr<const Deduplicated> shared_;

public:
    explicit Batch(std::shared_ptr<const Deduplicated> shared);
    Batch(const Batch&) = delete;

    using LookupSpan = Deduplicated::LookupSpan;
    const std::shared_ptr<const Deduplicated>& shared() const { return shared_; }
    const BucketOrder& buckets() const { return shared_->buckets(); }
    u64 key(std::size_t row) const { return key_of(tables[row], hashes[row]); }
    u64 row_hash(std::size_t row) const { return slot_hash.row_hash(tables[row], hashes[row]); }
    // [unique], computed by the first call.
    Buffer<u64>& keys();
    // Memory for `n` lines that lives as long as the batch.
    std::vector<u64> allocate(std::size_t n, const LineShape& shape);
    // Uses own lines instead of those of a tier.
    void use_own_lines() {
        for (std::size_t row = 0; row < own_lines.size(); ++row)
            if (own_lines[row]) lines[row] = own_lines[row];
    }

    const std::vector<LookupSpan>& lookups = shared_->lookups;
    const std::size_t size = shared_->size, sources = shared_->sources, unique = shared_->unique;
    const bool pooled = shared_->pooled;
    const Buffer<u64>& hashes = shared_->hashes;
    const Buffer<u32>& tables = shared_->tables;
    const Buffer<u32>& numbers = shared_->numbers;
    const Buffer<i32>& inverse = shared_->inverse;
    const Buffer<u32>& occurrences = shared_->occurrences;
    const Buffer<u32>& occurrence_sources = shared_->occurrence_sources;
    const Buffer<u32>& offsets = shared_->offsets;

    Buffer<u64> lines;      // [unique]
    Buffer<u64> views;      // [unique] the lines that lookups read; empty if those are `lines`
    bool has_wide_lines = false;  // embeddings in `lines` are float32, whatever the table has
    Buffer<u64> own_lines;        // [unique] lines of rows that no tier may have, 0 for others; or none

private:
    Buffer<u64> keys_;
    std::vector<std::unique_ptr<char[]>> owned_;
};

}  // namespace tierbed
