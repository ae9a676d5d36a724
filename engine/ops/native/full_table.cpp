#include "full_table.h"

#include <algorithm>
#include <cstring>

#include "packed_row.h"
#include "pool.h"

namespace tierbed {
namespace {

constexpr std::size_t AHEAD = 8;  // rows whose slots are fetched before they are probed

}  // namespace

u32 Lines::append() {
    const u64 r = static_cast<u64>(size_) + BASE;
    const u32 segment = 63 - static_cast<u32>(__builtin_clzll(r)) - BASE_BITS;
    if (segment == segments_.size()) {
        LineMemory memory = allocate_lines((static_cast<std::size_t>(BASE) << segment) * line_bytes_);
        const u64 start = reinterpret_cast<u64>(memory.get());
        segments_.push_back({std::move(memory), start});
    }
    return size_++;
}

std::size_t Lines::bytes() const {
    return (((static_cast<std::size_t>(BASE) << segments_.size()) - BASE)) * line_bytes_;
}

void FullTable::Bucket::reserve(std::size_t more) {
    const std::size_t wanted = (lines.size() + more) * 4 / 3 + 1;  // load factor 0.75 at most
    if (wanted <= slots.size()) return;
    std::size_t size = std::max<std::size_t>(slots.size(), 16);
    while (size < wanted) size *= 2;
    std::vector<Slot> old(size, Slot{0, 0, NONE});
    old.swap(slots);
    for (const Slot& slot : old)
        if (slot.row != NONE) insert_row(view(), hash_row(slot.table, slot.key), slot.table, slot.key, slot.row);
}

u64 FullTable::Bucket::insert(u32 table, u64 key) {
    const u32 row = lines.append();
    insert_row(view(), hash_row(table, key), table, key, row);
    return lines.address(row);
}

FullTable::FullTable(const Layout& layout) : shape_(layout.shape) {
    for (u32 bucket = 0; bucket < BUCKETS; ++bucket) {
        buckets_.emplace_back(shape_.line_bytes);
        buckets_.back().reserve(0);
    }
}

std::size_t FullTable::find(Batch& batch) const {
    std::array<std::size_t, BUCKETS> missing{};
    parallel_for(BUCKETS, [&](std::size_t b) {
        const Bucket& bucket = buckets_[b];
        const IndexView index = bucket.view();
        const std::size_t end = batch.bucket_begin[b + 1];
        for (std::size_t i = batch.bucket_begin[b]; i < end; ++i) {
            if (i + AHEAD < end)
                prefetch(&index.slots[home_slot(index, hash_row(batch.tables[i + AHEAD], batch.keys[i + AHEAD]))]);
            const u32 row =
                find_row(THREAD, index, hash_row(batch.tables[i], batch.keys[i]), batch.tables[i], batch.keys[i]);
            batch.lines[i] = row == NONE ? 0 : bucket.lines.address(row);
            missing[b] += row == NONE;
        }
    });
    std::size_t total = 0;
    for (const std::size_t m : missing) total += m;
    return total;
}

void FullTable::insert_missing(Batch& batch, const Layout& layout) {
    parallel_for(BUCKETS, [&](std::size_t b) {
        Bucket& bucket = buckets_[b];
        const auto first = batch.lines.begin() + static_cast<std::ptrdiff_t>(batch.bucket_begin[b]);
        const auto last = batch.lines.begin() + static_cast<std::ptrdiff_t>(batch.bucket_begin[b + 1]);
        bucket.reserve(static_cast<std::size_t>(std::count(first, last, u64{0})));
        for (std::size_t i = batch.bucket_begin[b]; i < batch.bucket_begin[b + 1]; ++i) {
            if (batch.lines[i]) continue;
            batch.lines[i] = bucket.insert(batch.tables[i], batch.keys[i]);
            layout.initialise(batch.lines[i], batch.tables[i], batch.keys[i]);
        }
    });
}

void FullTable::read(const u32* tables, const u64* keys, const u64* lines, bool* found, std::size_t n) const {
    const Grouped grouped = group_by_bucket(tables, keys, n);
    parallel_for(BUCKETS, [&](std::size_t b) {
        const Bucket& bucket = buckets_[b];
        for (std::size_t i = grouped.begin[b]; i < grouped.begin[b + 1]; ++i) {
            const Entry& entry = grouped.entries[i];
            const u32 row = find_row(THREAD, bucket.view(), hash_row(entry.table, entry.key), entry.table, entry.key);
            found[entry.position] = row != NONE && record(bucket.lines.address(row), shape_)->updates > 0;
            if (found[entry.position]) copy_line(THREAD, lines[entry.position], bucket.lines.address(row), shape_);
        }
    });
}

void FullTable::write(const u32* tables, const u64* keys, const u64* lines, std::size_t n) {
    const Grouped grouped = group_by_bucket(tables, keys, n);
    parallel_for(BUCKETS, [&](std::size_t b) {
        Bucket& bucket = buckets_[b];
        bucket.reserve(grouped.begin[b + 1] - grouped.begin[b]);
        for (std::size_t i = grouped.begin[b]; i < grouped.begin[b + 1]; ++i) {
            const Entry& entry = grouped.entries[i];
            const u32 row = find_row(THREAD, bucket.view(), hash_row(entry.table, entry.key), entry.table, entry.key);
            const u64 line = row == NONE ? bucket.insert(entry.table, entry.key) : bucket.lines.address(row);
            copy_line(THREAD, line, lines[entry.position], shape_);
        }
    });
}

std::size_t FullTable::held(u32 b) const {
    const Bucket& bucket = buckets_.at(b);
    std::size_t count = 0;
    for (u32 row = 0; row < bucket.lines.size(); ++row) count += record(bucket.lines.address(row), shape_)->updates > 0;
    return count;
}

void FullTable::scan(u32 b, u8* out) const {
    const Bucket& bucket = buckets_.at(b);
    std::vector<Slot> held;
    for (const Slot& slot : bucket.slots)
        if (slot.row != NONE && record(bucket.lines.address(slot.row), shape_)->updates > 0) held.push_back(slot);
    std::sort(held.begin(), held.end(),
              [](const Slot& a, const Slot& b) { return a.table != b.table ? a.table < b.table : a.key < b.key; });
    for (const Slot& slot : held)
        out = pack_row(out, slot.table, slot.key, floats(bucket.lines.address(slot.row)), shape_);
}

std::size_t FullTable::rows() const {
    std::size_t total = 0;
    for (const Bucket& bucket : buckets_) total += bucket.lines.size();
    return total;
}

std::size_t FullTable::bytes() const {
    std::size_t total = 0;
    for (const Bucket& bucket : buckets_) total += bucket.lines.bytes() + bucket.slots.size() * sizeof(Slot);
    return total;
}

}  // namespace tierbed
