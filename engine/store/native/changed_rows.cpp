#include "changed_rows.h"

#include <algorithm>

#include "ops/native/thread_pool.h"

namespace tierbed {
namespace {

constexpr std::size_t MIN_ROWS_TO_SORT = std::size_t{1} << 20;  // a list that grew by fewer rows is not sorted

}  // namespace

inline void ChangedRows::add(u32 table, u64 key) {
    if (size_ == blocks_.size() * BLOCK_ROWS)
        blocks_.push_back(reinterpret_cast<Row*>(memory_.allocate(BLOCK_ROWS * sizeof(Row))));
    row(size_) = {table, key};
    ++size_;
}

void ChangedRows::add_batch(const Batch& batch) {
    const bool is_update = batch.last_steps.size();
    for (std::size_t row = 0; row < batch.num_unique; ++row) {
        if (batch.refused_lines.size() && batch.refused_lines[row]) continue;
        if (is_update && batch.last_steps[row] > since_step_) continue;
        add(batch.tables[row], batch.key(row));
    }
    if (!is_update) limit_duplicates();
}

void ChangedRows::add_keys(const u32* tables, const u64* keys, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) add(tables[i], keys[i]);
    limit_duplicates();
}

void ChangedRows::merge(const ChangedRows& other) {
    for (std::size_t i = 0; i < other.size(); ++i) add(other.row(i).table, other.row(i).key);
}

void ChangedRows::limit_duplicates() {
    if (size() > 2 * num_sorted_ + MIN_ROWS_TO_SORT) sort();
}

void ChangedRows::sort() {
    std::array<std::vector<Row>, BUCKETS> buckets;
    for (std::size_t i = 0; i < size(); ++i) buckets[get_bucket(hash_row(row(i).table, row(i).key))].push_back(row(i));
    parallel_for(BUCKETS, size(), [&](std::size_t b) {
        std::sort(buckets[b].begin(), buckets[b].end());
        buckets[b].erase(std::unique(buckets[b].begin(), buckets[b].end()), buckets[b].end());
    });
    size_ = 0;  // nothing below throws: the list has room
    for (std::size_t b = 0; b < BUCKETS; ++b) {
        for (const Row& each : buckets[b]) add(each.table, each.key);
        bucket_offsets_[b + 1] = size();
    }
    num_sorted_ = size();
}

bool ChangedRows::contains(u32 table, u64 key) const {
    const u32 bucket = get_bucket(hash_row(table, key));
    std::size_t first = bucket_offsets_[bucket], last = bucket_offsets_[bucket + 1];
    while (first < last) {
        const std::size_t middle = (first + last) / 2;
        if (row(middle) < Row{table, key})
            first = middle + 1;
        else
            last = middle;
    }
    return first < bucket_offsets_[bucket + 1] && row(first) == Row{table, key};
}

RowKeys ChangedRows::list_keys(u32 bucket) {
    if (size() != num_sorted_) sort();
    RowKeys keys;
    for (std::size_t i = bucket_offsets_[bucket]; i < bucket_offsets_[bucket + 1]; ++i) {
        keys.add(row(i).table, row(i).key);
    }
    return keys;
}

}  // namespace tierbed
