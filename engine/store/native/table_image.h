// The rows of a full table as they were at one instant, read bucket by bucket while they change.
//
// Before a row that was not read yet changes for the first time, what it was is kept aside, for as long as its bucket
// is not read. So a row that nobody kept is in the table as it was.
#pragma once
#include <array>
#include <vector>

#include "full_table.h"
#include "rows.h"

namespace tierbed {

// Nothing is safe in several threads but `sort` beside `keep`. The table must outlive it, and `top`, which has the rows
// as they are: the table itself or a cache over it.
class TableImage {
public:
    TableImage(const FullTable& table, const Layout& layout, Tier& top)
        : table_(table), top_(top), shape_(layout.shape) {}
    TableImage(const TableImage&) = delete;

    // The lines of a batch will be written.
    void keep(const Batch& batch);
    // Distinct rows will be erased.
    void keep(const u32* tables, const u64* keys, std::size_t n);
    // What that takes.
    std::size_t kept_bytes() const;

    // Reading is of each bucket, ascending: `list`, then `sort`, which takes the most time but for `next`, then `next`
    // until it packs no more rows.
    void list(u32 bucket);
    void sort();
    std::size_t next(u8* out, std::size_t max_rows);

    u32 width() const { return shape_.width; }

private:
    static constexpr u32 ABSENT = 0xFFFFFFFFu;  // in the index: there was no such row

    struct Kept {
        RowMap index;          // the place in `rows` + 1
        std::vector<u8> rows;  // packed
    };

    bool is_read(u32 bucket, u64 hash, u32 table) const;
    // `stored`: what a row was, null where there was none.
    void keep(u32 bucket, u64 hash, u32 table, const void* stored);

    const FullTable& table_;
    Tier& top_;
    LineShape shape_;
    std::array<Kept, BUCKETS> kept_;
    std::vector<HeldRow> rows_;  // of the bucket that is read; line 0 where a row was kept and is no longer there
    std::size_t at_ = 0;         // the next of them
    u32 bucket_ = 0;
    bool listed_ = false;
};

}  // namespace tierbed
