// The image of a full table: all rows as they are when it is made, read bucket by bucket while the table changes.
//
// Before a row changes for the first time, its before-image is saved, which is freed once its bucket has been read. So
// a row without a before-image is unchanged in the table.
#pragma once
#include <array>
#include <vector>

#include "full_table.h"
#include "rows.h"

namespace tierbed {

// Not thread-safe, except that `sort` may run while before-images are saved. The table must outlive it, and so must
// `top`, which has the latest rows: the table itself or a cache over it.
class TableImage {
public:
    TableImage(const FullTable& table, const Layout& layout, Tier& top)
        : table_(table), top_(top), shape_(layout.shape) {}
    TableImage(const TableImage&) = delete;

    // To be called before the lines of a batch are written.
    void save_before_images(const Batch& batch);
    // To be called before rows, distinct, are erased.
    void save_before_images(const u32* tables, const u64* keys, std::size_t n);
    std::size_t before_image_bytes() const;

    // Reads a bucket: `list`, then `sort`, then `next` until it packs no more rows. Buckets are read in ascending
    // order. Most time is spent in `sort` and `next`.
    void list(u32 bucket);
    void sort();
    std::size_t next(u8* out, std::size_t max_rows);

    u32 width() const { return shape_.width; }

private:
    static constexpr u32 ABSENT = 0xFFFFFFFFu;  // in the index: the table had no such row

    struct BeforeImages {
        RowMap index;          // position in `rows` + 1
        std::vector<u8> rows;  // packed
    };

    bool is_read(u32 bucket, u64 hash, u32 table) const;
    // stored: values and record of the row; null if the table had no such row.
    void save_before_image(u32 bucket, u64 hash, u32 table, const void* stored);

    const FullTable& table_;
    Tier& top_;
    LineShape shape_;
    std::array<BeforeImages, BUCKETS> before_images_;
    std::vector<TableRow> rows_;  // of the bucket that is read; line 0 for rows that have a before-image
    std::size_t at_ = 0;          // of the next row
    u32 bucket_ = 0;
    bool listed_ = false;
};

}  // namespace tierbed
