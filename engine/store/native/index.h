// Where each row of the full table is: one open-addressing index a bucket, all of the same size in one piece of memory.
//
// Growing is incremental: a larger index takes new rows at once, and every batch and every insertion moves a few slots
// of the old one, which is searched until all of them were moved. So no step pays for the whole table, but for one that
// brings more rows than the index held.
#pragma once
#include <array>

#include "store/kernels/index.h"
#include "lines/native/layout.h"
#include "ops/native/memory.h"

namespace tierbed {

class Index {
public:
    Index() : current_(SMALLEST) {}

    // A bucket as lookups see it, until it changes. May be used in several threads.
    struct Reader {
        IndexView current, old;
        bool moving;

        // The row's number + 1, or 0.
        u32 find(u64 hash, u32 table) const {
            u32 row = find_row(THREAD, current, hash, table);
            if (row || !moving) return row;
            row = find_row(THREAD, old, hash, table);
            return row == ERASED ? 0 : row;
        }
        TIERBED_INLINE void fetch(u64 hash) const {
            prefetch(&current.slots[home_slot(current, hash)]);
            if (moving) prefetch(&old.slots[home_slot(old, hash)]);
        }
    };
    Reader reader(u32 bucket) const { return {current_.view(bucket), old_.view(bucket), moved_[bucket] != old_.size}; }

    bool has_room(std::size_t rows) const { return rows * 4 <= std::size_t{current_.size} * 3; }  // load factor 0.75
    // Makes room for buckets of `rows` rows at most.
    void reserve(std::size_t rows);
    // Puts a row that is not there, where there is room. Buckets may be filled in several threads.
    void insert(u32 bucket, const Slot& slot);
    // Takes a row out: its number + 1, or 0 where it is not there. Buckets may be erased from in several threads.
    u32 erase(u32 bucket, u64 hash, u32 table);
    // Goes on with growing, by that many slots of the bucket.
    void move(u32 bucket, u32 slots);
    // Lets go of the old index where nothing is left to move.
    void drop_moved();

    // Calls body(slot) for every row of a bucket, in no order.
    template <class Body>
    void for_each(u32 bucket, const Body& body) const {
        for (u32 i = 0; i < current_.size; ++i)
            if (const Slot& slot = current_.view(bucket).slots[i]; slot.row) body(slot);
        for (u32 i = moved_[bucket]; i < old_.size; ++i)
            if (const Slot& slot = old_.view(bucket).slots[i]; slot.row && slot.row != ERASED) body(slot);
    }
    std::size_t bytes() const { return current_.pages.size() + old_.pages.size(); }

private:
    static constexpr u32 SMALLEST = 16;         // slots
    static constexpr u32 MOVES = 4;             // slots of the old index moved by one insertion; 4/3 would do
    static constexpr u32 ERASED = 0xFFFFFFFFu;  // row of a slot of the old index: its rows change no places any more

    struct Generation {
        Generation() = default;
        explicit Generation(u32 slots) : pages(std::size_t{BUCKETS} * slots * sizeof(Slot)), size(slots) {}
        IndexView view(u32 bucket) const {
            return {reinterpret_cast<Slot*>(pages.start()) + std::size_t{bucket} * size, size - 1};
        }
        Pages pages;
        u32 size = 0;  // slots a bucket
    };

    Generation current_, old_;
    std::array<u32, BUCKETS> moved_{};  // slots of the old index that are in the current one, too
};

}  // namespace tierbed
