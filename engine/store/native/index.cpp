#include "index.h"

#include <algorithm>
#include <stdexcept>

#include "workers/native/thread_pool.h"

namespace tierbed {

void Index::reserve(std::size_t rows) {
    if (has_room(rows)) return;
    parallel_for(BUCKETS, [&](std::size_t bucket) { move(static_cast<u32>(bucket), old_.size); });
    std::size_t size = current_.size;
    while (rows * 4 > size * 3) size *= 2;
    if (size > (std::size_t{1} << 31)) throw std::length_error("a bucket of the table is full: 2^31 slots");
    Generation larger(static_cast<u32>(size));
    old_ = std::move(current_);
    current_ = std::move(larger);
    moved_.fill(0);
}

void Index::insert(u32 bucket, const Slot& slot) {
    insert_row(current_.view(bucket), slot);
    move(bucket, MOVES);
}

u32 Index::erase(u32 bucket, u64 hash, u32 table) {
    u32 row = erase_row(current_.view(bucket), hash, table);
    if (moved_[bucket] == old_.size) return row;
    const IndexView old = old_.view(bucket);  // holds it as well, or alone
    for (u32 at = home_slot(old, hash); old.slots[at].row != 0; at = (at + 1) & old.mask) {
        Slot& slot = old.slots[at];
        if (slot.hash != hash || slot.table != table) continue;
        if (row == 0 && slot.row != ERASED) row = slot.row;
        slot.row = ERASED;
        break;
    }
    return row;
}

void Index::move(u32 bucket, u32 slots) {
    const u32 end = std::min(old_.size, moved_[bucket] + std::min(slots, old_.size));
    for (; moved_[bucket] < end; ++moved_[bucket])
        if (const Slot& slot = old_.view(bucket).slots[moved_[bucket]]; slot.row && slot.row != ERASED)
            insert_row(current_.view(bucket), slot);
}

void Index::drop_moved() {
    if (std::any_of(moved_.begin(), moved_.end(), [&](u32 moved) { return moved != old_.size; })) return;
    old_ = Generation();
    moved_.fill(0);
}

}  // namespace tierbed
