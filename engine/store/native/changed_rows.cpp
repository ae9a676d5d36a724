#include "changed_rows.h"

#include <algorithm>

#include "ops/native/thread_pool.h"

namespace tierbed {
namespace {

constexpr std::size_t MIN_ROWS_TO_SORT = std::size_t{1} << 20;  // a list that grew by fewer rows is not sorted

}  // namespace

void ChangedRows::add_batch(const Batch& batch, const LineShape& shape) {
    for (std::size_t row = 0; row < batch.num_unique; ++row) {
        if (batch.refused_lines.size() && batch.refused_lines[row]) continue;
        if (row_counters(batch.lines[row], shape)->step <= since_step_)
            rows_.push_back({batch.tables[row], batch.key(row)});
    }
    limit_duplicates();
}

void ChangedRows::add_keys(const u32* tables, const u64* keys, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) rows_.push_back({tables[i], keys[i]});
    limit_duplicates();
}

void ChangedRows::merge(const ChangedRows& other) {
    rows_.insert(rows_.end(), other.rows_.begin(), other.rows_.end());
}

void ChangedRows::limit_duplicates() {
    if (size() > 2 * num_sorted_ + MIN_ROWS_TO_SORT) sort();
}

void ChangedRows::sort() {
    std::array<std::vector<Row>, BUCKETS> buckets;
    for (const Row& row : rows_) buckets[get_bucket(hash_row(row.table, row.key))].push_back(row);
    parallel_for(BUCKETS, size(), [&](std::size_t b) {
        std::sort(buckets[b].begin(), buckets[b].end());
        buckets[b].erase(std::unique(buckets[b].begin(), buckets[b].end()), buckets[b].end());
    });
    rows_.clear();  // nothing below throws: the list has room
    for (std::size_t b = 0; b < BUCKETS; ++b) {
        rows_.insert(rows_.end(), buckets[b].begin(), buckets[b].end());
        bucket_offsets_[b + 1] = size();
    }
    num_sorted_ = size();
}

RowKeys ChangedRows::list_keys(u32 bucket) {
    if (size() != num_sorted_) sort();
    RowKeys keys;
    for (std::size_t i = bucket_offsets_[bucket]; i < bucket_offsets_[bucket + 1]; ++i) {
        keys.tables.push_back(rows_[i].table);
        keys.keys.push_back(rows_[i].key);
    }
    return keys;
}

}  // namespace tierbed
