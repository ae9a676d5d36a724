#include "changed_rows.h"

#include <algorithm>

#include "ops/native/thread_pool.h"

namespace tierbed {
namespace {

constexpr std::size_t PREFETCH_DISTANCE = 16;  // in rows

}  // namespace

ChangedRows::ChangedRows(std::size_t rows) {
    for (u32 bucket = 0; bucket < BUCKETS; ++bucket) reserve_rows(buckets_[bucket], bucket, rows / BUCKETS);
}

void ChangedRows::add_rows(const u64* hashes, const u32* tables, const u64* skipped, const BucketOrder& order) {
    parallel_for(BUCKETS, order.bucket_offsets[BUCKETS], [&](std::size_t b) {
        RowMap& bucket = buckets_[b];
        const std::size_t first = order.bucket_offsets[b], end = order.bucket_offsets[b + 1];
        if (first == end) return;
        reserve_rows(bucket, static_cast<u32>(b), bucket.size() + end - first);
        const std::size_t prefetch_end = std::min(first + PREFETCH_DISTANCE, end);
        for (std::size_t k = first; k < prefetch_end; ++k) bucket.prefetch_slot(hashes[order.row(k)]);
        for (std::size_t k = first; k < end; ++k) {
            if (k + PREFETCH_DISTANCE < end) bucket.prefetch_slot(hashes[order.row(k + PREFETCH_DISTANCE)]);
            const std::size_t i = order.row(k);
            if (!skipped || !skipped[i]) bucket.insert(hashes[i], tables[i], 1);
        }
    });
}

void ChangedRows::add_batch(const Batch& batch) {
    add_rows(batch.hashes.data(), batch.tables.data(), batch.refused_lines.data(), batch.buckets());
}

void ChangedRows::add_keys(const u32* tables, const u64* keys, std::size_t n) {
    const HashedRows hashed(tables, keys, nullptr, n);
    add_rows(hashed.rows().hashes, hashed.rows().tables, nullptr, {{}, hashed.rows().bucket_offsets()});
}

void ChangedRows::merge(const ChangedRows& other) {
    parallel_for(BUCKETS, other.size(), [&](std::size_t b) {
        RowMap& bucket = buckets_[b];
        const RowMap& added = other.buckets_[b];
        reserve_rows(bucket, static_cast<u32>(b), bucket.size() + added.size());
        added.for_each([&](const Slot& slot) { bucket.insert(slot.hash, slot.table, 1); });
    });
}

RowKeys ChangedRows::list_keys(u32 bucket) const {
    std::vector<std::pair<u32, u64>> rows;
    rows.reserve(buckets_[bucket].size());
    buckets_[bucket].for_each([&](const Slot& slot) { rows.push_back({slot.table, get_key(slot.table, slot.hash)}); });
    std::sort(rows.begin(), rows.end());
    RowKeys sorted;
    for (const auto& [table, key] : rows) {
        sorted.tables.push_back(table);
        sorted.keys.push_back(key);
    }
    return sorted;
}

std::size_t ChangedRows::size() const {
    std::size_t total = 0;
    for (const RowMap& bucket : buckets_) total += bucket.size();
    return total;
}

}  // namespace tierbed
