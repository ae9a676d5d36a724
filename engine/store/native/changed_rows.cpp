#include "changed_rows.h"

#include <algorithm>

#include "ops/native/thread_pool.h"

namespace tierbed {
namespace {

constexpr std::size_t MIN_ROWS_TO_SORT = std::size_t{1} << 20;  // a list that grew by fewer rows is not sorted

}  // namespace

inline void ChangedRows::reserve(std::size_t size) {
    while (size > blocks_.size() * BLOCK_ROWS)
        blocks_.push_back(reinterpret_cast<Row*>(memory_.allocate(BLOCK_ROWS * sizeof(Row))));
}

inline void ChangedRows::add(u32 table, u64 hash) {
    reserve(size_ + 1);
    row(size_) = {table, hash};
    ++size_;
}

void ChangedRows::add_batch(const Batch& batch) {
    const bool is_update = batch.last_steps.size(), may_refuse = batch.refused_lines.size();
    reserve(size_ + batch.num_unique);
    std::size_t size = size_;  // a local variable, and writes without branches, because each step does this
    for (std::size_t i = 0; i < batch.num_unique; ++i) {
        row(size) = {batch.tables[i], batch.hashes[i]};
        size += !((may_refuse && batch.refused_lines[i]) || (is_update && batch.last_steps[i] > since_step_));
    }
    size_ = size;
    if (!is_update) limit_duplicates();
}

void ChangedRows::add_keys(const u32* tables, const u64* keys, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) add(tables[i], slot_hash(tables[i], keys[i]));
    limit_duplicates();
}

void ChangedRows::merge(const ChangedRows& other) {
    for (std::size_t i = 0; i < other.size(); ++i) add(other.row(i).table, other.row(i).hash);
}

void ChangedRows::limit_duplicates() {
    if (size() > 2 * num_sorted_ + MIN_ROWS_TO_SORT) sort();
}

void ChangedRows::sort() {
    std::array<std::vector<Row>, BUCKETS> buckets;
    for (std::size_t i = 0; i < size(); ++i) buckets[get_bucket(row(i).hash)].push_back(row(i));
    parallel_for(BUCKETS, size(), [&](std::size_t b) {
        std::sort(buckets[b].begin(), buckets[b].end());
        buckets[b].erase(std::unique(buckets[b].begin(), buckets[b].end()), buckets[b].end());
    });
    size_ = 0;  // nothing below throws: the list has room
    for (std::size_t b = 0; b < BUCKETS; ++b) {
        for (const Row& each : buckets[b]) add(each.table, each.hash);
        bucket_offsets_[b + 1] = size();
    }
    num_sorted_ = size();
}

bool ChangedRows::contains(u32 table, u64 key) const {
    const Row wanted{table, slot_hash(table, key)};
    const u32 bucket = get_bucket(wanted.hash);
    std::size_t first = bucket_offsets_[bucket], last = bucket_offsets_[bucket + 1];
    while (first < last) {
        const std::size_t middle = (first + last) / 2;
        if (row(middle) < wanted)
            first = middle + 1;
        else
            last = middle;
    }
    return first < bucket_offsets_[bucket + 1] && row(first) == wanted;
}

RowKeys ChangedRows::list_keys(u32 bucket) {
    if (size() != num_sorted_) sort();
    std::vector<std::pair<u32, u64>> rows;
    for (std::size_t i = bucket_offsets_[bucket]; i < bucket_offsets_[bucket + 1]; ++i) {
        const Row each = row(i);
        rows.emplace_back(u32{each.table}, get_key(each.table, each.hash));
    }
    std::sort(rows.begin(), rows.end());
    RowKeys keys;
    for (const auto& [table, key] : rows) keys.add(table, key);
    return keys;
}

}  // namespace tierbed
