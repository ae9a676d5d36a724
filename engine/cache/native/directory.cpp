#include "directory.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "ops/native/thread_pool.h"

namespace tierbed {

CacheSets::CacheSets(const LineShape& shape, std::size_t budget_bytes, Replacement replacement)
    : shape_(shape), replacement_(replacement) {
    const std::size_t set_bytes = WAYS * (shape_.line_bytes + sizeof(Way) + sizeof(u8));
    const std::size_t sets = std::min<std::size_t>(budget_bytes / set_bytes, NONE / WAYS);
    if (sets == 0) throw std::invalid_argument("one set takes " + std::to_string(set_bytes) + " bytes");
    sets_ = static_cast<u32>(sets);
    tags_ = Pages(sets * WAYS);
    ways_ = Pages(sets * WAYS * sizeof(Way));
    lines_ = Pages(sets * WAYS * shape_.line_bytes);
}

std::size_t CacheSets::used() const {
    return slots() - static_cast<std::size_t>(std::count(tags(), tags() + slots(), 0));
}

namespace {

constexpr u32 OLDEST = 1u << 30;   // limit for a row's age, in batches
constexpr std::size_t AHEAD = 16;  // ways are prefetched this many rows ahead, tags twice as far

}  // namespace

CacheCounts& CacheCounts::operator+=(const CacheCounts& more) {
    insertions += more.insertions;
    evictions_clean += more.evictions_clean;
    evictions_dirty += more.evictions_dirty;
    overflows += more.overflows;
    return *this;
}

void Directory::announce(const RequestedRows& batch, u32 number) {
    window.add(number);
    parallel_for(BUCKETS, [&](std::size_t b) {
        const u32 bucket = static_cast<u32>(b);
        const std::size_t end = batch.begin[b + 1];
        for (std::size_t i = batch.begin[b]; i < end; ++i) {
            if (i + 2 * AHEAD < end) sets.prefetch_tags(batch.hashes[i + 2 * AHEAD]);
            if (i + AHEAD < end) {
                if (!sets.prefetch_way(batch.hashes[i + AHEAD])) overflow.prefetch_slot(batch.hashes[i + AHEAD]);
                window.prefetch_slot(bucket, batch.hashes[i + AHEAD]);
            }
            if (!window.add_row(bucket, batch.hashes[i], batch.tables[i])) continue;  // an earlier batch needs the row
            const Location location = find(batch.hashes[i], batch.tables[i]);
            if (location.way) location.way->next = number;
        }
    });
}

void Directory::begin(u32 number) {
    if (number % OLDEST == 0)  // batch numbers wrap around, so rows must not get too old to compare
        for_each_row([&](Way& way, u64, i64) {
            if (is_after(number - OLDEST, way.last)) way.last = number - OLDEST;
        });
    looks_ahead_ = window.has_batch_after(number);
    window.remove(number);
}

void Directory::probe(const RequestedRows& batch, u32 number, bool pins) {
    if (pins) begin(number);
    parallel_for(BUCKETS, [&](std::size_t b) {
        const u32 bucket = static_cast<u32>(b);
        std::vector<Miss>& misses = misses_[b];
        misses.clear();
        const std::size_t end = batch.begin[b + 1];
        for (std::size_t i = batch.begin[b]; i < end; ++i) {
            if (i + 2 * AHEAD < end) sets.prefetch_tags(batch.hashes[i + 2 * AHEAD]);
            if (i + AHEAD < end) {
                if (!sets.prefetch_way(batch.hashes[i + AHEAD])) overflow.prefetch_slot(batch.hashes[i + AHEAD]);
                if (looks_ahead_) window.prefetch_slot(bucket, batch.hashes[i + AHEAD]);
            }
            if (batch.own_lines && batch.own_lines[i]) {
                batch.lines[i] = batch.own_lines[i];
                if (pins) next_of(batch, bucket, i, number);
                continue;
            }
            const u32 slot = sets.find(batch.hashes[i], batch.tables[i]);
            if (slot != NONE) {
                batch.lines[i] = sets.line(slot);
                if (pins) touch(sets.way(slot), number, next_of(batch, bucket, i, number));
                continue;
            }
            const u32 entry = overflow.empty() ? NONE : overflow.find(batch.hashes[i], batch.tables[i]);
            misses.push_back({static_cast<u32>(i), entry, entry == NONE ? 0 : overflow.at(entry).way.last});
            if (pins && entry != NONE) overflow.at(entry).way.last = number;
            batch.lines[i] = 0;
        }
    });
}

void Directory::count_hits(const RequestedRows& batch, HitCounts& counts) const {
    parallel_for(BUCKETS, batch.size(), [&](std::size_t b) {
        HitCounts::Part hits = counts.part(b);
        for (std::size_t i = batch.begin[b]; i < batch.begin[b + 1]; ++i)
            if (!batch.own_lines || !batch.own_lines[i]) hits.add(batch.tables[i], true);
        for (const Miss& miss : misses_[b])
            if (miss.from == NONE) hits.turn_into_miss(batch.tables[miss.row]);
    });
}

void Directory::pin(const RequestedRows& batch, u32 number) {
    begin(number);
    parallel_for(BUCKETS, [&](std::size_t b) {
        for (std::size_t i = batch.begin[b]; i < batch.begin[b + 1]; ++i)
            if (batch.lines[i])
                touch(sets.way(sets.slot(batch.lines[i])), number, next_of(batch, static_cast<u32>(b), i, number));
        for (const Miss& miss : misses_[b])
            if (miss.from != NONE) overflow.at(miss.from).way.last = number;
    });
}

std::size_t Directory::overflow_demand() const {
    std::size_t rows = 0;
    for_each_miss([&](const Miss& miss) { rows += miss.from == NONE || overflow.at(miss.from).writing; });
    return rows;
}

void Directory::choose_victims(const RequestedRows& batch, u32 number, u32 last_completed) {
    std::array<CacheCounts, BUCKETS> parts;
    const auto choose_in = [&](std::size_t b) {
        std::vector<Miss>& misses = misses_[b];
        for (Miss& miss : misses) miss.next = next_of(batch, static_cast<u32>(b), miss.row, number);
        if (looks_ahead_)
            std::stable_sort(misses.begin(), misses.end(), [&](const Miss& one, const Miss& other) {
                return batches_until(one.next, number) < batches_until(other.next, number);
            });
        for (std::size_t k = 0; k < misses.size(); ++k) {
            if (k + AHEAD < misses.size()) sets.prefetch_ways(batch.hashes[misses[k + AHEAD].row]);
            Miss& miss = misses[k];
            const u64 hash = batch.hashes[miss.row];
            const u32 table = batch.tables[miss.row], next = miss.next;
            Way way{hash, table, number, next, 1, 0, 0};
            if (miss.from != NONE) {
                touch(overflow.at(miss.from).way, number, next);
                way = overflow.at(miss.from).way;
            }
            miss.way = way;
            const bool stays_in_overflow = miss.from != NONE && is_after(miss.last_batch, last_completed);
            miss.slot = stays_in_overflow ? NONE : sets.victim_slot(hash, number, last_completed);
            if (miss.slot == NONE) {
                ++parts[b].overflows;
                continue;
            }
            ++parts[b].insertions;
            miss.free = sets.is_free(miss.slot);
            if (!miss.free) miss.way = sets.way(miss.slot);
            sets.prefetch_counters(miss.slot);
            sets.fill(miss.slot, way);
        }
        for (Miss& miss : misses) {
            if (miss.slot == NONE || miss.free) continue;
            miss.dirty = is_dirty(sets.updates(miss.slot), miss.way.stored);
            ++(miss.dirty ? parts[b].evictions_dirty : parts[b].evictions_clean);
        }
    };
    if (sets.sets_have_one_bucket())
        parallel_for(BUCKETS, choose_in);
    else
        for (std::size_t b = 0; b < BUCKETS; ++b) choose_in(b);
    counts_ = {};
    for (const CacheCounts& part : parts) counts_ += part;
}

void Directory::undo_victims() {
    for_each_miss([&](const Miss& miss) {
        if (miss.slot == NONE) return;
        if (miss.free)
            sets.free(miss.slot);
        else
            sets.fill(miss.slot, miss.way);
    });
}

void Directory::prefetch_lines(const Miss& miss) const {
    if (miss.slot != NONE) prefetch_to_write(sets.line(miss.slot), shape_.line_bytes);
    if (miss.slot != NONE && miss.from != NONE) prefetch_bytes(overflow.line(miss.from), shape_.line_bytes);
}

void Directory::place_misses(const RequestedRows& batch, bool keep_victims) {
    for (std::vector<Miss>& bucket : misses_) {
        for (std::size_t k = 0; k < bucket.size(); ++k) {
            if (k + AHEAD < bucket.size()) prefetch_lines(bucket[k + AHEAD]);
            Miss& miss = bucket[k];
            u64& line = batch.lines[miss.row];
            if (miss.slot != NONE) {
                line = sets.line(miss.slot);
                if (miss.dirty && keep_victims)
                    copy_line(THREAD, overflow.line(overflow.add(miss.way, true, true)), line, shape_);
                if (miss.from == NONE) continue;
                copy_line(THREAD, line, overflow.line(miss.from), shape_);
                overflow.remove(miss.from);
            } else if (miss.from == NONE) {
                miss.entry = overflow.add(miss.way, false);
                line = overflow.line(miss.entry);
            } else if (overflow.at(miss.from).writing) {  // copy the row: the writing thread must not see changes
                const u64 old_line = overflow.line(miss.from);
                overflow.remove(miss.from);
                line = overflow.line(overflow.add(miss.way, false));
                copy_line(THREAD, line, old_line, shape_);
            } else {
                line = overflow.line(miss.from);
            }
        }
    }
}

void Directory::set_fetched(const u32* updates) {
    for_each_miss([&](const Miss& miss) {
        if (miss.from != NONE) return;
        (miss.slot == NONE ? overflow.at(miss.entry).way : sets.way(miss.slot)).stored = *updates++;
    });
}

void Directory::drop_unfetched() {
    for_each_miss([&](const Miss& miss) {
        if (miss.from != NONE) return;
        if (miss.slot == NONE)
            overflow.remove(miss.entry);
        else
            sets.free(miss.slot);
    });
}

Directory::Location Directory::find(u64 hash, u32 table) {
    const u32 slot = sets.find(hash, table);
    if (slot != NONE) return {&sets.way(slot), sets.line(slot), slot, NONE};
    const u32 entry = overflow.empty() ? NONE : overflow.find(hash, table);
    if (entry != NONE) return {&overflow.at(entry).way, overflow.line(entry), NONE, entry};
    return {nullptr, 0, NONE, NONE};
}

void Directory::erase(const Location& location) {
    if (location.slot != NONE)
        sets.free(location.slot);
    else
        overflow.remove(location.entry);
}

}  // namespace tierbed
