#include "admission.h"

#include <algorithm>

#include "pool.h"

namespace tierbed {
namespace {

constexpr std::size_t AHEAD = 16;  // rows whose tags are fetched before they are probed; their ways at half of it

// A batch may come up after one that ends later, whose rows stay pinned.
u32 later(u32 one, u32 other) { return is_after(one, other) ? one : other; }

}  // namespace

Admission::Admission(CachedTier& tier, const Asked& asked, u64* lines)
    : tier_(tier), asked_(asked), lines_(lines), parts_(BUCKETS) {}

void Admission::run(bool fetch, std::unique_lock<std::mutex>& directory) {
    if (tier_.cache_.split()) {
        parallel_for(BUCKETS, [&](std::size_t b) {
            look(static_cast<u32>(b));
            place(parts_[b]);
        });
    } else {  // hits first, so that no miss takes the place of a row that a later bucket needs
        for (u32 b = 0; b < BUCKETS; ++b) look(b);
        for (Part& part : parts_) place(part);
    }
    try {
        make_room(directory);
    } catch (...) {
        put_back();
        throw;
    }
    take_from_overflow();
    for (const Part& part : parts_) tier_.count(part.counts);
    if (!fetch) return;
    try {
        this->fetch(directory);
    } catch (...) {
        drop();
        throw;
    }
}

void Admission::look(u32 bucket) {
    Part& part = parts_[bucket];
    Cache& cache = tier_.cache_;
    const std::size_t end = asked_.begin[bucket + 1];
    for (std::size_t i = asked_.begin[bucket]; i < end; ++i) {
        if (i + AHEAD < end) cache.fetch_tags(asked_.hashes[i + AHEAD]);
        if (i + AHEAD / 2 < end) cache.fetch_ways(asked_.hashes[i + AHEAD / 2]);
        if (asked_.own && asked_.own[i]) {
            lines_[i] = asked_.own[i];
            continue;
        }
        const u64 hash = asked_.hashes[i];
        const u32 next = tier_.window_.take(bucket, hash, asked_.tables[i], asked_.number);
        const u32 slot = cache.find(hash, asked_.tables[i]);
        if (slot == NONE) {
            part.missing.push_back({static_cast<u32>(i), next});
            continue;
        }
        Way& way = cache.way(slot);
        way.last = later(way.last, asked_.number);
        way.next = next;
        ++way.uses;
        lines_[i] = cache.line(slot);
        ++part.counts.hits;
    }
    const std::size_t n = part.missing.size();  // from here on nothing may run out of memory before `make_room`
    part.displaced.reserve(n);
    part.placed.reserve(n);
    part.unplaced.reserve(n);
    part.rescued.reserve(tier_.overflow_.used() ? n : 0);
    part.kept.reserve(tier_.overflow_.used() ? n : 0);
}

void Admission::place(Part& part) {
    Cache& cache = tier_.cache_;
    const u32 number = asked_.number;
    for (const auto& [row, next] : part.missing) {
        const u64 hash = asked_.hashes[row];
        const u32 table = asked_.tables[row];
        const u32 entry = tier_.overflow_.find(hash, table);
        ++(entry ? part.counts.hits : part.counts.misses);
        const u32 first = cache.set_of(hash) * WAYS;
        const SetView set = cache.set(first / WAYS);
        const u32 w = victim_way(set, number, tier_.done_, tier_.options_.replacement);
        // a row stays out of its set where another batch has its address, or all others of the set are needed earlier
        if (w == NONE || (entry && is_after(tier_.overflow_[entry - 1].last, tier_.done_)) ||
            (set.tags[w] && batches_until(next, number) > batches_until(set.ways[w].next, number))) {
            part.counts.overflows += entry == 0;
            if (entry)
                part.kept.push_back({row, entry - 1});
            else
                part.unplaced.push_back(row);
            continue;
        }
        part.displaced.push_back({first + w, set.tags[w], set.ways[w]});
        set.tags[w] = tag_of(hash);
        set.ways[w] = Way{hash, table, number, next, 1, 0, 0};
        lines_[row] = cache.line(first + w);
        ++part.counts.insertions;
        if (entry)
            part.rescued.push_back({row, entry - 1});
        else
            part.placed.push_back(row);
    }
}

void Admission::make_room(std::unique_lock<std::mutex>& directory) {
    Cache& cache = tier_.cache_;
    Overflow& overflow = tier_.overflow_;
    std::vector<const Displaced*> victims;
    std::size_t beside = 0;
    for (Part& part : parts_) {
        for (const Displaced& displaced : part.displaced) {
            if (displaced.tag == 0) continue;
            const bool dirty = tier_.is_dirty(cache.line(displaced.slot), displaced.way.stored);
            ++(dirty ? part.counts.evictions_dirty : part.counts.evictions_clean);
            if (dirty) victims.push_back(&displaced);
        }
        beside += part.unplaced.size() + part.kept.size();
    }
    if (!tier_.below_.on_disk()) {
        overflow.reserve(beside);
        if (victims.empty()) return;
        if (!cache.split())
            std::stable_sort(victims.begin(), victims.end(), [](const Displaced* a, const Displaced* b) {
                return bucket_of(a->way.hash) < bucket_of(b->way.hash);
            });
        RowList rows(victims.size());
        for (const Displaced* victim : victims) rows.add(victim->way.table, victim->way.hash, cache.line(victim->slot));
        directory.unlock();
        const Relock relock(directory);
        tier_.write_below(rows.rows());
        return;
    }
    overflow.reserve(beside + victims.size());
    Buffer<u64> to(victims.size());
    for (std::size_t i = 0; i < victims.size(); ++i) {
        const Way& way = victims[i]->way;
        const u32 entry = overflow.add(way.hash, way.table, way.last, way.stored);
        overflow.leaving.push_back(entry);
        to[i] = overflow[entry].line;
    }
    parallel_ranges(victims.size(), 256, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i)
            copy_line(THREAD, to[i], cache.line(victims[i]->slot), tier_.layout_.shape);
    });
    if (!victims.empty()) tier_.wake_.notify_one();
}

void Admission::take_from_overflow() {
    Overflow& overflow = tier_.overflow_;
    const auto keep = [&](u32 row, u32 entry) {
        overflow.touched.push_back({asked_.number, entry});
        lines_[row] = overflow[entry].line;
    };
    for (Part& part : parts_) {
        for (const auto& [row, entry] : part.rescued) {
            copy_line(THREAD, lines_[row], overflow[entry].line, tier_.layout_.shape);
            tier_.cache_.way(tier_.cache_.slot_of(lines_[row])).stored = overflow[entry].stored;
            overflow.remove(entry);
        }
        for (auto& [row, entry] : part.kept) {
            if (overflow[entry].writing) {  // its line is being read: the row goes on in another
                const u64 from = overflow[entry].line;
                const u32 stored = overflow[entry].stored;
                overflow.remove(entry);
                entry = overflow.add(asked_.hashes[row], asked_.tables[row], asked_.number, stored);
                copy_line(THREAD, overflow[entry].line, from, tier_.layout_.shape);
            }
            overflow[entry].last = later(overflow[entry].last, asked_.number);
            keep(row, entry);
        }
        part.added.reserve(part.unplaced.size());
        for (const u32 row : part.unplaced) {
            const u32 entry = overflow.add(asked_.hashes[row], asked_.tables[row], asked_.number, 0);
            part.added.push_back(entry);
            keep(row, entry);
        }
    }
}

void Admission::fetch(std::unique_lock<std::mutex>& directory) {
    std::size_t n = 0;
    for (const Part& part : parts_) n += part.placed.size() + part.unplaced.size();
    if (n == 0) return;
    RowList rows(n);
    for (const Part& part : parts_)
        for (const auto* some : {&part.placed, &part.unplaced})
            for (const u32 row : *some) rows.add(asked_.tables[row], asked_.hashes[row], lines_[row]);
    const std::unique_ptr<bool[]> found(new bool[n]());
    {
        directory.unlock();
        const Relock relock(directory);
        tier_.read_below(rows.rows(), found.get(), true);
    }
    std::size_t at = 0;
    const auto stored = [&](u64 line) { return found[at++] ? record(line, tier_.layout_.shape)->updates : 0; };
    for (const Part& part : parts_) {
        for (const u32 row : part.placed) tier_.cache_.way(tier_.cache_.slot_of(lines_[row])).stored = stored(lines_[row]);
        for (const u32 entry : part.added) tier_.overflow_[entry].stored = stored(tier_.overflow_[entry].line);
    }
}

void Admission::put_back() {
    for (Part& part : parts_)
        for (auto it = part.displaced.rbegin(); it != part.displaced.rend(); ++it) {
            tier_.cache_.tag(it->slot) = it->tag;
            tier_.cache_.way(it->slot) = it->way;
        }
}

void Admission::drop() {
    for (Part& part : parts_) {
        for (const u32 row : part.placed) tier_.cache_.tag(tier_.cache_.slot_of(lines_[row])) = 0;
        for (const u32 entry : part.added) tier_.overflow_.remove(entry);
    }
}

}  // namespace tierbed
