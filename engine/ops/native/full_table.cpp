#include "full_table.h"

#include <algorithm>
#include <stdexcept>

#include "packed_row.h"
#include "pool.h"

namespace tierbed {
namespace {

constexpr std::size_t AHEAD = 16;  // rows whose slots are fetched before they are probed
constexpr u32 MOVES = 256;         // slots, at least, that a batch moves in each bucket while the index grows

}  // namespace

u32 Lines::append(Arena& arena, u32 line_bytes) {
    const u64 r = static_cast<u64>(size_) + BASE;
    const u32 segment = 63 - static_cast<u32>(__builtin_clzll(r)) - BASE_BITS;
    if (segment == segments_.size()) throw std::length_error("a bucket of the table is full: 2^32 rows");
    if (segment == count_) {
        segments_[segment] = arena.allocate((static_cast<std::size_t>(BASE) << segment) * line_bytes);
        ++count_;
    }
    return size_++;
}

FullTable::FullTable(const Layout& layout) : shape_(layout.shape) {}

std::size_t FullTable::find(Batch& batch) {
    std::array<std::size_t, BUCKETS> missing{};
    parallel_for(BUCKETS, [&](std::size_t b) {
        const u32 bucket = static_cast<u32>(b);
        const Index::Reader index = index_.reader(bucket);
        const Lines& lines = lines_[bucket];
        const std::size_t end = batch.bucket_begin[b + 1];
        std::size_t absent = 0;
        for (std::size_t i = batch.bucket_begin[b]; i < end; ++i) {
            if (i + AHEAD < end) index.fetch(batch.hashes[i + AHEAD]);
            const u32 row = index.find(batch.hashes[i], batch.tables[i]);
            batch.lines[i] = row ? lines.address(row - 1, shape_.line_bytes) : 0;
            absent += row == 0;
        }
        missing[b] = absent;
        index_.move(bucket, std::max(MOVES, static_cast<u32>(end - batch.bucket_begin[b])));
    });
    index_.drop_moved();
    std::size_t total = 0;
    for (const std::size_t m : missing) total += m;
    return total;
}

std::size_t FullTable::fullest(const std::array<std::size_t, BUCKETS>& more) const {
    std::size_t most = 0;
    for (u32 bucket = 0; bucket < BUCKETS; ++bucket) most = std::max(most, lines_[bucket].size() + more[bucket]);
    return most;
}

void FullTable::reserve(const std::array<std::size_t, BUCKETS>& more) { index_.reserve(fullest(more)); }

u64 FullTable::insert(u32 bucket, u64 hash, u32 table) {
    const u32 row = lines_[bucket].append(arena_, shape_.line_bytes) + 1;
    index_.insert(bucket, Slot{hash, table, row});
    return line_of(bucket, row);
}

void FullTable::insert_missing(Batch& batch, const Layout& layout) {
    if (layout.shape.line_bytes != shape_.line_bytes ||
        std::any_of(batch.tables.data(), batch.tables.data() + batch.unique,
                    [&](u32 table) { return table >= layout.tables; }))
        throw std::invalid_argument("the layout is not that of the table");
    std::array<std::size_t, BUCKETS> missing{};
    for (u32 bucket = 0; bucket < BUCKETS; ++bucket)
        missing[bucket] = static_cast<std::size_t>(std::count(batch.lines.data() + batch.bucket_begin[bucket],
                                                              batch.lines.data() + batch.bucket_begin[bucket + 1], 0));
    reserve(missing);
    parallel_for(BUCKETS, [&](std::size_t b) {
        const u32 bucket = static_cast<u32>(b);
        for (std::size_t i = batch.bucket_begin[b]; i < batch.bucket_begin[b + 1]; ++i) {
            if (batch.lines[i]) continue;
            batch.lines[i] = insert(bucket, batch.hashes[i], batch.tables[i]);
            layout.initialise(batch.lines[i], batch.tables[i], batch.key(i));
        }
    });
}

void FullTable::read(const u32* tables, const u64* keys, const u64* lines, bool* found, std::size_t n) const {
    const Grouped grouped = group_by_bucket(tables, keys, n);
    parallel_for(BUCKETS, [&](std::size_t b) {
        const u32 bucket = static_cast<u32>(b);
        const Index::Reader index = index_.reader(bucket);
        for (std::size_t i = grouped.begin[b]; i < grouped.begin[b + 1]; ++i) {
            const Entry& entry = grouped.entries[i];
            const u32 row = index.find(entry.hash, entry.table);
            found[entry.position] = row != 0 && record(line_of(bucket, row), shape_)->updates > 0;
            if (found[entry.position]) copy_line(THREAD, lines[entry.position], line_of(bucket, row), shape_);
        }
    });
}

void FullTable::write(const u32* tables, const u64* keys, const u64* lines, std::size_t n) {
    const Grouped grouped = group_by_bucket(tables, keys, n);
    std::array<std::size_t, BUCKETS> more;
    for (u32 bucket = 0; bucket < BUCKETS; ++bucket) more[bucket] = grouped.begin[bucket + 1] - grouped.begin[bucket];
    if (!index_.has_room(fullest(more))) {  // rows that are there need none
        more.fill(0);
        parallel_for(BUCKETS, [&](std::size_t b) {
            const Index::Reader index = index_.reader(static_cast<u32>(b));
            for (std::size_t i = grouped.begin[b]; i < grouped.begin[b + 1]; ++i)
                more[b] += index.find(grouped.entries[i].hash, grouped.entries[i].table) == 0;
        });
    }
    reserve(more);
    parallel_for(BUCKETS, [&](std::size_t b) {
        const u32 bucket = static_cast<u32>(b);
        const Index::Reader index = index_.reader(bucket);
        for (std::size_t i = grouped.begin[b]; i < grouped.begin[b + 1]; ++i) {
            const Entry& entry = grouped.entries[i];
            const u32 row = index.find(entry.hash, entry.table);
            copy_line(THREAD, row ? line_of(bucket, row) : insert(bucket, entry.hash, entry.table),
                      lines[entry.position], shape_);
        }
        index_.move(bucket, std::max(MOVES, static_cast<u32>(grouped.begin[b + 1] - grouped.begin[b])));
    });
    index_.drop_moved();
}

std::size_t FullTable::held(u32 bucket) const {
    const Lines& lines = lines_.at(bucket);
    std::size_t count = 0;
    for (u32 row = 0; row < lines.size(); ++row)
        count += record(lines.address(row, shape_.line_bytes), shape_)->updates > 0;
    return count;
}

void FullTable::scan(u32 bucket, u8* out) const {
    struct Row {
        u32 table;
        u64 key, line;
    };
    std::vector<Row> held;
    index_.for_each(bucket, [&](const Slot& slot) {
        const u64 line = line_of(bucket, slot.row);
        if (record(line, shape_)->updates > 0) held.push_back({slot.table, key_of(slot.table, slot.hash), line});
    });
    std::sort(held.begin(), held.end(),
              [](const Row& a, const Row& b) { return a.table != b.table ? a.table < b.table : a.key < b.key; });
    for (const Row& row : held) out = pack_row(out, row.table, row.key, floats(row.line), shape_);
}

std::size_t FullTable::rows() const {
    std::size_t total = 0;
    for (const Lines& lines : lines_) total += lines.size();
    return total;
}

std::size_t FullTable::bytes() const { return arena_.bytes() + index_.bytes(); }

}  // namespace tierbed
