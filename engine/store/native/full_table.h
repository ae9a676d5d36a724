// The full table: all rows in memory, an index per bucket, and lines in segments that double in size and never move.
#pragma once
#include <array>
#include <mutex>
#include <optional>
#include <vector>

#include "ops/native/batch.h"
#include "ops/native/histogram.h"
#include "ops/native/layout.h"
#include "ops/native/memory.h"
#include "rows.h"
#include "tier.h"

namespace tierbed {

// The index of rows with linear ids (tables with `num_embeddings`). An array holds each linear id's line_ref: the row's
// line index + 1, or 0 if the row is absent. Threads may change different buckets at the same time.
class LinearIdIndex {
public:
    explicit LinearIdIndex(const IdLinearizer& linearizer) : linearizer(linearizer) {
        const std::size_t bytes = linearizer.size() * sizeof(u32);
        if (bytes) entries_ = Pages(bytes, bytes <= MAX_HUGE);
    }

    const IdLinearizer linearizer;

    u32& entry(u32 linear_id) const { return reinterpret_cast<u32*>(entries_.start())[linear_id]; }
    // Returns the array entry of the row; null if its id has no number.
    u32* find_entry(u64 hash, u32 table) const {
        if (linearizer.size() == 0) return nullptr;
        const u64 key = get_key(table, hash);
        return linearizer.contains(table, key) ? &entry(linearizer.linearize(table, key)) : nullptr;
    }
    void insert(u32 bucket, u32* entry, u32 line_ref);

    // Calls body(table, key, line_ref) for all rows in a bucket, in any order.
    template <class Body>
    void for_each(u32 bucket, const Body& body) const {
        const std::vector<u32>& ids = linear_ids_[bucket];
        for (u32 i = 0; i < ids.size(); ++i) {
            if (ids[i] == NONE || entry(ids[i]) != i + 1) continue;
            const u32 table = linearizer.find_table(ids[i]);
            body(table, linearizer.find_key(ids[i], table), i + 1);
        }
    }
    std::size_t bytes() const;

private:
    static constexpr std::size_t MAX_HUGE = std::size_t{64} << 20;  // larger arrays avoid huge pages, to save memory

    Pages entries_;                                     // u32 [linear ids]
    std::array<std::vector<u32>, BUCKETS> linear_ids_;  // [bucket][line]: linear id of the row that last used the line
};

// The index of the full table: an array for linear ids, and a hash map per bucket for other ids. Threads may change
// different buckets at the same time.
class RowIndex {
public:
    explicit RowIndex(const IdLinearizer& linearizer) : linear_(linearizer) {}

    const LinearIdIndex& linear() const { return linear_; }

    // Finds the hashed rows in a bucket. A reader is valid until the bucket changes.
    struct HashedReader {
        IndexView slots;

        // Returns the row's line_ref, or 0 if the row is absent.
        u32 find(u64 hash, u32 table) const { return find_value(THREAD, slots, hash, table); }
        TIERBED_INLINE void prefetch_row(u64 hash, u32) const { prefetch(&slots.slots[get_home_slot(slots, hash)]); }
    };
    // Finds all rows in a bucket.
    struct Reader {
        HashedReader hashed;
        const LinearIdIndex& linear;

        u32 find(u64 hash, u32 table) const {
            const u32* const entry = linear.find_entry(hash, table);
            return entry ? *entry : hashed.find(hash, table);
        }
        TIERBED_INLINE void prefetch_row(u64 hash, u32 table) const {
            const u32* const entry = linear.find_entry(hash, table);
            entry ? prefetch(entry) : hashed.prefetch_row(hash, table);
        }
    };
    Reader reader(u32 bucket) const { return {{hashed_[bucket].view()}, linear_}; }

    // Allocates memory for one more row.
    void reserve(u32 bucket) { reserve_rows(hashed_[bucket], bucket, hashed_[bucket].size() + 1); }
    // The row must be absent, and `reserve` must have made room.
    void insert(u32 bucket, u64 hash, u32 table, u32 line_ref) {
        u32* const entry = linear_.find_entry(hash, table);
        entry ? linear_.insert(bucket, entry, line_ref) : hashed_[bucket].insert(hash, table, line_ref);
    }
    // Returns the row's line_ref, or 0 if the row is absent.
    u32 erase(u32 bucket, u64 hash, u32 table) {
        u32* const entry = linear_.find_entry(hash, table);
        return entry ? std::exchange(*entry, 0u) : hashed_[bucket].erase(hash, table);
    }

    // Calls body(table, key, line_ref) for all rows of a bucket, in any order.
    template <class Body>
    void for_each(u32 bucket, const Body& body) const {
        linear_.for_each(bucket, body);
        hashed_[bucket].for_each([&](const Slot& s) { body(s.table, get_key(s.table, s.hash), s.value); });
    }
    std::size_t bytes() const { return linear_.bytes() + sum_bytes(hashed_); }

private:
    LinearIdIndex linear_;
    std::array<RowMap, BUCKETS> hashed_;
};

// Lines, numbered from 0. Segment k has BASE << k lines, so growing moves no line and wastes no resident memory. Free
// lines are reused first, and form a linked list: a free line's first word is the next free line.
class LinePool {
public:
    u64 address(u32 line_index, u32 line_bytes) const {
        const u64 offset = static_cast<u64>(line_index) + BASE;
        const u32 segment = 63 - static_cast<u32>(__builtin_clzll(offset)) - BASE_BITS;
        return segments_[segment] + (offset - (static_cast<u64>(BASE) << segment)) * line_bytes;
    }
    u32 allocate(Arena& arena, u32 line_bytes);
    // Resets the line's counters, so that the row counts as never updated.
    void release(u32 line_index, const LineShape& shape);
    u32 num_lines() const { return num_lines_; }  // includes free lines
    u32 num_used() const { return num_lines_ - num_free_; }

private:
    static constexpr u32 BASE_BITS = 4, BASE = 1u << BASE_BITS;
    std::array<u64, 32 - BASE_BITS> segments_;
    u32 num_lines_ = 0, num_segments_ = 0;  // how many lines and segments exist
    u32 num_free_ = 0, first_free_ = 0;     // how many lines are free; the first free line, as index + 1
};

// A row and its line. The line does not change until the row is erased.
struct TableRow {
    u64 key, line;
    u32 table;
    bool operator<(const TableRow& other) const { return table != other.table ? table < other.table : key < other.key; }
};

class FullTable : public Tier {
public:
    explicit FullTable(const Layout& layout);
    FullTable(const FullTable&) = delete;

    // Sets the batch's lines, 0 for missing rows. Returns how many rows are missing. Skips refused rows.
    std::size_t look_up_rows(Batch& batch);
    static constexpr std::size_t GATHER_LIMIT = 256;
    // Copies the float32 embeddings of n <= GATHER_LIMIT ids in table 0 to `out` [n, dim]. Counts hits too.
    // Returns the number of distinct ids, or 0 with `out` undefined if a row is missing or an id is above `max_id`.
    std::size_t gather_rows(const u64* keys, std::size_t n, u64 max_id, float* out);
    void insert_missing(Batch& batch, const Layout& layout);
    void read(const RowSpan& rows, bool* is_hit, bool should_touch) override;
    void write(const RowSpan& rows) override;
    void erase(const RowSpan& rows) override;
    bool is_on_disk() const override { return false; }

    // A row's line index within its bucket, and the row's counters. `locate` counts no hit.
    struct Location {
        u32 line_index;
        RowCounters counters;
    };
    std::optional<Location> locate(u32 table, u64 key) const;

    // Returns all rows in a bucket in any order, including rows with updates = 0.
    std::vector<TableRow> list_rows(u32 bucket) const;
    // Returns a bucket's rows with updates > 0, packed (row_dtype) and sorted by (table, key).
    std::vector<u8> scan(u32 bucket) const;
    Metrics metrics() const;
    // Returns hits and misses of each table [tables, 2].
    std::vector<u64> hit_counts() const;
    const LineShape& shape() const { return shape_; }

private:
    u64 line_address(u32 bucket, u32 line_ref) const { return pools_[bucket].address(line_ref - 1, shape_.line_bytes); }
    u64 insert(u32 bucket, u64 hash, u32 table);
    std::vector<TableRow> list_rows_locked(u32 bucket) const;
    std::size_t num_used() const;  // lines in use

    LineShape shape_;
    Arena arena_;
    RowIndex index_;
    std::array<LinePool, BUCKETS> pools_;
    u64 num_insertions_ = 0;              // how many rows got a line
    u64 bytes_in_ = 0, bytes_out_ = 0;    // bytes that the tier above wrote and read
    Histogram read_times_, write_times_;  // call latencies
    HitCounts hit_counts_;
    mutable std::mutex mutex_;  // needed because a cache above the table uses several threads
};

}  // namespace tierbed
