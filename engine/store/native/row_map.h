// A map from rows to numbers: open addressing that grows as it fills.
#pragma once
#include <vector>

#include "store/kernels/index.h"
#include "lines/native/layout.h"

namespace tierbed {

// Numbers are not 0. May be read by several threads at once.
class RowMap {
public:
    static constexpr std::size_t MOST_BYTES = (8 * sizeof(Slot) + 2) / 3;  // of a row: slots double when 3/4 are taken

    // The row's number, or 0.
    u32 find(u64 hash, u32 table) const { return slots_.empty() ? 0 : find_row(THREAD, view(), hash, table); }

    // The same, to be changed to another than 0; null where it is 0. Holds until the map changes.
    u32* look_up(u64 hash, u32 table) {
        if (slots_.empty()) return nullptr;
        Slot& slot = place_of(hash, table);
        return slot.row ? &slot.row : nullptr;
    }

    // Makes room, so that `insert` cannot fail until there are that many rows.
    void reserve(std::size_t rows) {
        while (rows * 4 > slots_.size() * 3) grow();
    }
    // The row must not be there.
    void insert(u64 hash, u32 table, u32 number) {
        reserve(rows_ + 1);
        insert_row(view(), Slot{hash, table, number});
        ++rows_;
    }

    // The row is there.
    void erase(u64 hash, u32 table) {
        erase_row(view(), hash, table);
        --rows_;
    }

    TIERBED_INLINE void fetch(u64 hash) const {
        if (!slots_.empty()) prefetch(&slots_[home_slot(view(), hash)]);
    }
    std::size_t size() const { return rows_; }
    std::size_t bytes() const { return slots_.capacity() * sizeof(Slot); }

private:
    IndexView view() const { return {const_cast<Slot*>(slots_.data()), static_cast<u32>(slots_.size() - 1)}; }

    // The row's slot, or the free one where its search ends.
    Slot& place_of(u64 hash, u32 table) {
        const IndexView index = view();
        u32 place = home_slot(index, hash);
        for (;; place = (place + 1) & index.mask) {
            Slot& slot = index.slots[place];
            if (slot.row == 0 || (slot.hash == hash && slot.table == table)) return slot;
        }
    }

    void grow() {
        RowMap larger;
        larger.slots_.resize(slots_.empty() ? 16 : 2 * slots_.size());
        for (const Slot& slot : slots_)
            if (slot.row) insert_row(larger.view(), slot);
        slots_.swap(larger.slots_);
    }

    std::vector<Slot> slots_;
    std::size_t rows_ = 0;
};

}  // namespace tierbed
