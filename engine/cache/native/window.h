// Which announced batches need which rows. By this, replacement looks ahead.
#pragma once
#include <algorithm>
#include <array>

#include "cache/kernels/cache_set.h"
#include "store/native/row_map.h"

namespace tierbed {

// Batches that were announced and have not begun, SPAN at most, numbered one after the other. A row's number in the
// map has a bit for each of them that needs it. Each bucket may be changed by a thread of its own.
class Window {
public:
    static constexpr u32 SPAN = 32;

    bool full() const { return last_ + 1 - first_ == SPAN; }
    // Whether any announced batch comes after batch `number`.
    bool looks_past(u32 number) const { return is_after(last_, number); }

    // Adds an announced batch.
    void add(u32 number) {
        if (empty()) first_ = number;
        last_ = number;
    }
    // Notes that the batch added last needs the row. Returns whether no earlier batch does.
    bool add_row(u32 bucket, u64 hash, u32 table) {
        u32* const bits = maps_[bucket].look_up(hash, table);
        if (bits)
            *bits |= bit_of(last_);
        else
            maps_[bucket].insert(hash, table, bit_of(last_));
        return !bits;
    }

    // Takes out the earliest batch, which begins.
    void take(u32 number) {
        if (empty()) return;
        first_ = number + 1;
        if (empty()) clear();
    }
    // Notes that batch `number` needs the row no more. Returns the next batch that does, or 0.
    u32 take_row(u32 bucket, u64 hash, u32 table, u32 number) {
        u32* const bits = maps_[bucket].look_up(hash, table);
        const u32 others = bits ? *bits & ~bit_of(number) : 0;
        if (!others) {
            if (bits) maps_[bucket].erase(hash, table);
            return 0;
        }
        *bits = others;
        return next_of(others, number);
    }

    TIERBED_INLINE void fetch(u32 bucket, u64 hash) const { maps_[bucket].fetch(hash); }
    void clear() { *this = Window(); }
    std::size_t bytes() const {
        std::size_t total = 0;
        for (const RowMap& map : maps_) total += map.bytes();
        return total;
    }

private:
    bool empty() const { return is_after(first_, last_); }
    static u32 bit_of(u32 number) { return 1u << number % SPAN; }
    // The first batch after `now` that has its bit set.
    static u32 next_of(u32 bits, u32 now) {
        const u32 turn = static_cast<u32>((now + 1) % SPAN);
        const u32 turned = turn ? bits >> turn | bits << (SPAN - turn) : bits;
        return now + 1 + lowest_bit(turned);
    }

    std::array<RowMap, BUCKETS> maps_;
    u32 first_ = 1, last_ = 0;  // numbers
};

}  // namespace tierbed
