#include "cache.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "pool.h"

namespace tierbed {

Cache::Cache(const Layout& layout, std::size_t budget_bytes) : shape_(layout.shape) {
    const std::size_t set_bytes = WAYS * (shape_.line_bytes + sizeof(Way));
    std::size_t sets = std::min<std::size_t>(budget_bytes / set_bytes, NONE / WAYS);
    if (sets == 0) throw std::invalid_argument("one set takes " + std::to_string(set_bytes) + " bytes");
    if (sets > BUCKETS) sets = sets / BUCKETS * BUCKETS;  // a bucket owns whole sets, so that threads do not share one
    sets_ = static_cast<u32>(sets);
    ways_.assign(sets * WAYS, Way{0, 0, 0, 0, FREE});
    memory_ = Pages(ways_.size() * shape_.line_bytes);
}

u32 Cache::set_of(u64 hash) const { return tierbed::set_of(hash, sets_); }

template <class Body>
void Cache::for_each_bucket(const Body& body) const {
    if (sets_ >= BUCKETS)
        parallel_for(BUCKETS, body);
    else
        for (std::size_t bucket = 0; bucket < BUCKETS; ++bucket) body(bucket);
}

Admission Cache::admit(const u32* tables, const u64* keys, std::size_t n) {
    const Grouped grouped = group_by_bucket(tables, keys, n);
    const u32 tick = ++tick_;
    Admission all;
    all.lines.assign(n, 0);
    all.hit.assign(n, 0);
    all.slots.assign(n, NONE);
    std::vector<Admission> parts(BUCKETS);
    std::vector<CacheCounts> part_counts(BUCKETS);
    // all memory is taken before any way changes, so that running out of it leaves the cache as it was
    const auto reserve = [](Admission& admission, std::size_t rows) {
        admission.victim_tables.reserve(rows);
        admission.victim_keys.reserve(rows);
        admission.victim_lines.reserve(rows);
        admission.displaced.reserve(rows);
    };
    reserve(all, n);
    for (u32 b = 0; b < BUCKETS; ++b) reserve(parts[b], grouped.begin[b + 1] - grouped.begin[b]);
    for_each_bucket([&](std::size_t b) {
        Admission& part = parts[b];
        CacheCounts& count = part_counts[b];
        const std::size_t begin = grouped.begin[b], end = grouped.begin[b + 1];
        // hits first, so that no miss of this batch takes the place of a row that it needs
        for (std::size_t i = begin; i < end; ++i) {
            const Entry& entry = grouped.entries[i];
            const u32 set = set_of(entry.hash);
            const u32 way = probe_set(THREAD, &ways_[set * WAYS], entry.table, entry.hash);
            if (way == NONE) continue;
            const u32 slot = set * WAYS + way;
            ways_[slot].tick = tick;
            ++ways_[slot].pins;
            all.slots[entry.position] = slot;
            all.lines[entry.position] = line_of(slot);
            all.hit[entry.position] = 1;
            ++count.hits;
        }
        for (std::size_t i = begin; i < end; ++i) {
            const Entry& entry = grouped.entries[i];
            if (all.hit[entry.position]) continue;
            ++count.misses;
            const u32 set = set_of(entry.hash);
            const u32 way = victim_way(&ways_[set * WAYS], tick);
            if (way == NONE) {
                ++count.overflows;
                continue;
            }
            const u32 slot = set * WAYS + way;
            Way& taken = ways_[slot];
            part.displaced.push_back({slot, taken});
            if (taken.state == DIRTY) {
                ++count.evictions_dirty;
                part.victim_tables.push_back(taken.table);
                part.victim_keys.push_back(key_of(taken.table, taken.hash));
                part.victim_lines.push_back(line_of(slot));
            } else if (taken.state == CLEAN) {
                ++count.evictions_clean;
            }
            taken = Way{entry.hash, entry.table, tick, 1, CLEAN};
            all.slots[entry.position] = slot;
            all.lines[entry.position] = line_of(slot);
        }
    });
    for (u32 b = 0; b < BUCKETS; ++b) {
        const auto append = [](auto& to, const auto& from) { to.insert(to.end(), from.begin(), from.end()); };
        append(all.victim_tables, parts[b].victim_tables);
        append(all.victim_keys, parts[b].victim_keys);
        append(all.victim_lines, parts[b].victim_lines);
        append(all.displaced, parts[b].displaced);
        counts.hits += part_counts[b].hits;
        counts.misses += part_counts[b].misses;
        counts.evictions_clean += part_counts[b].evictions_clean;
        counts.evictions_dirty += part_counts[b].evictions_dirty;
        counts.overflows += part_counts[b].overflows;
    }
    return all;
}

void Cache::release(const Admission& admission, bool dirty) {
    for (const u32 slot : admission.slots) {
        if (slot == NONE) continue;
        --ways_[slot].pins;
        if (dirty) ways_[slot].state = DIRTY;
    }
}

void Cache::cancel(const Admission& admission, bool restore) {
    for (std::size_t i = 0; i < admission.slots.size(); ++i)
        if (admission.hit[i]) --ways_[admission.slots[i]].pins;
    for (const auto& displaced : admission.displaced)
        ways_[displaced.slot] = restore ? displaced.before : Way{0, 0, 0, 0, FREE};
}

void Cache::find(const u32* tables, const u64* keys, u64* lines, std::size_t n) const {
    parallel_ranges(n, 4096, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) {
            const u64 hash = hash_row(tables[i], keys[i]);
            const u32 set = set_of(hash);
            const u32 way = probe_set(THREAD, &ways_[set * WAYS], tables[i], hash);
            lines[i] = way == NONE ? 0 : line_of(set * WAYS + way);
        }
    });
}

void Cache::dirty(std::vector<u32>& tables, std::vector<u64>& keys, std::vector<u64>& lines) const {
    for (u32 slot = 0; slot < ways_.size(); ++slot) {
        if (ways_[slot].state != DIRTY) continue;
        tables.push_back(ways_[slot].table);
        keys.push_back(key_of(ways_[slot].table, ways_[slot].hash));
        lines.push_back(line_of(slot));
    }
}

void Cache::mark_clean() {
    for (Way& way : ways_)
        if (way.state == DIRTY) way.state = CLEAN;
}

std::size_t Cache::used() const {
    return static_cast<std::size_t>(
        std::count_if(ways_.begin(), ways_.end(), [](const Way& way) { return way.state != FREE; }));
}

}  // namespace tierbed
