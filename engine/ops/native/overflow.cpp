#include "overflow.h"

#include <algorithm>

namespace tierbed {

void Overflow::reserve(std::size_t more) {
    if (free_.size() < more) {
        const std::size_t lines = std::max<std::size_t>({more - free_.size(), entries_.size() / 2, 256});
        free_.reserve(entries_.size() + lines);
        entries_.reserve(entries_.size() + lines);
        pages_.reserve(pages_.size() + 1);
        pages_.emplace_back(lines * line_bytes_);
        for (std::size_t i = 0; i < lines; ++i)
            entries_.push_back({0, pages_.back().start() + i * line_bytes_, 0, 0, 0, false, false});
        for (std::size_t i = entries_.size(); i > entries_.size() - lines; --i) free_.push_back(static_cast<u32>(i - 1));
    }
    std::size_t slots = std::max<std::size_t>(slots_.size(), 512);
    while ((used_ + more) * 2 > slots) slots *= 2;
    if (slots == slots_.size()) return;
    std::vector<Slot> larger(slots, Slot{0, 0, 0});
    const IndexView index{larger.data(), static_cast<u32>(slots - 1)};
    for (const Slot& slot : slots_)
        if (slot.row) insert_row(index, slot);
    slots_.swap(larger);
}

u32 Overflow::add(u64 hash, u32 table, u32 last, u32 stored) {
    const u32 number = free_.back();
    free_.pop_back();
    Entry& entry = entries_[number];
    entry = {hash, entry.line, table, last, stored, false, true};
    insert_row(view(), Slot{hash, table, number + 1});
    peak_ = std::max(peak_, ++used_);
    return number;
}

void Overflow::remove(u32 number) {
    Entry& entry = entries_[number];
    if (entry.found) erase_row(view(), entry.hash, entry.table);
    entry.found = false;
    if (entry.writing) return;
    free_.push_back(number);
    --used_;
}

std::size_t Overflow::bytes() const {
    return entries_.size() * (line_bytes_ + sizeof(Entry) + sizeof(u32)) + slots_.size() * sizeof(Slot);
}

}  // namespace tierbed
