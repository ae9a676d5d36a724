#include "directory.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "ops/native/thread_pool.h"

namespace tierbed {

Cache::Cache(const LineShape& shape, std::size_t budget_bytes, Replacement replacement)
    : shape_(shape), replacement_(replacement) {
    const std::size_t set_bytes = WAYS * (shape_.line_bytes + sizeof(Way) + sizeof(u8));
    const std::size_t sets = std::min<std::size_t>(budget_bytes / set_bytes, NONE / WAYS);
    if (sets == 0) throw std::invalid_argument("one set takes " + std::to_string(set_bytes) + " bytes");
    sets_ = static_cast<u32>(sets);
    tags_ = Pages(sets * WAYS);
    ways_ = Pages(sets * WAYS * sizeof(Way));
    lines_ = Pages(sets * WAYS * shape_.line_bytes);
}

std::size_t Cache::used() const { return slots() - static_cast<std::size_t>(std::count(tags(), tags() + slots(), 0)); }

namespace {

constexpr u32 OLDEST = 1u << 30;   // batches
constexpr std::size_t AHEAD = 16;  // rows whose ways are fetched before they are compared; their tags twice as early

}  // namespace

CacheCounts& CacheCounts::operator+=(const CacheCounts& more) {
    hits += more.hits;
    misses += more.misses;
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
            if (i + 2 * AHEAD < end) sets.fetch_tags(batch.hashes[i + 2 * AHEAD]);
            if (i + AHEAD < end) {
                sets.fetch_way(batch.hashes[i + AHEAD]);
                window.fetch(bucket, batch.hashes[i + AHEAD]);
            }
            if (!window.add_row(bucket, batch.hashes[i], batch.tables[i])) continue;  // an earlier batch comes first
            const Found found = find(batch.hashes[i], batch.tables[i]);
            if (found.way) found.way->next = number;
        }
    });
}

void Directory::begin(u32 number) {
    if (number % OLDEST == 0)  // numbers wrap around: rows stay within reach of a comparison
        for_each_row([&](Way& way, u64, i64) {
            if (is_after(number - OLDEST, way.last)) way.last = number - OLDEST;
        });
    looking_ = window.looks_past(number);
    window.take(number);
}

void Directory::count(const std::array<CacheCounts, BUCKETS>& parts) {
    for (const CacheCounts& part : parts) counts_ += part;
}

void Directory::probe(const RequestedRows& batch, u32 number, bool marking) {
    if (marking) begin(number);
    counts_ = {};
    std::array<CacheCounts, BUCKETS> parts;
    parallel_for(BUCKETS, [&](std::size_t b) {
        const u32 bucket = static_cast<u32>(b);
        std::vector<Miss>& absent = misses_[b];
        absent.clear();
        const std::size_t end = batch.begin[b + 1];
        for (std::size_t i = batch.begin[b]; i < end; ++i) {
            if (i + 2 * AHEAD < end) sets.fetch_tags(batch.hashes[i + 2 * AHEAD]);
            if (i + AHEAD < end) {
                sets.fetch_way(batch.hashes[i + AHEAD]);
                if (looking_) window.fetch(bucket, batch.hashes[i + AHEAD]);
            }
            if (batch.own_lines && batch.own_lines[i]) {
                batch.lines[i] = batch.own_lines[i];
                if (marking) next_of(batch, bucket, i, number);
                continue;
            }
            const u32 slot = sets.find(batch.hashes[i], batch.tables[i]);
            if (slot != NONE) {
                batch.lines[i] = sets.line(slot);
                if (marking) touch(sets.way(slot), number, next_of(batch, bucket, i, number));
                ++parts[b].hits;
                continue;
            }
            const u32 place = overflow.empty() ? NONE : overflow.find(batch.hashes[i], batch.tables[i]);
            absent.push_back({static_cast<u32>(i), place, place == NONE ? 0 : overflow.at(place).way.last});
            if (marking && place != NONE) overflow.at(place).way.last = number;
            batch.lines[i] = 0;
            ++(place == NONE ? parts[b].misses : parts[b].hits);
        }
    });
    count(parts);
}

void Directory::count_hits(const RequestedRows& batch, TableCounts& counts) const {
    parallel_for(BUCKETS, batch.size(), [&](std::size_t b) {
        TableCounts::Share asked(counts, batch.begin[b] < batch.begin[b + 1]);
        for (std::size_t i = batch.begin[b]; i < batch.begin[b + 1]; ++i)
            if (!batch.own_lines || !batch.own_lines[i]) asked.add(batch.tables[i], true);
        for (const Miss& absent : misses_[b])
            if (absent.from == NONE) asked.missed(batch.tables[absent.row]);
    });
}

void Directory::mark(const RequestedRows& batch, u32 number) {
    begin(number);
    parallel_for(BUCKETS, [&](std::size_t b) {
        for (std::size_t i = batch.begin[b]; i < batch.begin[b + 1]; ++i)
            if (batch.lines[i])
                touch(sets.way(sets.slot(batch.lines[i])), number, next_of(batch, static_cast<u32>(b), i, number));
        for (const Miss& absent : misses_[b])
            if (absent.from != NONE) overflow.at(absent.from).way.last = number;
    });
}

std::size_t Directory::coming() const {
    std::size_t rows = 0;
    for_each_absent([&](const Miss& absent) { rows += absent.from == NONE || overflow.at(absent.from).leaving; });
    return rows;
}

void Directory::take_back(u32 done) {
    if (!window.looks_past(done) || overflow.empty()) return;
    overflow.reserve(1);  // a row comes for each that goes
    overflow.for_each_held([&](u32 place) {
        if (!overflow.is_idle(place, done)) return;
        const Way row = overflow.at(place).way;
        const u32 needed = batches_until(row.next, done);
        if (needed == NEVER) return overflow.wait(place);
        const u32 slot = sets.choose(row.hash, done, done);
        if (slot == NONE || sets.needed_in(slot, done) <= needed) return;
        if (!sets.is_free(slot) && sets.is_dirty(slot)) {
            const u32 victim = overflow.add(sets.way(slot), sets.needed_in(slot, done) == NEVER);
            copy_line(THREAD, overflow.line(victim), sets.line(slot), shape_);
        }
        copy_line(THREAD, sets.line(slot), overflow.line(place), shape_);
        sets.take(slot, row);
        overflow.remove(place);
    });
}

void Directory::choose(const RequestedRows& batch, u32 number, u32 done) {
    std::array<CacheCounts, BUCKETS> parts;
    const auto choose_in = [&](std::size_t b) {
        std::vector<Miss>& all = misses_[b];
        for (Miss& absent : all) absent.next = next_of(batch, static_cast<u32>(b), absent.row, number);
        if (looking_)
            std::stable_sort(all.begin(), all.end(), [&](const Miss& one, const Miss& other) {
                return batches_until(one.next, number) < batches_until(other.next, number);
            });
        for (std::size_t k = 0; k < all.size(); ++k) {
            if (k + AHEAD < all.size()) sets.fetch_ways(batch.hashes[all[k + AHEAD].row]);
            Miss& absent = all[k];
            const u64 hash = batch.hashes[absent.row];
            const u32 table = batch.tables[absent.row], next = absent.next;
            Way way{hash, table, number, next, 1, 0, 0};
            if (absent.from != NONE) {
                touch(overflow.at(absent.from).way, number, next);
                way = overflow.at(absent.from).way;
            }
            absent.way = way;
            const bool stays = absent.from != NONE && is_after(absent.before, done);
            absent.slot = stays ? NONE : sets.choose(hash, number, done);
            // a row that a batch to come needs stays: which of the set go is known when this batch is over
            if (absent.slot != NONE && sets.needed_in(absent.slot, number) != NEVER) absent.slot = NONE;
            if (absent.slot == NONE) {
                ++parts[b].overflows;
                continue;
            }
            ++parts[b].insertions;
            absent.free = sets.is_free(absent.slot);
            if (!absent.free) absent.way = sets.way(absent.slot);
            sets.fetch_record(absent.slot);
            sets.take(absent.slot, way);
        }
        for (Miss& absent : all) {
            if (absent.slot == NONE || absent.free) continue;
            absent.dirty = is_dirty(sets.updates(absent.slot), absent.way.stored);
            ++(absent.dirty ? parts[b].evictions_dirty : parts[b].evictions_clean);
        }
    };
    if (sets.splits())
        parallel_for(BUCKETS, choose_in);
    else
        for (std::size_t b = 0; b < BUCKETS; ++b) choose_in(b);
    count(parts);
}

void Directory::restore() {
    for_each_absent([&](const Miss& absent) {
        if (absent.slot == NONE) return;
        if (absent.free)
            sets.free(absent.slot);
        else
            sets.take(absent.slot, absent.way);
    });
}

void Directory::settle(const RequestedRows& batch, bool stay) {
    for (std::vector<Miss>& of_bucket : misses_) {
        for (Miss& absent : of_bucket) {
            u64& line = batch.lines[absent.row];
            if (absent.slot != NONE) {
                line = sets.line(absent.slot);
                if (absent.dirty && stay) copy_line(THREAD, overflow.line(overflow.add(absent.way, true, true)), line, shape_);
                if (absent.from == NONE) continue;
                copy_line(THREAD, line, overflow.line(absent.from), shape_);
                overflow.remove(absent.from);
            } else if (absent.from == NONE) {
                absent.place = overflow.add(absent.way, false);
                line = overflow.line(absent.place);
            } else if (overflow.at(absent.from).leaving) {  // whoever writes it down must find it as it is
                const u64 before = overflow.line(absent.from);
                overflow.remove(absent.from);
                line = overflow.line(overflow.add(absent.way, false));
                copy_line(THREAD, line, before, shape_);
            } else {
                line = overflow.line(absent.from);
            }
        }
    }
}

void Directory::fetched(const u32* updates) {
    for_each_absent([&](const Miss& absent) {
        if (absent.from != NONE) return;
        (absent.slot == NONE ? overflow.at(absent.place).way : sets.way(absent.slot)).stored = *updates++;
    });
}

void Directory::drop() {
    for_each_absent([&](const Miss& absent) {
        if (absent.from != NONE) return;
        if (absent.slot == NONE)
            overflow.remove(absent.place);
        else
            sets.free(absent.slot);
    });
}

Directory::Found Directory::find(u64 hash, u32 table) {
    const u32 slot = sets.find(hash, table);
    if (slot != NONE) return {&sets.way(slot), sets.line(slot), slot, NONE};
    const u32 place = overflow.empty() ? NONE : overflow.find(hash, table);
    if (place != NONE) return {&overflow.at(place).way, overflow.line(place), NONE, place};
    return {nullptr, 0, NONE, NONE};
}

void Directory::erase(const Found& found) {
    if (found.slot != NONE)
        sets.free(found.slot);
    else
        overflow.remove(found.place);
}

}  // namespace tierbed
