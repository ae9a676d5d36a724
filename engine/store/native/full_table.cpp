#include "full_table.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

#include "ops/native/thread_pool.h"
#include "rows.h"

namespace tierbed {

void LinearIdIndex::insert(u32 bucket, u32* entry, u32 line_ref) {
    std::vector<u32>& ids = linear_ids_[bucket];
    if (line_ref > ids.size()) ids.resize(line_ref, NONE);
    ids[line_ref - 1] = static_cast<u32>(entry - &this->entry(0));
    *entry = line_ref;
}

std::size_t LinearIdIndex::bytes() const {
    std::size_t total = entries_.size();
    for (const std::vector<u32>& ids : linear_ids_) total += ids.capacity() * sizeof(u32);
    return total;
}

namespace {

constexpr std::size_t PREFETCH_DISTANCE = 16;         // in rows
constexpr std::size_t LINEAR_PREFETCH_DISTANCE = 64;  // rows with linear ids are faster to locate
constexpr std::size_t ROWS_PER_TASK = 1024;

// Calls body(bucket, begin, end) for each bucket's rows.
template <class Body>
void for_each_bucket(const RowSpan& rows, const Body& body) {
    const auto begin = rows.bucket_offsets();
    parallel_for(BUCKETS, rows.n,
                 [&](std::size_t bucket) { body(static_cast<u32>(bucket), begin[bucket], begin[bucket + 1]); });
}

}  // namespace

u32 LinePool::allocate(Arena& arena, u32 line_bytes) {
    if (num_free_) {
        const u32 line_index = first_free_ - 1;
        std::memcpy(&first_free_, floats(address(line_index, line_bytes)), sizeof first_free_);
        --num_free_;
        return line_index;
    }
    const u64 offset = static_cast<u64>(num_lines_) + BASE;
    const u32 segment = 63 - static_cast<u32>(__builtin_clzll(offset)) - BASE_BITS;
    if (segment == segments_.size()) throw std::length_error("a bucket of the table is full: 2^32 rows");
    if (segment == num_segments_) {
        segments_[segment] = arena.allocate((static_cast<std::size_t>(BASE) << segment) * line_bytes);
        ++num_segments_;
    }
    return num_lines_++;
}

void LinePool::release(u32 line_index, const LineShape& shape) {
    const u64 line = address(line_index, shape.line_bytes);
    row_counters(line, shape)->updates = 0;
    std::memcpy(floats(line), &first_free_, sizeof first_free_);
    first_free_ = line_index + 1;
    ++num_free_;
}

FullTable::FullTable(const Layout& layout)
    : shape_(layout.shape), index_(layout.linearizer), hit_counts_(layout.num_tables) {}

std::size_t FullTable::look_up_rows(Batch& batch) {
    const std::lock_guard lock(mutex_);
    const u64* const refused_lines = batch.refused_lines.data();
    const u64* const hashes = batch.hashes.data();
    const u32 *const tables = batch.tables.data(), *const linear_ids = batch.linear_ids.data();
    u64* const lines = batch.lines.data();
    std::atomic<std::size_t> missing{0};
    const LinearIdIndex& linear = index_.linear();
    if (batch.linear_ids.size()) {
        if (!(batch.shared()->linearizer == linear.linearizer))
            throw std::invalid_argument("the batch's linear ids do not match the table's linear ids");
        const std::size_t grain = std::max(ROWS_PER_TASK, (batch.num_unique + BUCKETS - 1) / BUCKETS);  // <= 64 tasks
        parallel_ranges(batch.num_unique, grain, [&](std::size_t begin, std::size_t end) {
            HitCounts::TaskCounts counter = hit_counts_.task_counts(begin / grain);
            u64 counts[2] = {0, 0};  // misses and hits of one table; rows are ordered by table
            for (std::size_t i = begin; i < end; ++i) {
                if (const auto k = i + LINEAR_PREFETCH_DISTANCE; k < end) prefetch(&linear.entry(linear_ids[k]));
                if (refused_lines && refused_lines[i]) {
                    lines[i] = refused_lines[i];
                } else {
                    const u32 line_ref = linear.entry(linear_ids[i]);
                    lines[i] = line_ref ? line_address(get_bucket(hashes[i]), line_ref) : 0;
                    ++counts[line_ref != 0];
                }
                if (i + 1 < end && tables[i + 1] == tables[i]) continue;
                for (const bool hit : {false, true}) {
                    if (!hit) missing += counts[hit];
                    counter.add(tables[i], hit, std::exchange(counts[hit], 0));
                }
            }
        });
    } else {
        const auto& offsets = batch.buckets().bucket_offsets;
        const auto find_bucket = [&, refused_lines, hashes, tables, lines](std::size_t b, const auto& index) {
            const LinePool& line_pool = pools_[b];
            const std::size_t begin = offsets[b], end = offsets[b + 1];
            HitCounts::TaskCounts counter = hit_counts_.task_counts(b);
            std::size_t misses = 0;
            for (std::size_t i = begin; i < end; ++i) {
                if (const auto k = i + PREFETCH_DISTANCE; k < end) index.prefetch_row(hashes[k], tables[k]);
                if (refused_lines && refused_lines[i]) {
                    lines[i] = refused_lines[i];
                    continue;
                }
                const u32 line_ref = index.find(hashes[i], tables[i]);
                lines[i] = line_ref ? line_pool.address(line_ref - 1, shape_.line_bytes) : 0;
                misses += line_ref == 0;
                counter.add(tables[i], line_ref != 0);
            }
            missing += misses;
        };
        parallel_for(BUCKETS, batch.num_unique, [&](std::size_t b) {
            const RowIndex::Reader index = index_.reader(static_cast<u32>(b));
            linear.linearizer.size() ? find_bucket(b, index) : find_bucket(b, index.hashed);
        });
    }
    return missing;
}

std::size_t FullTable::gather_rows(const u64* keys, std::size_t n, u64 max_id, float* out) {
    const std::lock_guard lock(mutex_);
    u64 hashes[GATHER_LIMIT], lines[GATHER_LIMIT];
    for (std::size_t i = 0; i < n; ++i) {
        hashes[i] = slot_hash(0, keys[i]);
        index_.reader(get_bucket(hashes[i])).prefetch_row(hashes[i], 0);
    }
    u16 first[2 * GATHER_LIMIT] = {};  // a hash table of the distinct ids, each stored as index + 1
    std::size_t unique = 0;
    for (std::size_t i = 0; i < n; ++i) {
        const u32 bucket = get_bucket(hashes[i]), line_ref = index_.reader(bucket).find(hashes[i], 0);
        if (!line_ref || keys[i] > max_id) return 0;
        lines[i] = line_address(bucket, line_ref);
        prefetch_bytes(lines[i], shape_.dim * 4);
        std::size_t slot = hashes[i] % (2 * GATHER_LIMIT);
        while (first[slot] && hashes[first[slot] - 1] != hashes[i]) slot = (slot + 1) % (2 * GATHER_LIMIT);
        unique += first[slot] == 0;
        first[slot] = static_cast<u16>(i + 1);
    }
    for (std::size_t i = 0; i < n; ++i) std::memcpy(out + i * shape_.dim, floats(lines[i]), shape_.dim * 4);
    hit_counts_.task_counts(0).add(0, true, unique);
    return unique;
}

u64 FullTable::insert(u32 bucket, u64 hash, u32 table) {
    index_.reserve(bucket);
    const u32 line_ref = pools_[bucket].allocate(arena_, shape_.line_bytes) + 1;
    index_.insert(bucket, hash, table, line_ref);
    return line_address(bucket, line_ref);
}

void FullTable::insert_missing(Batch& batch, const Layout& layout) {
    if (layout.shape.line_bytes != shape_.line_bytes ||
        std::any_of(batch.tables.data(), batch.tables.data() + batch.num_unique,
                    [&](u32 table) { return table >= layout.num_tables; }))
        throw std::invalid_argument("the layout differs from the table's");
    const std::lock_guard lock(mutex_);
    const BucketOrder& order = batch.buckets();
    const std::size_t before = num_used();
    parallel_for(BUCKETS, batch.num_unique, [&](std::size_t b) {
        const u32 bucket = static_cast<u32>(b);
        for (std::size_t k = order.bucket_offsets[b]; k < order.bucket_offsets[b + 1]; ++k) {
            const std::size_t i = order.row(k);
            if (batch.lines[i]) continue;
            batch.lines[i] = insert(bucket, batch.hashes[i], batch.tables[i]);
            layout.initialise(batch.lines[i], batch.tables[i], batch.key(i));
        }
    });
    num_insertions_ += num_used() - before;
}

void FullTable::read(const RowSpan& rows, bool* is_hit, bool) {
    const Timer timer(read_times_);
    const std::lock_guard lock(mutex_);
    for_each_bucket(rows, [&](u32 bucket, std::size_t begin, std::size_t end) {
        const RowIndex::Reader index = index_.reader(bucket);
        HitCounts::TaskCounts counter = hit_counts_.task_counts(bucket);
        for (std::size_t i = begin; i < end; ++i) {
            if (const auto k = i + PREFETCH_DISTANCE; k < end) index.prefetch_row(rows.hashes[k], rows.tables[k]);
            const u32 line_ref = index.find(rows.hashes[i], rows.tables[i]);
            is_hit[i] = line_ref != 0 && row_counters(line_address(bucket, line_ref), shape_)->updates > 0;
            counter.add(rows.tables[i], is_hit[i]);
            if (is_hit[i]) copy_line(THREAD, rows.lines[i], line_address(bucket, line_ref), shape_);
        }
    });
    bytes_out_ += static_cast<u64>(std::count(is_hit, is_hit + rows.n, true)) * compute_stored_bytes(shape_.width);
}

void FullTable::write(const RowSpan& rows) {
    const Timer timer(write_times_);
    const std::lock_guard lock(mutex_);
    const std::size_t before = num_used();
    for_each_bucket(rows, [&](u32 bucket, std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) {
            const RowIndex::Reader index = index_.reader(bucket);  // read again, because an insert may replace the map
            if (const auto k = i + PREFETCH_DISTANCE; k < end) index.prefetch_row(rows.hashes[k], rows.tables[k]);
            const u32 line_ref = index.find(rows.hashes[i], rows.tables[i]);
            const u64 line = line_ref ? line_address(bucket, line_ref) : insert(bucket, rows.hashes[i], rows.tables[i]);
            copy_line(THREAD, line, rows.lines[i], shape_);
        }
    });
    num_insertions_ += num_used() - before;
    bytes_in_ += rows.n * compute_stored_bytes(shape_.width);
}

void FullTable::erase(const RowSpan& rows) {
    const std::lock_guard lock(mutex_);
    for_each_bucket(rows, [&](u32 bucket, std::size_t begin, std::size_t end) {
        const RowIndex::Reader index = index_.reader(bucket);
        std::vector<u32> erased;
        for (std::size_t i = begin; i < end; ++i) {
            if (const auto k = i + PREFETCH_DISTANCE; k < end) index.prefetch_row(rows.hashes[k], rows.tables[k]);
            const u32 line_ref = index_.erase(bucket, rows.hashes[i], rows.tables[i]);
            if (line_ref == 0) continue;
            prefetch_to_write(line_address(bucket, line_ref), shape_.line_bytes);
            erased.push_back(line_ref);
        }
        for (const u32 line_ref : erased) pools_[bucket].release(line_ref - 1, shape_);
    });
}

std::optional<FullTable::Location> FullTable::locate(u32 table, u64 key) const {
    const std::lock_guard lock(mutex_);
    const u64 hash = slot_hash(table, key);
    const u32 line_ref = index_.reader(get_bucket(hash)).find(hash, table);
    if (!line_ref) return std::nullopt;
    return Location{line_ref - 1, *row_counters(line_address(get_bucket(hash), line_ref), shape_)};
}

std::vector<TableRow> FullTable::list_rows_locked(u32 bucket) const {
    std::vector<TableRow> rows;
    rows.reserve(pools_[bucket].num_used());
    index_.for_each(bucket, [&](u32 table, u64 key, u32 line_ref) {
        rows.push_back({key, line_address(bucket, line_ref), table});
    });
    return rows;
}

std::vector<TableRow> FullTable::list_rows(u32 bucket) const {
    const std::lock_guard lock(mutex_);
    return list_rows_locked(bucket);
}

std::vector<u8> FullTable::scan(u32 bucket) const {
    const std::lock_guard lock(mutex_);
    std::vector<TableRow> rows = list_rows_locked(bucket);
    std::sort(rows.begin(), rows.end());
    std::vector<u8> packed(rows.size() * packed_row_bytes(shape_.width));
    u8* out = packed.data();
    for (std::size_t i = 0; i < rows.size(); ++i) {
        if (i + PREFETCH_DISTANCE < rows.size()) prefetch_bytes(rows[i + PREFETCH_DISTANCE].line, shape_.line_bytes);
        if (row_counters(rows[i].line, shape_)->updates > 0)
            out = pack_row(out, rows[i].table, rows[i].key, floats(rows[i].line), shape_);
    }
    packed.resize(static_cast<std::size_t>(out - packed.data()));
    return packed;
}

Metrics FullTable::metrics() const {
    const std::lock_guard lock(mutex_);
    const auto [hits, misses] = hit_counts_.totals();
    Metrics metrics{{{"hits", hits},
                     {"misses", misses},
                     {"insertions", num_insertions_},
                     {"bytes_in", bytes_in_},
                     {"bytes_out", bytes_out_},
                     {"resident_rows", num_used()},
                     {"bytes", arena_.bytes() + index_.bytes()}},
                    {}};
    metrics.add("fetch", read_times_);
    metrics.add("write", write_times_);
    return metrics;
}

std::vector<u64> FullTable::hit_counts() const {
    const std::lock_guard lock(mutex_);
    return hit_counts_.sums();
}

std::size_t FullTable::num_used() const {
    std::size_t total = 0;
    for (const LinePool& pool : pools_) total += pool.num_used();
    return total;
}

}  // namespace tierbed
