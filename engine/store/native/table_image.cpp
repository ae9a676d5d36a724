#include "table_image.h"

#include <algorithm>

#include "rows.h"
#include "ops/native/thread_pool.h"

namespace tierbed {
namespace {

constexpr std::size_t AHEAD = 8;  // rows whose memory is fetched before it is used

}  // namespace

bool TableImage::is_read(u32 bucket, u64 hash, u32 table) const {
    if (bucket != bucket_ || !listed_) return bucket < bucket_;
    if (at_ == rows_.size()) return true;
    const HeldRow& next = rows_[at_];
    return at_ > 0 && (table != next.table ? table < next.table : key_of(table, hash) < next.key);
}

void TableImage::keep(u32 bucket, u64 hash, u32 table, const void* stored) {
    Kept& kept = kept_[bucket];
    if (!stored) return kept.index.insert(hash, table, ABSENT);
    const std::size_t bytes = packed_bytes_of(shape_.width), end = kept.rows.size();
    kept.index.reserve(kept.index.size() + 1);
    kept.rows.resize(end + bytes);
    pack_row(kept.rows.data() + end, table, key_of(table, hash), stored, shape_);
    kept.index.insert(hash, table, static_cast<u32>(end / bytes) + 1);
}

void TableImage::keep(const Batch& batch) {
    const u64* const own = batch.own_lines.size() ? batch.own_lines.data() : nullptr;
    parallel_for(BUCKETS, batch.unique, [&](std::size_t b) {
        const u32 bucket = static_cast<u32>(b);
        const RowMap& index = kept_[bucket].index;
        for (std::size_t i = batch.bucket_begin[b]; i < batch.bucket_begin[b + 1]; ++i) {
            if (i + AHEAD < batch.bucket_begin[b + 1]) {
                index.fetch(batch.hashes[i + AHEAD]);
                prefetch_bytes(batch.lines[i + AHEAD], shape_.line_bytes);
            }
            const u64 hash = batch.hashes[i];
            const u32 table = batch.tables[i];
            if ((own && own[i]) || is_read(bucket, hash, table) || index.find(hash, table)) continue;
            const bool is_held = record(batch.lines[i], shape_)->updates > 0;
            keep(bucket, hash, table, is_held ? floats(batch.lines[i]) : nullptr);
        }
    });
}

void TableImage::keep(const u32* tables, const u64* keys, std::size_t n) {
    const Grouped grouped = group_by_bucket(tables, keys, n);
    Buffer<u8> memory(n * shape_.line_bytes);
    u64 line = reinterpret_cast<u64>(memory.data());
    RowList wanted;
    for (u32 bucket = 0; bucket < BUCKETS; ++bucket)
        for (std::size_t i = grouped.begin[bucket]; i < grouped.begin[bucket + 1]; ++i) {
            const Entry& entry = grouped.entries[i];
            if (is_read(bucket, entry.hash, entry.table) || kept_[bucket].index.find(entry.hash, entry.table)) continue;
            wanted.add(entry.table, entry.hash, line);
            line += shape_.line_bytes;
        }
    const RowSpan rows = wanted.rows();
    const auto found = std::make_unique<bool[]>(rows.n);
    top_.read(rows, found.get(), false);
    for (std::size_t i = 0; i < rows.n; ++i)
        keep(bucket_of(rows.hashes[i]), rows.hashes[i], rows.tables[i], found[i] ? floats(rows.lines[i]) : nullptr);
}

std::size_t TableImage::kept_bytes() const {
    std::size_t total = 0;
    for (const Kept& kept : kept_) total += kept.index.bytes() + kept.rows.capacity();
    return total;
}

void TableImage::list(u32 bucket) {
    bucket_ = bucket;
    at_ = 0;
    rows_ = table_.held(bucket);
    const std::vector<u8>& kept = kept_[bucket].rows;
    for (std::size_t at = 0; at < kept.size(); at += packed_bytes_of(shape_.width)) {
        HeldRow row{};
        std::memcpy(&row.table, &kept[at], sizeof row.table);
        std::memcpy(&row.key, &kept[at + sizeof row.table], sizeof row.key);
        rows_.push_back(row);
    }
    listed_ = true;
}

void TableImage::sort() { std::sort(rows_.begin(), rows_.end()); }

std::size_t TableImage::next(u8* out, std::size_t max_rows) {
    Kept& kept = kept_[bucket_];
    const std::size_t bytes = packed_bytes_of(shape_.width);
    std::size_t n = 0;
    for (; at_ < rows_.size() && n < max_rows; ++at_) {
        if (at_ + AHEAD < rows_.size()) {
            const HeldRow& ahead = rows_[at_ + AHEAD];
            kept.index.fetch(hash_row(ahead.table, ahead.key));
            prefetch_bytes(ahead.line, shape_.line_bytes);
        }
        const HeldRow& row = rows_[at_];
        if (at_ > 0 && rows_[at_ - 1].table == row.table && rows_[at_ - 1].key == row.key) continue;  // also kept
        if (const u32 place = kept.index.find(hash_row(row.table, row.key), row.table)) {
            if (place == ABSENT) continue;
            std::memcpy(out, &kept.rows[(place - 1) * bytes], bytes);
            out += bytes;
        } else {
            if (record(row.line, shape_)->updates == 0) continue;
            out = pack_row(out, row.table, row.key, floats(row.line), shape_);
        }
        ++n;
    }
    if (at_ == rows_.size()) kept = {};
    return n;
}

}  // namespace tierbed
