#include "table_image.h"

#include <algorithm>

#include "ops/native/thread_pool.h"
#include "packed_rows.h"

namespace tierbed {
namespace {

constexpr std::size_t PREFETCH_DISTANCE = 8;  // in rows

}  // namespace

bool TableImage::is_unneeded(u32 bucket, u64 hash, u32 table) const {
    if (bucket < bucket_) return true;
    if (bucket == bucket_ && has_rows_) {
        if (next_ == rows_.size()) return true;
        const TableRow& next = rows_[next_];
        if (next_ > 0 && (table != next.table ? table < next.table : get_key(table, hash) < next.key)) return true;
    }
    return changed_ && !changed_->contains(table, get_key(table, hash));
}

void TableImage::save_before_image(u32 bucket, u64 hash, u32 table, const void* stored) {
    BeforeImages& saved = before_images_[bucket];
    if (!stored) return saved.index.insert(hash, table, ABSENT);
    const std::size_t bytes = packed_row_bytes(shape_.width), end = saved.rows.size();
    saved.index.reserve(saved.index.size() + 1);
    saved.rows.resize(end + bytes);
    pack_row(saved.rows.data() + end, table, get_key(table, hash), stored, shape_);
    saved.index.insert(hash, table, static_cast<u32>(end / bytes) + 1);
}

void TableImage::save_before_images(const Batch& batch) {
    const u64* const refused = batch.refused_lines.data();
    const BucketOrder& order = batch.buckets();
    parallel_for(BUCKETS, batch.num_unique, [&](std::size_t b) {
        const u32 bucket = static_cast<u32>(b);
        const RowMap& index = before_images_[bucket].index;
        for (std::size_t k = order.bucket_offsets[b]; k < order.bucket_offsets[b + 1]; ++k) {
            if (k + PREFETCH_DISTANCE < order.bucket_offsets[b + 1]) {
                const std::size_t row = order.row(k + PREFETCH_DISTANCE);
                index.prefetch_slot(batch.hashes[row]);
                prefetch_bytes(batch.lines[row], shape_.line_bytes);
            }
            const std::size_t i = order.row(k);
            const u64 hash = batch.hashes[i];
            const u32 table = batch.tables[i];
            if ((refused && refused[i]) || is_unneeded(bucket, hash, table) || index.find(hash, table)) continue;
            const bool is_written = row_counters(batch.lines[i], shape_)->updates > 0;
            save_before_image(bucket, hash, table, is_written ? floats(batch.lines[i]) : nullptr);
        }
    });
}

void TableImage::save_before_images(const u32* tables, const u64* keys, std::size_t n) {
    const HashedRows hashed(tables, keys, nullptr, n);
    Buffer<u8> memory(n * shape_.line_bytes);
    u64 line = reinterpret_cast<u64>(memory.data());
    RowList unsaved;
    for (std::size_t i = 0; i < n; ++i) {
        const u64 hash = hashed.rows().hashes[i];
        const u32 table = hashed.rows().tables[i], bucket = get_bucket(hash);
        if (is_unneeded(bucket, hash, table) || before_images_[bucket].index.find(hash, table)) continue;
        unsaved.add(table, hash, line);
        line += shape_.line_bytes;
    }
    const RowSpan rows = unsaved.rows();
    const auto is_hit = std::make_unique<bool[]>(rows.n);
    top_tier_.read(rows, is_hit.get(), false);
    for (std::size_t i = 0; i < rows.n; ++i)
        save_before_image(get_bucket(rows.hashes[i]), rows.hashes[i], rows.tables[i],
                          is_hit[i] ? floats(rows.lines[i]) : nullptr);
}

std::size_t TableImage::before_image_bytes() const {
    std::size_t total = 0;
    for (const BeforeImages& saved : before_images_) total += saved.index.bytes() + saved.rows.capacity();
    return total;
}

void TableImage::open_bucket(u32 bucket) {
    bucket_ = bucket;
    next_ = 0;
    has_rows_ = true;
    if (changed_) {
        const RowKeys listed = changed_->list_keys(bucket);
        rows_.clear();
        for (std::size_t i = 0; i < listed.keys.size(); ++i) rows_.push_back({listed.keys[i], 0, listed.tables[i]});
        return;
    }
    rows_ = table_->list_rows(bucket);
    const std::size_t bytes = packed_row_bytes(shape_.width);
    const std::vector<u8>& packed = before_images_[bucket].rows;
    const PackedRows saved{packed.data(), bytes, packed.size() / bytes};
    for (std::size_t i = 0; i < saved.count; ++i) {
        const auto [table, key] = saved.row_key(i);
        rows_.push_back({key, 0, table});
    }
}

void TableImage::sort_bucket() { std::sort(rows_.begin(), rows_.end()); }

void TableImage::read_listed_rows(std::size_t max_rows, Buffer<u8>& memory) {
    const std::size_t end = std::min(next_ + max_rows, rows_.size());
    memory = Buffer<u8>((end - next_) * shape_.line_bytes);
    u64 line = reinterpret_cast<u64>(memory.data());
    RowList unsaved;
    for (std::size_t i = next_; i < end; ++i) {
        const u64 hash = slot_hash(rows_[i].table, rows_[i].key);
        if (before_images_[bucket_].index.find(hash, rows_[i].table)) continue;
        rows_[i].line = line;
        unsaved.add(rows_[i].table, hash, line);
        line += shape_.line_bytes;
    }
    const auto is_hit = std::make_unique<bool[]>(unsaved.size());
    top_tier_.read(unsaved.rows(), is_hit.get(), false);
    for (std::size_t i = next_, position = 0; i < end; ++i)
        if (rows_[i].line && !is_hit[position++]) rows_[i].line = 0;
}

std::size_t TableImage::read_next(u8* out, std::size_t max_rows) {
    BeforeImages& saved = before_images_[bucket_];
    const std::size_t bytes = packed_row_bytes(shape_.width);
    Buffer<u8> memory;
    std::size_t n = 0, end = rows_.size();
    if (changed_) {
        read_listed_rows(max_rows, memory);
        end = std::min(next_ + max_rows, end);
    }
    for (; next_ < end && n < max_rows; ++next_) {
        if (next_ + PREFETCH_DISTANCE < end) {
            const TableRow& later = rows_[next_ + PREFETCH_DISTANCE];
            saved.index.prefetch_slot(slot_hash(later.table, later.key));
            prefetch_bytes(later.line, shape_.line_bytes);
        }
        const TableRow& row = rows_[next_];
        if (next_ > 0 && rows_[next_ - 1].table == row.table && rows_[next_ - 1].key == row.key) continue;  // duplicate
        if (const u32 number = saved.index.find(slot_hash(row.table, row.key), row.table)) {
            if (number == ABSENT) {
                if (changed_) missing_.add(row.table, row.key);
                continue;
            }
            std::memcpy(out, &saved.rows[(number - 1) * bytes], bytes);
            out += bytes;
        } else {
            if (!row.line || row_counters(row.line, shape_)->updates == 0) {
                if (changed_) missing_.add(row.table, row.key);
                continue;
            }
            out = pack_row(out, row.table, row.key, floats(row.line), shape_);
        }
        ++n;
    }
    if (next_ == rows_.size()) saved = {};
    return n;
}

}  // namespace tierbed
