// An image of a full table, or of a list of rows: the rows as they were when the image was made. Buckets are read one by
// one while the table changes. Before a row first changes, its before-image is saved. Reading the row's bucket frees the
// before-image. So a row without a before-image is unchanged in the table.
#pragma once
#include <array>
#include <utility>
#include <vector>

#include "changed_rows.h"
#include "full_table.h"
#include "rows.h"

namespace tierbed {

// Not thread-safe, but `sort_bucket` may run while before-images are saved. Must not outlive the table or `top_tier`.
// `top_tier` has the latest rows: the table itself, or a cache above the table.
class TableImage {
public:
    TableImage(const FullTable& table, const Layout& layout, Tier& top_tier)
        : table_(&table), top_tier_(top_tier), shape_(layout.shape) {}
    // changed: the image's rows, sorted. The list must not change.
    TableImage(ChangedRows& changed, const Layout& layout, Tier& top_tier)
        : changed_(&changed), top_tier_(top_tier), shape_(layout.shape) {}
    TableImage(const TableImage&) = delete;

    // Call before a batch's lines are written.
    void save_before_images(const Batch& batch);
    // Call before distinct rows are erased.
    void save_before_images(const u32* tables, const u64* keys, std::size_t n);
    std::size_t before_image_bytes() const;

    // To read a bucket, call `open_bucket`, then `sort_bucket`, then `read_next` until it returns 0. Read buckets in
    // ascending order. `sort_bucket` and `read_next` take most of the time.
    void open_bucket(u32 bucket);
    void sort_bucket();
    std::size_t read_next(u8* out, std::size_t max_rows);
    // Returns the keys, among those that `read_next` passed since the last call, of listed rows that did not exist.
    RowKeys take_missing_keys() { return std::exchange(missing_, {}); }

    u32 width() const { return shape_.width; }

private:
    static constexpr u32 ABSENT = 0xFFFFFFFFu;  // index entry of a row that the image does not have

    struct BeforeImages {
        RowMap index;          // maps a row to p + 1, where p is its position in `rows`
        std::vector<u8> rows;  // packed
    };

    // True if the row was read already, or does not belong to the image.
    bool is_unneeded(u32 bucket, u64 hash, u32 table) const;
    // Copies listed rows from the table, from the next row on, to `memory`. Sets their `line`.
    void read_listed_rows(std::size_t max_rows, Buffer<u8>& memory);
    // stored: the row's values and counters; null if the row was not in the table.
    void save_before_image(u32 bucket, u64 hash, u32 table, const void* stored);

    const FullTable* const table_ = nullptr;  // null if the image has listed rows
    ChangedRows* const changed_ = nullptr;    // null if the image has all rows
    Tier& top_tier_;
    LineShape shape_;
    std::array<BeforeImages, BUCKETS> before_images_;
    std::vector<TableRow> rows_;  // the current bucket's rows; `line` is 0 if the row is not in the table
    RowKeys missing_;
    std::size_t next_ = 0;        // the next row to read
    u32 bucket_ = 0;
    bool has_rows_ = false;
};

}  // namespace tierbed
