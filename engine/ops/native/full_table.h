// Every row in memory: an index per bucket, lines in segments that double in size and never move.
#pragma once
#include <array>
#include <vector>

#include "../kernels/table.h"
#include "batch.h"
#include "line_memory.h"

namespace tierbed {

// Lines numbered from 0. Segment k holds BASE << k of them, so growing moves none and wastes no resident memory.
class Lines {
public:
    explicit Lines(u32 line_bytes) : line_bytes_(line_bytes) {}

    u64 address(u32 row) const {
        const u64 r = static_cast<u64>(row) + BASE;
        const u32 segment = 63 - static_cast<u32>(__builtin_clzll(r)) - BASE_BITS;
        return segments_[segment].start + (r - (static_cast<u64>(BASE) << segment)) * line_bytes_;
    }
    u32 append();
    u32 size() const { return size_; }
    std::size_t bytes() const;

private:
    static constexpr u32 BASE_BITS = 8, BASE = 1u << BASE_BITS;
    struct Segment {
        LineMemory memory;
        u64 start;
    };
    u32 line_bytes_;
    u32 size_ = 0;
    std::vector<Segment> segments_;
};

class FullTable {
public:
    explicit FullTable(const Layout& layout);
    FullTable(const FullTable&) = delete;

    std::size_t find(Batch& batch) const;
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
    struct Bucket {
        explicit Bucket(u32 line_bytes) : lines(line_bytes) {}
        std::vector<Slot> slots;
        Lines lines;
        IndexView view() { return {slots.data(), static_cast<u32>(slots.size() - 1)}; }
        IndexView view() const { return const_cast<Bucket*>(this)->view(); }
        u64 insert(u32 table, u64 key);
        void reserve(std::size_t more);
    };

    LineShape shape_;
    std::vector<Bucket> buckets_;
};

}  // namespace tierbed
