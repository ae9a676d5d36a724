// Which of the announced batches need a row: what look-ahead replacement goes by.
#pragma once
#include <array>
#include <vector>

#include "../kernels/cache_set.h"
#include "../kernels/table.h"
#include "layout.h"

namespace tierbed {

// Batches have numbers; those of the window are fewer than SPAN apart. Buckets may be used by several threads at once.
class Window {
public:
    static constexpr u32 SPAN = 32;

    // Room for that many more rows of the bucket, so that `add` cannot fail.
    void reserve(u32 bucket, std::size_t more);
    void add(u32 bucket, u64 hash, u32 table, u32 number);
    // The row's batch `number` is on: returns the next one that needs it, 0 for none.
    u32 take(u32 bucket, u64 hash, u32 table, u32 number);
    // The first batch after `number` that needs the row, 0 for none.
    u32 next(u32 bucket, u64 hash, u32 table, u32 number) const;
    bool empty(u32 bucket) const { return parts_[bucket].rows == 0; }
    void clear();
    std::size_t bytes() const;

private:
    struct Part {
        std::vector<Slot> slots;  // `row` is a mask of batches, by number modulo SPAN
        std::size_t rows = 0;
        IndexView view() const {
            return {const_cast<Slot*>(slots.data()), static_cast<u32>(slots.size() - 1)};
        }
    };
    static u32 after(u32 mask, u32 number);
    Slot* find(u32 bucket, u64 hash, u32 table) const;

    std::array<Part, BUCKETS> parts_;
};

}  // namespace tierbed
