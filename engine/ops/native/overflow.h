// Lines beside the sets of a cache: rows that no set had room for, and rows on their way down.
#pragma once
#include <deque>
#include <vector>

#include "../kernels/table.h"
#include "layout.h"
#include "memory.h"

namespace tierbed {

class Overflow {
public:
    struct Entry {
        u64 hash;
        u64 line;
        u32 table;
        u32 last;    // as in a Way
        u32 stored;  // as in a Way
        bool writing;
        bool found;  // whether the index leads here; a row that was taken back while it was written has left it
    };

    explicit Overflow(u32 line_bytes) : line_bytes_(line_bytes) {}
    Overflow(const Overflow&) = delete;

    // The number of the row's entry + 1, or 0. Safe beside itself.
    u32 find(u64 hash, u32 table) const { return used_ ? find_row(THREAD, view(), hash, table) : 0; }
    Entry& operator[](u32 number) { return entries_[number]; }
    const Entry& operator[](u32 number) const { return entries_[number]; }

    // Memory for that many more rows, so that `add` cannot fail.
    void reserve(std::size_t more);
    // A line for a row that is not here; returns the entry's number.
    u32 add(u64 hash, u32 table, u32 last, u32 stored);
    // The row leaves; while it is being written its line stays until `remove` is called again.
    void remove(u32 number);
    // (batch, entry) of what batches hold, by their numbers, and entries that may go; some may have left or come back.
    std::deque<std::pair<u32, u32>> touched;
    std::deque<u32> leaving;

    std::size_t used() const { return used_; }  // lines, those included that are still being written
    std::size_t peak() const { return peak_; }
    std::size_t bytes() const;
    template <class Body>
    void for_each(const Body& body) {
        for (u32 number = 0; number < entries_.size(); ++number)
            if (entries_[number].found) body(number, entries_[number]);
    }

private:
    IndexView view() const { return {const_cast<Slot*>(slots_.data()), static_cast<u32>(slots_.size() - 1)}; }

    const u32 line_bytes_;
    std::vector<Slot> slots_;
    std::vector<Entry> entries_;
    std::vector<u32> free_;
    std::vector<Pages> pages_;
    std::size_t used_ = 0, peak_ = 0;
};

}  // namespace tierbed
