// The full table: every row in memory, an index per bucket, lines in segments that double in size and never move.
#pragma once
#include <array>
#include <mutex>
#include <optional>
#include <vector>

#include "ops/native/batch.h"
#include "ops/native/histogram.h"
#include "ops/native/layout.h"
#include "ops/native/memory.h"
#include "store/kernels/index.h"
#include "tier.h"

namespace tierbed {

// The index of rows whose ids have numbers: an array of the row's line + 1, or 0. Several threads may change different
// buckets.
class NumberIndex {
public:
    explicit NumberIndex(const Numbering& all) : numbering(all) {
        const std::size_t bytes = all.size() * sizeof(u32);
        if (bytes) lines_ = Pages(bytes, bytes <= MAX_HUGE);
    }

    const Numbering numbering;

    u32& line(u32 number) const { return reinterpret_cast<u32*>(lines_.start())[number]; }
    // That of a row's number; null if the row's id has none.
    u32* line_of(u64 hash, u32 table) const {
        if (numbering.size() == 0) return nullptr;
        const u64 key = key_of(table, hash);
        return numbering.has(table, key) ? &line(numbering.number(table, key)) : nullptr;
    }
    // place: what `line_of` returned.
    void insert(u32 bucket, u32* place, u32 line);

    // Calls body(table, key, line + 1) for every row of a bucket, in no order.
    template <class Body>
    void for_each(u32 bucket, const Body& body) const {
        const std::vector<u32>& numbers = numbers_[bucket];
        for (u32 i = 0; i < numbers.size(); ++i) {
            if (numbers[i] == NONE || line(numbers[i]) != i + 1) continue;
            const u32 table = numbering.table_of(numbers[i]);
            body(table, numbering.key_of(numbers[i], table), i + 1);
        }
    }
    std::size_t bytes() const;

private:
    static constexpr std::size_t MAX_HUGE = std::size_t{64} << 20;  // bytes that few rows may make resident

    Pages lines_;                                    // of u32 [numbers]
    std::array<std::vector<u32>, BUCKETS> numbers_;  // of each line of a bucket, that of its latest row
};

// The index of the full table: an array for ids that have numbers, and for others an open-addressing hash table per
// bucket, all of one size and in one block of memory.
//
// The hash tables grow step by step: new rows go to larger ones, and every batch and insertion moves a few slots of the
// old ones, which are searched until all slots are moved. So no step has to move the whole table, except one that
// inserts more rows than the index had.
class Index {
public:
    explicit Index(const Numbering& numbering) : numbered_(numbering), current_(SMALLEST) {}

    const NumberIndex& numbered() const { return numbered_; }

    // The slots of a bucket, valid until it changes. Several threads may use it.
    struct Reader {
        IndexView current, old;
        bool moving;
        const NumberIndex& numbered;

        // The row's number + 1, or 0.
        u32 find(u64 hash, u32 table) const {
            const u32* const line = numbered.line_of(hash, table);
            return line ? *line : find_hashed(hash, table);
        }
        // The same for an id without a number.
        u32 find_hashed(u64 hash, u32 table) const {
            u32 row = find_row(THREAD, current, hash, table);
            if (row || !moving) return row;
            row = find_row(THREAD, old, hash, table);
            return row == ERASED ? 0 : row;
        }
        // Whether a hash table would take a slot for the row.
        bool needs_slot(u64 hash, u32 table) const {
            return !numbered.line_of(hash, table) && find_hashed(hash, table) == 0;
        }
        TIERBED_INLINE void prefetch_row(u64 hash, u32 table) const {
            if (const u32* const line = numbered.line_of(hash, table))
                prefetch(line);
            else
                prefetch_slot(hash);
        }
        TIERBED_INLINE void prefetch_slot(u64 hash) const {
            prefetch(&current.slots[home_slot(current, hash)]);
            if (moving) prefetch(&old.slots[home_slot(old, hash)]);
        }
    };
    Reader reader(u32 bucket) const {
        return {current_.view(bucket), old_.view(bucket), moved_[bucket] != old_.size, numbered_};
    }

    // Whether there is room for more[b] rows in each bucket b.
    bool has_room(const std::array<std::size_t, BUCKETS>& more) const { return fullest(more) * 4 <= room(); }
    // Grows the hash tables for that many rows more.
    void reserve(const std::array<std::size_t, BUCKETS>& more);
    // The index must not have the row, and must have room. Several threads may change different buckets.
    void insert(u32 bucket, const Slot& slot);
    // Returns the row's number + 1, or 0 if the index lacks it. Several threads may change different buckets.
    u32 erase(u32 bucket, u64 hash, u32 table);
    // Moves that many slots of the bucket to the larger index.
    void move(u32 bucket, u32 slots);
    // Frees the old index once all slots are moved.
    void drop_moved();

    // Calls body(table, key, line + 1) for every row of a bucket, in no order.
    template <class Body>
    void for_each(u32 bucket, const Body& body) const {
        numbered_.for_each(bucket, body);
        const auto give = [&](const Slot& slot) {
            if (slot.row && slot.row != ERASED) body(slot.table, key_of(slot.table, slot.hash), slot.row);
        };
        for (u32 i = 0; i < current_.size; ++i) give(current_.view(bucket).slots[i]);
        for (u32 i = moved_[bucket]; i < old_.size; ++i) give(old_.view(bucket).slots[i]);
    }
    std::size_t bytes() const { return numbered_.bytes() + current_.pages.size() + old_.pages.size(); }

private:
    std::size_t room() const { return std::size_t{current_.size} * 3; }  // load factor 0.75
    // Rows of the fullest hash table once more[b] rows are added to each bucket b.
    std::size_t fullest(const std::array<std::size_t, BUCKETS>& more) const;

    static constexpr u32 SMALLEST = 16;         // slots
    static constexpr u32 MOVES = 4;             // slots of the old index that an insertion moves; 4/3 is enough
    static constexpr u32 ERASED = 0xFFFFFFFFu;  // in a slot of the old index, whose rows stay where they are

    struct Generation {
        Generation() = default;
        explicit Generation(u32 slots) : pages(std::size_t{BUCKETS} * slots * sizeof(Slot)), size(slots) {}
        IndexView view(u32 bucket) const {
            return {reinterpret_cast<Slot*>(pages.start()) + std::size_t{bucket} * size, size - 1};
        }
        Pages pages;
        u32 size = 0;  // slots a bucket
    };

    NumberIndex numbered_;
    std::array<std::size_t, BUCKETS> hashed_{};  // rows
    Generation current_, old_;
    std::array<u32, BUCKETS> moved_{};  // slots of the old index that were moved
};

// Lines, numbered from 0. Segment k has BASE << k of them, so growing moves no line and wastes no resident memory. Free
// lines are reused first; they are linked by their first words.
class Lines {
public:
    u64 address(u32 row, u32 line_bytes) const {
        const u64 r = static_cast<u64>(row) + BASE;
        const u32 segment = 63 - static_cast<u32>(__builtin_clzll(r)) - BASE_BITS;
        return segments_[segment] + (r - (static_cast<u64>(BASE) << segment)) * line_bytes;
    }
    u32 take(Arena& arena, u32 line_bytes);
    // Its record becomes that of a row that was never updated.
    void give(u32 row, const LineShape& shape);
    u32 size() const { return size_; }  // free ones included
    u32 used() const { return size_ - free_; }

private:
    static constexpr u32 BASE_BITS = 4, BASE = 1u << BASE_BITS;
    std::array<u64, 32 - BASE_BITS> segments_;
    u32 size_ = 0, count_ = 0;       // lines, segments
    u32 free_ = 0, first_free_ = 0;  // free lines; the number + 1 of the first
};

// A row and its line, which does not change until the row is erased.
struct TableRow {
    u64 key, line;
    u32 table;
    bool operator<(const TableRow& other) const { return table != other.table ? table < other.table : key < other.key; }
};

class FullTable : public Tier {
public:
    explicit FullTable(const Layout& layout);
    FullTable(const FullTable&) = delete;

    // Sets the lines of the batch, 0 for missing rows, and returns the number of missing rows. Rows with own lines are
    // not looked up.
    std::size_t find(Batch& batch);
    static constexpr std::size_t FEW = 256;
    // Copies the float32 embeddings of n <= FEW ids of table 0, none beyond `last`, to `out` [n, dim] without a batch.
    // Counts as `find`. Returns how many different ids they are, or 0 if a row is missing: `out` is then undefined.
    std::size_t gather_few(const u64* keys, std::size_t n, u64 last, float* out);
    void insert_missing(Batch& batch, const Layout& layout);
    void read(const RowSpan& rows, bool* found, bool touch) override;
    void write(const RowSpan& rows) override;
    void erase(const RowSpan& rows) override;
    bool on_disk() const override { return false; }

    // The number of a row's line in its bucket, and its record. Counts no hit.
    struct Location {
        u32 line;
        Record record;
    };
    std::optional<Location> locate(u32 table, u64 key) const;

    // The rows of a bucket, those with updates = 0 included, in no order.
    std::vector<TableRow> rows_of(u32 bucket) const;
    // The rows of a bucket with updates > 0, packed (row_dtype) and sorted by (table, key).
    std::vector<u8> scan(u32 bucket) const;
    Metrics metrics() const;
    // [tables, 2], hits and misses of each table
    std::vector<u64> hit_counts() const;
    const LineShape& shape() const { return shape_; }

private:
    u64 line_of(u32 bucket, u32 row) const { return lines_[bucket].address(row - 1, shape_.line_bytes); }
    u64 insert(u32 bucket, u64 hash, u32 table);
    std::vector<TableRow> list(u32 bucket) const;
    std::size_t used() const;  // lines

    LineShape shape_;
    Arena arena_;
    Index index_;
    std::array<Lines, BUCKETS> lines_;
    u64 insertions_ = 0;                // rows that got a line
    u64 bytes_in_ = 0, bytes_out_ = 0;  // that a tier above wrote and read
    Histogram reads_, writes_;          // latencies of its calls
    TableCounts hit_counts_;
    mutable std::mutex mutex_;  // several threads read and write the tier below a cache
};

}  // namespace tierbed
