// Every row in memory: an index per bucket, lines in segments that double in size and never move.
#pragma once
#include <array>
#include <vector>

#include "batch.h"
#include "index.h"
#include "memory.h"

namespace tierbed {

// Lines numbered from 0. Segment k holds BASE << k of them, so growing moves none and wastes no resident memory.
class Lines {
public:
    u64 address(u32 row, u32 line_bytes) const {
        const u64 r = static_cast<u64>(row) + BASE;
        const u32 segment = 63 - static_cast<u32>(__builtin_clzll(r)) - BASE_BITS;
        return segments_[segment] + (r - (static_cast<u64>(BASE) << segment)) * line_bytes;
    }
    u32 append(Arena& arena, u32 line_bytes);
    u32 size() const { return size_; }

private:
    static constexpr u32 BASE_BITS = 4, BASE = 1u << BASE_BITS;
    std::array<u64, 32 - BASE_BITS> segments_;
    u32 size_ = 0, count_ = 0;  // lines, segments
};

class FullTable {
public:
    explicit FullTable(const Layout& layout);
    FullTable(const FullTable&) = delete;

    std::size_t find(Batch& batch);
    void insert_missing(Batch& batch, const Layout& layout);
    void read(const u32* tables, const u64* keys, const u64* lines, bool* found, std::size_t n) const;
    void write(const u32* tables, const u64* keys, const u64* lines, std::size_t n);

    // Rows of a bucket with updates > 0; scan writes them packed (row_dtype) in (table, key) order.
    std::size_t held(u32 bucket) const;
    void scan(u32 bucket, u8* out) const;
    std::size_t rows() const;
    u32 width() const { return shape_.width; }
    std::size_t bytes() const;

private:
    u64 line_of(u32 bucket, u32 row) const { return lines_[bucket].address(row - 1, shape_.line_bytes); }
    u64 insert(u32 bucket, u64 hash, u32 table);
    // Rows of the fullest bucket, with more[bucket] new ones in each.
    std::size_t fullest(const std::array<std::size_t, BUCKETS>& more) const;
    // Makes room for them.
    void reserve(const std::array<std::size_t, BUCKETS>& more);

    LineShape shape_;
    Arena arena_;
    Index index_;
    std::array<Lines, BUCKETS> lines_;
};

}  // namespace tierbed
