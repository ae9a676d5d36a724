#include "window.h"

#include <algorithm>

namespace tierbed {

void Window::reserve(u32 bucket, std::size_t more) {
    Part& part = parts_[bucket];
    std::size_t slots = std::max<std::size_t>(part.slots.size(), 64);
    while ((part.rows + more) * 3 > slots * 2) slots *= 2;
    if (slots == part.slots.size()) return;
    std::vector<Slot> larger(slots, Slot{0, 0, 0});
    const IndexView index{larger.data(), static_cast<u32>(slots - 1)};
    for (const Slot& slot : part.slots)
        if (slot.row) insert_row(index, slot);
    part.slots.swap(larger);
}

Slot* Window::find(u32 bucket, u64 hash, u32 table) const {
    const IndexView index = parts_[bucket].view();
    for (u32 at = home_slot(index, hash); index.slots[at].row; at = (at + 1) & index.mask)
        if (index.slots[at].hash == hash && index.slots[at].table == table) return &index.slots[at];
    return nullptr;
}

void Window::add(u32 bucket, u64 hash, u32 table, u32 number) {
    const u32 bit = 1u << number % SPAN;
    if (Slot* slot = find(bucket, hash, table)) {
        slot->row |= bit;
    } else {
        insert_row(parts_[bucket].view(), Slot{hash, table, bit});
        ++parts_[bucket].rows;
    }
}

u32 Window::take(u32 bucket, u64 hash, u32 table, u32 number) {
    if (empty(bucket)) return 0;
    Slot* slot = find(bucket, hash, table);
    if (!slot) return 0;
    const u32 mask = slot->row &= ~(1u << number % SPAN);
    if (mask) return after(mask, number);
    slot->row = 1;  // erase_row looks for a row that is there
    erase_row(parts_[bucket].view(), hash, table);
    --parts_[bucket].rows;
    return 0;
}

u32 Window::next(u32 bucket, u64 hash, u32 table, u32 number) const {
    if (empty(bucket)) return 0;
    const Slot* slot = find(bucket, hash, table);
    return slot ? after(slot->row, number) : 0;
}

u32 Window::after(u32 mask, u32 number) {
    const u32 turn = (number + 1) % SPAN;
    const u32 turned = turn ? mask >> turn | mask << (SPAN - turn) : mask;
    return turned ? number + 1 + lowest_bit(turned) : 0;
}

void Window::clear() {
    for (Part& part : parts_)
        if (part.rows) {
            std::fill(part.slots.begin(), part.slots.end(), Slot{0, 0, 0});
            part.rows = 0;
        }
}

std::size_t Window::bytes() const {
    std::size_t total = 0;
    for (const Part& part : parts_) total += part.slots.size() * sizeof(Slot);
    return total;
}

}  // namespace tierbed
