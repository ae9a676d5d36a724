#include "changes.h"

#include <algorithm>
#include <stdexcept>

#include "ops/native/thread_pool.h"

namespace tierbed {
namespace {

constexpr std::size_t AHEAD = 16;  // rows whose slots are prefetched before they are probed
constexpr u32 SMALLEST = 16;       // slots of a bucket

}  // namespace

// The load stays below 1/2 in the first bucket and 3/4 in the last.
void ChangedRows::Bucket::reserve(std::size_t needed, u32 bucket, Arena& arena) {
    const std::size_t share = 2 * BUCKETS + bucket, whole = 4 * BUCKETS;
    if (needed * whole <= slots * share) return;
    std::size_t size = std::max(slots, SMALLEST);
    while (needed * whole > size * share) size *= 2;
    if (size > std::size_t{1} << 31) throw std::length_error("a bucket of changed rows is full: 2^31 slots");
    Bucket larger{arena.allocate(size * sizeof(Slot)), static_cast<u32>(size), rows};
    for_each([&](const Slot& slot) { insert_row(larger.view(), slot); });
    *this = larger;
}

void ChangedRows::Bucket::add(u64 hash, u32 table) {
    const IndexView index = view();
    u32 at = home_slot(index, hash);
    for (; index.slots[at].row; at = (at + 1) & index.mask)
        if (index.slots[at].hash == hash && index.slots[at].table == table) return;
    index.slots[at] = {hash, table, 1};
    ++rows;
}

ChangedRows::ChangedRows(std::size_t rows) {
    for (u32 bucket = 0; bucket < BUCKETS; ++bucket) buckets_[bucket].reserve(rows / BUCKETS, bucket, arena_);
}

void ChangedRows::add(const u64* hashes, const u32* tables, const u64* skipped, const BucketOrder& order) {
    parallel_for(BUCKETS, order.begin[BUCKETS], [&](std::size_t b) {
        Bucket& bucket = buckets_[b];
        const std::size_t first = order.begin[b], end = order.begin[b + 1];
        if (first == end) return;
        bucket.reserve(bucket.rows + end - first, static_cast<u32>(b), arena_);
        for (std::size_t k = first; k < std::min(first + AHEAD, end); ++k) bucket.prefetch_slot(hashes[order.row(k)]);
        for (std::size_t k = first; k < end; ++k) {
            if (k + AHEAD < end) bucket.prefetch_slot(hashes[order.row(k + AHEAD)]);
            const std::size_t i = order.row(k);
            if (!skipped || !skipped[i]) bucket.add(hashes[i], tables[i]);
        }
    });
}

void ChangedRows::note(const Batch& batch) {
    add(batch.hashes.data(), batch.tables.data(), batch.own_lines.size() ? batch.own_lines.data() : nullptr,
        batch.buckets());
}

void ChangedRows::note(const u32* tables, const u64* keys, std::size_t n) {
    const Grouped grouped = group_by_bucket(tables, keys, n);
    Buffer<u64> hashes(n);
    Buffer<u32> tables_of(n);
    for (std::size_t i = 0; i < n; ++i) {
        hashes[i] = grouped.entries[i].hash;
        tables_of[i] = grouped.entries[i].table;
    }
    BucketOrder order;
    std::copy_n(grouped.begin, BUCKETS + 1, order.begin.begin());
    add(hashes.data(), tables_of.data(), nullptr, order);
}

void ChangedRows::merge(const ChangedRows& other) {
    Buffer<u64> hashes(other.size());
    Buffer<u32> tables(other.size());
    BucketOrder order;
    std::size_t at = 0;
    for (u32 bucket = 0; bucket < BUCKETS; ++bucket) {
        other.buckets_[bucket].for_each([&](const Slot& slot) {
            hashes[at] = slot.hash;
            tables[at++] = slot.table;
        });
        order.begin[bucket + 1] = at;
    }
    add(hashes.data(), tables.data(), nullptr, order);
}

RowKeys ChangedRows::rows(u32 bucket) const {
    struct Key {
        u32 table;
        u64 key;
    };
    std::vector<Key> keys;
    keys.reserve(buckets_[bucket].rows);
    buckets_[bucket].for_each([&](const Slot& slot) { keys.push_back({slot.table, key_of(slot.table, slot.hash)}); });
    std::sort(keys.begin(), keys.end(),
              [](const Key& a, const Key& b) { return a.table != b.table ? a.table < b.table : a.key < b.key; });
    RowKeys sorted;
    for (const Key& key : keys) {
        sorted.tables.push_back(key.table);
        sorted.keys.push_back(key.key);
    }
    return sorted;
}

std::size_t ChangedRows::size() const {
    std::size_t total = 0;
    for (const Bucket& bucket : buckets_) total += bucket.rows;
    return total;
}

}  // namespace tierbed
