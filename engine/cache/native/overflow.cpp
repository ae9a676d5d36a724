#include "overflow.h"

namespace tierbed {

void Overflow::reserve(std::size_t rows) {
    index_.reserve(index_.size() + rows);
    const std::size_t base = capacity_ + 1;  // + 1: a swap with the sets adds a row before it removes one
    while (num_entries_ - num_rows_ < rows) {
        const bool is_spare = num_entries_ >= base;
        const u32 size = is_spare ? CHUNK : static_cast<u32>(std::min<std::size_t>(CHUNK, base - num_entries_));
        const u32 first = static_cast<u32>(chunks_.size()) * CHUNK;
        Chunk chunk{Pages(std::size_t{size} * shape_.line_bytes), std::vector<OverflowEntry>(size)};
        for (u32 i = 0; i < size; ++i) chunk.entries[i].next = i + 1 < size ? first + i + 1 : first_free_[is_spare];
        chunks_.push_back(std::move(chunk));
        first_free_[is_spare] = first;
        num_entries_ += size;
    }
}

void Overflow::trim() {
    if (num_spare_rows_ > 0 || num_entries_ <= capacity_ + 1) return;
    RowMap index;
    index.reserve(num_rows_);
    for_each([&](u32 entry) { index.insert(at(entry).way.hash, at(entry).way.table, entry + 1); });
    index_ = std::move(index);
    chunks_.resize(capacity_ / CHUNK + 1);
    first_free_[1] = NONE;
    num_entries_ = capacity_ + 1;
}

bool Overflow::grow(std::size_t rows) {
    if (rows <= capacity_ || num_entries_ > capacity_ + 1) return false;
    capacity_ = round_up_to_chunks(rows);
    return true;
}

u32 Overflow::add(const Way& row, bool is_evictable, bool is_eviction_counted) {
    const bool is_spare = first_free_[0] == NONE;
    const u32 entry = first_free_[is_spare];
    first_free_[is_spare] = at(entry).next;
    index_.insert(row.hash, row.table, entry + 1);
    at(entry) = {row, false, false, is_evictable, is_eviction_counted, NONE, NONE};
    link(entry);
    num_spare_rows_ += is_spare;
    peak_rows_ = std::max(peak_rows_, ++num_rows_);
    return entry;
}

void Overflow::remove(u32 entry) {
    index_.erase(at(entry).way.hash, at(entry).way.table);
    if (at(entry).is_being_written)
        at(entry).is_erased = true;
    else
        release(entry);
}

void Overflow::link(u32 entry) {
    Chain& chain = chains_[at(entry).is_evictable];
    at(entry).previous = chain.last;
    at(entry).next = NONE;
    (chain.last == NONE ? chain.first : at(chain.last).next) = entry;
    chain.last = entry;
    ++chain.num_rows;
}

void Overflow::unlink(u32 entry) {
    Chain& chain = chains_[at(entry).is_evictable];
    const u32 previous = at(entry).previous, next = at(entry).next;
    (previous == NONE ? chain.first : at(previous).next) = next;
    (next == NONE ? chain.last : at(next).previous) = previous;
    --chain.num_rows;
    if (next_candidate_ == entry) next_candidate_ = next;
}

void Overflow::mark_needed(u32 entry) {
    unlink(entry);
    at(entry).is_evictable = false;
    link(entry);
}

void Overflow::evict(u32 entry) {
    evictions_ += !at(entry).is_eviction_counted;
    remove(entry);
}

void Overflow::release(u32 entry) {
    unlink(entry);
    const bool is_spare = entry > capacity_;
    at(entry) = {};
    at(entry).next = first_free_[is_spare];
    first_free_[is_spare] = entry;
    num_spare_rows_ -= is_spare;
    --num_rows_;
}

std::size_t Overflow::write_back(const std::atomic<u32>& last_completed, std::size_t max_rows, const Limits& limits,
                                 const std::function<void(const RowSpan&)>& write) {
    const std::vector<u32> entries = claim_dirty(last_completed, max_rows, limits);
    if (entries.empty()) return 0;
    std::vector<u32> written_updates;
    try {
        RowList dirty;
        for (const u32 entry : entries) {
            dirty.add(at(entry).way.table, at(entry).way.hash, line(entry));
            written_updates.push_back(updates(entry));
        }
        write(dirty.rows());
    } catch (...) {
        finish_write(entries, nullptr, last_completed);
        throw;
    }
    finish_write(entries, &written_updates, last_completed);
    return entries.size();
}

std::vector<u32> Overflow::claim_dirty(u32 last_completed, std::size_t max_rows, const Limits& limits) {
    std::vector<u32> claimed;
    const auto over_limit = [&] { return claimed.size() < max_rows && num_rows_ > limits.max_rows + claimed.size(); };
    const auto must_stay = [&](u32 entry) {
        const bool needed = count_batches_until(at(entry).way.next_batch, last_completed) != NEVER;
        return !is_idle(entry, last_completed) || (needed && num_rows_ - claimed.size() <= limits.max_needed_rows);
    };
    const auto evict_or_claim = [&](u32 entry) {
        if (!is_dirty(entry)) return evict(entry);
        at(entry).is_being_written = true;
        claimed.push_back(entry);
    };
    if (num_spare_rows_)  // first evict rows beyond the capacity, so that `trim` can free memory
        for_each([&](u32 entry) {
            if (entry > capacity_ && claimed.size() < max_rows && is_idle(entry, last_completed)) evict_or_claim(entry);
        });
    for (u32 entry = chains_[true].first, next; entry != NONE && over_limit(); entry = next) {
        next = at(entry).next;
        if (at(entry).is_being_written) continue;
        must_stay(entry) ? mark_needed(entry) : evict_or_claim(entry);
    }
    for (std::size_t remaining = chains_[false].num_rows; remaining > 0 && over_limit(); --remaining) {
        const u32 entry = next_candidate_ == NONE ? chains_[false].first : next_candidate_;
        next_candidate_ = at(entry).next;
        if (!must_stay(entry)) evict_or_claim(entry);
    }
    std::sort(claimed.begin(), claimed.end(), [&](u32 a, u32 b) {
        return at(a).way.hash != at(b).way.hash ? at(a).way.hash < at(b).way.hash : at(a).way.table < at(b).way.table;
    });
    return claimed;
}

void Overflow::finish_write(const std::vector<u32>& entries, const std::vector<u32>* updates, u32 last_completed) {
    for (std::size_t i = 0; i < entries.size(); ++i) {
        OverflowEntry& row = at(entries[i]);
        row.is_being_written = false;
        if (row.is_erased) {
            release(entries[i]);
        } else if (updates) {
            row.way.stored_updates = (*updates)[i];
            if (!is_after(row.way.last_batch, last_completed)) evict(entries[i]);
        }
    }
}

std::size_t Overflow::bytes() const {
    std::size_t total = index_.bytes();
    for (const Chunk& chunk : chunks_) total += chunk.lines.size() + chunk.entries.size() * sizeof(OverflowEntry);
    return total;
}

}  // namespace tierbed
