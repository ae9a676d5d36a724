// Packed rows, and lists and maps of rows. NumPy and snapshots use packed rows: table u32, key u64, values float32
// [width], updates u32, step u32, little-endian without padding.
#pragma once
#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <utility>
#include <vector>

#include "ops/kernels/hash.h"
#include "ops/kernels/line.h"
#include "ops/kernels/portable.h"
#include "ops/native/batch.h"
#include "ops/native/layout.h"
#include "ops/native/memory.h"
#include "store/kernels/index.h"
#include "tier.h"

namespace tierbed {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "rows are stored little-endian");

inline std::size_t packed_row_bytes(u32 width) { return sizeof(u32) + sizeof(u64) + compute_stored_bytes(width); }

// Writes a packed row to `out` and returns the row's end. stored: values and counters, as in a line.
inline u8* pack_row(u8* out, u32 table, u64 key, const void* stored, const LineShape& shape) {
    std::memcpy(out, &table, sizeof table);
    std::memcpy(out + sizeof table, &key, sizeof key);
    std::memcpy(out + sizeof table + sizeof key, stored, compute_stored_bytes(shape.width));
    return out + packed_row_bytes(shape.width);
}

// Keys of distinct rows, in ascending order of buckets.
struct RowKeys {
    std::vector<u32> tables;
    std::vector<u64> keys;

    void add(u32 table, u64 key) {
        tables.push_back(table);
        keys.push_back(key);
    }
};

// Rows from Python's arrays, hashed and sorted by bucket as tiers need them. `lines` may be null.
class HashedRows {
public:
    HashedRows(const u32* tables, const u64* keys, const u64* lines, std::size_t n)
        : grouped_(group_by_bucket(tables, keys, n)), tables_(n), hashes_(n), lines_(lines ? n : 0) {
        for (std::size_t i = 0; i < n; ++i) {
            const Entry& entry = grouped_.entries[i];
            tables_[i] = entry.table;
            hashes_[i] = entry.hash;
            if (lines) lines_[i] = lines[entry.position];
        }
    }
    RowSpan rows() const { return {tables_.data(), hashes_.data(), lines_.data(), tables_.size()}; }
    // Returns the position of row i in Python's arrays.
    std::size_t position(std::size_t i) const { return grouped_.entries[i].position; }

private:
    BucketedRows grouped_;
    Buffer<u32> tables_;
    Buffer<u64> hashes_, lines_;
};

// Collects rows one at a time for a call to a tier.
class RowList {
public:
    void add(u32 table, u64 hash, u64 line) { list_.push_back({hash, line, table}); }
    void clear() { list_.clear(); }
    std::size_t size() const { return list_.size(); }

    // Returns the rows by bucket, in the order of `add` within a bucket. Valid until the list changes.
    RowSpan rows() {
        const auto is_less = [](const Row& a, const Row& b) { return get_bucket(a.hash) < get_bucket(b.hash); };
        if (!std::is_sorted(list_.begin(), list_.end(), is_less)) std::stable_sort(list_.begin(), list_.end(), is_less);
        tables_.clear(), hashes_.clear(), lines_.clear();
        for (const Row& row : list_) {
            tables_.push_back(row.table);
            hashes_.push_back(row.hash);
            lines_.push_back(row.line);
        }
        return {tables_.data(), hashes_.data(), lines_.data(), list_.size()};
    }

private:
    struct Row {
        u64 hash, line;
        u32 table;
    };

    std::vector<Row> list_;
    std::vector<u32> tables_;
    std::vector<u64> hashes_, lines_;
};

// Maps rows to nonzero values: an open-addressing hash table that doubles as it fills. Concurrent reads are safe.
class RowMap {
public:
    static constexpr std::size_t MAX_ROW_BYTES = (8 * sizeof(Slot) + 2) / 3;  // if slots double at a load of 3/4

    // Returns the row's value, or 0 if the row is absent.
    u32 find(u64 hash, u32 table) const { return find_value(THREAD, view(), hash, table); }

    // Returns a pointer to the row's value (never set it to 0), or null if absent. Valid until the map changes.
    u32* find_mutable(u64 hash, u32 table) {
        Slot& slot = find_slot(hash, table);
        return slot.value ? &slot.value : nullptr;
    }

    // Allocates memory for `rows` rows in all, so that `insert` cannot fail.
    void reserve(std::size_t rows) {
        if (rows * 4 <= num_slots() * 3) return;
        std::size_t size = std::max<std::size_t>(num_slots(), 16);
        while (rows * 4 > size * 3) size *= 2;
        if (size > std::size_t{1} << 31) throw std::length_error("a map of rows is full: 2^31 slots");
        RowMap larger;
        larger.slots_ = Pages(size * sizeof(Slot));
        larger.view_ = {reinterpret_cast<Slot*>(larger.slots_.start()), static_cast<u32>(size - 1)};
        for_each([&](const Slot& slot) { insert_row(larger.view_, slot); });
        std::swap(slots_, larger.slots_);
        std::swap(view_, larger.view_);
    }
    // Adds the row if it is absent.
    void insert(u64 hash, u32 table, u32 value) {
        reserve(num_rows_ + 1);
        Slot& slot = find_slot(hash, table);
        if (slot.value) return;
        slot = {hash, table, value};
        ++num_rows_;
    }

    // Returns the row's value, or 0 if it was absent.
    u32 erase(u64 hash, u32 table) {
        const u32 value = erase_row(view(), hash, table);
        num_rows_ -= value != 0;
        return value;
    }

    TIERBED_INLINE void prefetch_slot(u64 hash) const { prefetch(&view().slots[get_home_slot(view(), hash)]); }
    template <class Body>
    void for_each(const Body& body) const {
        for (std::size_t i = 0; i < num_slots(); ++i)
            if (const Slot& slot = view().slots[i]; slot.value) body(slot);
    }
    std::size_t size() const { return num_rows_; }
    std::size_t bytes() const { return slots_.size(); }
    // Valid until the map changes.
    const IndexView& view() const { return view_; }

private:
    std::size_t num_slots() const { return slots_.size() / sizeof(Slot); }

    // Returns the row's slot, or the free slot at the end of its probe sequence.
    Slot& find_slot(u64 hash, u32 table) {
        const IndexView index = view();
        u32 position = get_home_slot(index, hash);
        for (;; position = (position + 1) & index.mask) {
            Slot& slot = index.slots[position];
            if (slot.value == 0 || (slot.hash == hash && slot.table == table)) return slot;
        }
    }

    static inline Slot empty_slot_{};  // the only slot of an empty map; never written
    Pages slots_;                      // zeroed memory; a page becomes resident when it is first written
    IndexView view_{&empty_slot_, 0};  // a view of `slots_`
    std::size_t num_rows_ = 0;
};

// Reserves memory in a bucket's map. Buckets fill evenly, and would all grow in the same step. So each bucket grows at
// a different load, from 1/2 in the first bucket to 3/4 in the last.
inline void reserve_rows(RowMap& map, u32 bucket, std::size_t rows) {
    map.reserve(rows * 3 * BUCKETS / (2 * BUCKETS + bucket));
}

inline std::size_t sum_bytes(const std::array<RowMap, BUCKETS>& maps) {
    return std::accumulate(maps.begin(), maps.end(), std::size_t{0},
                           [](std::size_t total, const RowMap& map) { return total + map.bytes(); });
}

}  // namespace tierbed
