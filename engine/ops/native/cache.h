// A set-associative write-back cache of lines: which rows are up, which are pinned, which are dirty, and who gives way.
//
// It moves nothing itself. `admit` makes room and says what must happen: write the dirty victims down, then fetch the
// misses. Until then the victims' lines are intact, so a failed write-back can be cancelled without loss.
#pragma once
#include <vector>

#include "../kernels/cache.h"
#include "batch.h"
#include "memory.h"

namespace tierbed {

struct Admission {
    std::vector<u64> lines;          // [n], where each row is or shall be; 0 where its set had no room
    std::vector<u8> hit;             // [n]
    std::vector<u32> victim_tables;  // dirty rows that gave way
    std::vector<u64> victim_keys, victim_lines;

    struct Displaced {
        u32 slot;
        Way before;
    };
    std::vector<u32> slots;  // [n], NONE where there was no room
    std::vector<Displaced> displaced;
};

struct CacheCounts {
    u64 hits = 0, misses = 0, evictions_clean = 0, evictions_dirty = 0, overflows = 0;
};

class Cache {
public:
    Cache(const Layout& layout, std::size_t budget_bytes);
    Cache(const Cache&) = delete;

    // Pins each row, present or to be fetched. Rows (table, key) are distinct.
    Admission admit(const u32* tables, const u64* keys, std::size_t n);
    // Ends the pins of an admission whose lines were fetched.
    void release(const Admission& admission, bool dirty);
    // Undoes an admission. With `restore` the victims were not written down and come back; without, their slots become
    // free.
    void cancel(const Admission& admission, bool restore);
    // lines [n]: where each row is, 0 where it is not up. Changes nothing.
    void find(const u32* tables, const u64* keys, u64* lines, std::size_t n) const;

    void dirty(std::vector<u32>& tables, std::vector<u64>& keys, std::vector<u64>& lines) const;
    void mark_clean();

    CacheCounts counts;
    std::size_t capacity() const { return ways_.size(); }
    std::size_t used() const;
    std::size_t bytes() const { return ways_.size() * (shape_.line_bytes + sizeof(Way)); }

private:
    u32 set_of(u64 hash) const;
    u64 line_of(u32 slot) const { return memory_.start() + static_cast<u64>(slot) * shape_.line_bytes; }
    template <class Body>
    void for_each_bucket(const Body& body) const;

    LineShape shape_;
    std::vector<Way> ways_;
    Pages memory_;
    u32 sets_, tick_ = 0;
};

}  // namespace tierbed
