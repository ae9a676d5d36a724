#include "overflow.h"

namespace tierbed {

void Overflow::reserve(std::size_t rows) {
    index_.reserve(index_.size() + rows);
    const std::size_t within = capacity_ + 1;  // a row comes before the one whose place in a set it leaves has gone
    while (places_ - rows_ < rows) {
        const bool beyond = places_ >= within;
        const u32 size = beyond ? CHUNK : static_cast<u32>(std::min<std::size_t>(CHUNK, within - places_));
        const u32 first = static_cast<u32>(chunks_.size()) * CHUNK;
        Chunk chunk{Pages(std::size_t{size} * shape_.line_bytes), std::vector<Entry>(size)};
        for (u32 i = 0; i < size; ++i) chunk.places[i].after = i + 1 < size ? first + i + 1 : free_[beyond];
        chunks_.push_back(std::move(chunk));
        free_[beyond] = first;
        places_ += size;
    }
}

void Overflow::trim() {
    if (rows_beyond_ > 0 || places_ <= capacity_ + 1) return;
    RowMap index;  // a smaller one
    index.reserve(rows_);
    for_each([&](u32 place) { index.insert(at(place).way.hash, at(place).way.table, place + 1); });
    index_ = std::move(index);
    chunks_.resize(capacity_ / CHUNK + 1);
    free_[1] = NONE;
    places_ = capacity_ + 1;
}

u32 Overflow::add(const Way& row, bool waiting, bool evicted) {
    const bool beyond = free_[0] == NONE;
    const u32 place = free_[beyond];
    free_[beyond] = at(place).after;
    index_.insert(row.hash, row.table, place + 1);
    at(place) = {row, false, false, waiting, evicted, NONE, NONE};
    link(place);
    rows_beyond_ += beyond;
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

void Overflow::link(u32 place) {
    Chain& chain = chains_[at(place).waiting];
    at(place).before = chain.last;
    at(place).after = NONE;
    (chain.last == NONE ? chain.first : at(chain.last).after) = place;
    chain.last = place;
    ++chain.rows;
}

void Overflow::unlink(u32 place) {
    Chain& chain = chains_[at(place).waiting];
    const u32 before = at(place).before, after = at(place).after;
    (before == NONE ? chain.first : at(before).after) = after;
    (after == NONE ? chain.last : at(after).before) = before;
    --chain.rows;
    if (turn_ == place) turn_ = after;
}

void Overflow::move(u32 place, bool waiting) {
    unlink(place);
    at(place).waiting = waiting;
    link(place);
}

void Overflow::leave(u32 place) {
    evictions_ += !at(place).evicted;
    remove(place);
}

void Overflow::forget(u32 place) {
    unlink(place);
    const bool beyond = place > capacity_;
    at(place) = {};
    at(place).after = free_[beyond];
    free_[beyond] = place;
    rows_beyond_ -= beyond;
    --rows_;
}

std::vector<u32> Overflow::take(u32 done, std::size_t most, const Limits& room) {
    std::vector<u32> taken;
    const auto wants_more = [&] { return taken.size() < most && rows_ > room.keep + taken.size(); };
    const auto stays = [&](u32 place) {
        const bool needed = batches_until(at(place).way.next, done) != NEVER;
        return !is_idle(place, done) || (needed && rows_ - taken.size() <= room.keep_needed);
    };
    const auto go = [&](u32 place) {
        if (!is_dirty(place)) return leave(place);
        at(place).leaving = true;
        taken.push_back(place);
    };
    if (rows_beyond_)  // their memory is given back
        for_each([&](u32 place) {
            if (place > capacity_ && taken.size() < most && is_idle(place, done)) go(place);
        });
    for (u32 place = chains_[true].first, after; place != NONE && wants_more(); place = after) {
        after = at(place).after;
        if (at(place).leaving) continue;
        stays(place) ? move(place, false) : go(place);
    }
    for (std::size_t left = chains_[false].rows; left > 0 && wants_more(); --left) {
        const u32 place = turn_ == NONE ? chains_[false].first : turn_;
        turn_ = at(place).after;
        if (!stays(place)) go(place);
    }
    std::sort(taken.begin(), taken.end(), [&](u32 a, u32 b) {
        return at(a).way.hash != at(b).way.hash ? at(a).way.hash < at(b).way.hash : at(a).way.table < at(b).way.table;
    });
    return taken;
}

void Overflow::wrote(const std::vector<u32>& places, const std::vector<u32>* updates, u32 done) {
    for (std::size_t i = 0; i < places.size(); ++i) {
        Entry& row = at(places[i]);
        row.leaving = false;
        if (row.gone) {
            forget(places[i]);
        } else if (updates) {
            row.way.stored = (*updates)[i];
            if (!is_after(row.way.last, done)) leave(places[i]);
        }
    }
}

std::size_t Overflow::bytes() const {
    std::size_t total = index_.bytes();
    for (const Chunk& chunk : chunks_) total += chunk.lines.size() + chunk.places.size() * sizeof(Entry);
    return total;
}

}  // namespace tierbed
