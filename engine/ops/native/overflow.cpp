#include "overflow.h"

#include <algorithm>

namespace tierbed {

void Overflow::reserve(std::size_t rows) {
    index_.reserve(index_.size() + rows);
    while (free_.size() < rows) {
        const u32 first = places();
        chunks_.emplace_back(std::size_t{CHUNK} * shape_.line_bytes);
        places_.resize(first + CHUNK);
        if (free_.capacity() < places_.size()) free_.reserve(2 * places_.size());
        for (u32 place = first + CHUNK; place-- > first;) free_.push_back(place);
    }
}

void Overflow::trim() {
    if (rows_ > 0 || places() <= kept_) return;
    index_ = RowMap();
    places_ = std::vector<Place>();
    free_ = std::vector<u32>();
    chunks_ = std::vector<Pages>();
}

u32 Overflow::add(const Way& row) {
    const u32 place = free_.back();
    free_.pop_back();
    index_.insert(row.hash, row.table, place + 1);
    places_[place] = Place{row, true, false, false};
    peak_ = std::max(peak_, ++rows_);
    return place;
}

void Overflow::remove(u32 place) {
    index_.erase(at(place).way.hash, at(place).way.table);
    if (at(place).leaving)
        at(place).gone = true;
    else
        forget(place);
}

void Overflow::forget(u32 place) {
    places_[place] = Place{};
    free_.push_back(place);
    --rows_;
}

std::vector<u32> Overflow::take(u32 done, std::size_t most) {
    std::vector<u32> taken;
    const u32 all = places();
    for (u32 n = 0; n < all && rows_ > 0 && taken.size() < most; ++n) {
        if (turn_ >= all) turn_ = 0;
        const u32 place = turn_++;
        if (!is_idle(place, done)) continue;
        if (2 * rows_ <= kept_ && batches_until(at(place).way.next, done) != NEVER) continue;
        if (is_dirty(place))
            taken.push_back(place);
        else
            remove(place);
    }
    std::sort(taken.begin(), taken.end(), [&](u32 a, u32 b) {
        return at(a).way.hash != at(b).way.hash ? at(a).way.hash < at(b).way.hash : at(a).way.table < at(b).way.table;
    });
    for (const u32 place : taken) at(place).leaving = true;
    return taken;
}

void Overflow::wrote(const std::vector<u32>& places, const std::vector<u32>* updates, u32 done) {
    for (std::size_t i = 0; i < places.size(); ++i) {
        Place& row = at(places[i]);
        row.leaving = false;
        if (row.gone) {
            forget(places[i]);
        } else if (updates) {
            row.way.stored = (*updates)[i];
            if (!is_after(row.way.last, done)) remove(places[i]);
        }
    }
}

std::size_t Overflow::bytes() const {
    std::size_t total = places_.capacity() * sizeof(Place) + free_.capacity() * sizeof(u32) + index_.bytes();
    for (const Pages& chunk : chunks_) total += chunk.size();
    return total;
}

}  // namespace tierbed
