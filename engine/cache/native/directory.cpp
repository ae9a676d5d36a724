#include "directory.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "ops/native/thread_pool.h"

namespace tierbed {

CacheSets::CacheSets(const LineShape& shape, std::size_t budget_bytes, CachePolicy policy)
    : shape_(shape), policy_(policy) {
    const std::size_t set_bytes = WAYS * (shape_.line_bytes + sizeof(Way) + sizeof(u8));
    const std::size_t sets = std::min<std::size_t>(budget_bytes / set_bytes, NONE / WAYS);
    if (sets == 0) throw std::invalid_argument("one set takes " + std::to_string(set_bytes) + " bytes");
    num_sets_ = static_cast<u32>(sets);
    tags_ = Pages(sets * WAYS);
    ways_ = Pages(sets * WAYS * sizeof(Way));
    lines_ = Pages(sets * WAYS * shape_.line_bytes);
}

std::size_t CacheSets::count_used_slots() const {
    return num_slots() - static_cast<std::size_t>(std::count(tags(), tags() + num_slots(), 0));
}

namespace {

constexpr u32 MAX_AGE = 1u << 30;              // limit for a row's age, in batches
constexpr std::size_t PREFETCH_DISTANCE = 16;  // ways are prefetched this many rows ahead, tags twice as many

}  // namespace

CacheCounts& CacheCounts::operator+=(const CacheCounts& other) {
    insertions += other.insertions;
    evictions_clean += other.evictions_clean;
    evictions_dirty += other.evictions_dirty;
    overflows += other.overflows;
    return *this;
}

void Directory::announce(const RequestedRows& batch, u32 batch_number) {
    window.add_batch(batch_number);
    parallel_for(BUCKETS, [&](std::size_t b) {
        const u32 bucket = static_cast<u32>(b);
        const std::size_t end = batch.bucket_offsets[b + 1];
        for (std::size_t i = batch.bucket_offsets[b]; i < end; ++i) {
            if (i + 2 * PREFETCH_DISTANCE < end) sets.prefetch_tags(batch.hashes[i + 2 * PREFETCH_DISTANCE]);
            if (const std::size_t k = i + PREFETCH_DISTANCE; k < end) {
                if (!sets.prefetch_way(batch.hashes[k])) overflow.prefetch_slot(batch.hashes[k]);
                window.prefetch_slot(bucket, batch.hashes[k]);
            }
            if (!window.add_row(bucket, batch.hashes[i], batch.tables[i])) continue;  // an earlier batch needs the row
            const Location location = find(batch.hashes[i], batch.tables[i]);
            if (location.way) location.way->next_batch = batch_number;
        }
    });
}

void Directory::begin_batch(u32 batch_number) {
    if (batch_number % MAX_AGE == 0)  // batch numbers wrap around, so old rows get a newer number
        for_each_row([&](Way& way, u64, i64) {
            if (is_after(batch_number - MAX_AGE, way.last_batch)) way.last_batch = batch_number - MAX_AGE;
        });
    has_later_batch_ = window.has_batch_after(batch_number);
    window.remove(batch_number);
}

void Directory::probe(const RequestedRows& batch, u32 batch_number, bool should_pin) {
    if (should_pin) begin_batch(batch_number);
    parallel_for(BUCKETS, [&](std::size_t b) {
        const u32 bucket = static_cast<u32>(b);
        std::vector<Miss>& misses = misses_[b];
        misses.clear();
        const std::size_t end = batch.bucket_offsets[b + 1];
        for (std::size_t i = batch.bucket_offsets[b]; i < end; ++i) {
            if (i + 2 * PREFETCH_DISTANCE < end) sets.prefetch_tags(batch.hashes[i + 2 * PREFETCH_DISTANCE]);
            if (const std::size_t k = i + PREFETCH_DISTANCE; k < end) {
                if (!sets.prefetch_way(batch.hashes[k])) overflow.prefetch_slot(batch.hashes[k]);
                if (has_later_batch_) window.prefetch_slot(bucket, batch.hashes[k]);
            }
            if (batch.refused_lines && batch.refused_lines[i]) {
                batch.lines[i] = batch.refused_lines[i];
                if (should_pin) take_next_batch(batch, bucket, i, batch_number);
                continue;
            }
            const u32 slot = sets.find(batch.hashes[i], batch.tables[i]);
            if (slot != NONE) {
                batch.lines[i] = sets.line(slot);
                if (should_pin) touch(sets.way(slot), batch_number, take_next_batch(batch, bucket, i, batch_number));
                continue;
            }
            const u32 entry = overflow.empty() ? NONE : overflow.find(batch.hashes[i], batch.tables[i]);
            misses.push_back({static_cast<u32>(i), entry, entry == NONE ? 0 : overflow.at(entry).way.last_batch});
            if (should_pin && entry != NONE) overflow.at(entry).way.last_batch = batch_number;
            batch.lines[i] = 0;
        }
    });
}

void Directory::count_hits(const RequestedRows& batch, HitCounts& counts) const {
    parallel_for(BUCKETS, batch.size(), [&](std::size_t b) {
        HitCounts::TaskCounts hits = counts.task_counts(b);
        for (std::size_t i = batch.bucket_offsets[b]; i < batch.bucket_offsets[b + 1]; ++i)
            if (!batch.refused_lines || !batch.refused_lines[i]) hits.add(batch.tables[i], true);
        for (const Miss& miss : misses_[b])
            if (miss.old_entry == NONE) hits.turn_into_miss(batch.tables[miss.row]);
    });
}

void Directory::pin(const RequestedRows& batch, u32 batch_number) {
    begin_batch(batch_number);
    parallel_for(BUCKETS, [&](std::size_t b) {
        for (std::size_t i = batch.bucket_offsets[b]; i < batch.bucket_offsets[b + 1]; ++i)
            if (batch.lines[i])
                touch(sets.way(sets.slot(batch.lines[i])), batch_number,
                      take_next_batch(batch, static_cast<u32>(b), i, batch_number));
        for (const Miss& miss : misses_[b])
            if (miss.old_entry != NONE) overflow.at(miss.old_entry).way.last_batch = batch_number;
    });
}

std::size_t Directory::overflow_demand() const {
    std::size_t rows = 0;
    for_each_miss(
        [&](const Miss& miss) { rows += miss.old_entry == NONE || overflow.at(miss.old_entry).is_being_written; });
    return rows;
}

void Directory::choose_victims(const RequestedRows& batch, u32 batch_number, u32 last_completed) {
    std::array<CacheCounts, BUCKETS> part_counts;
    const auto choose_in_bucket = [&](std::size_t b) {
        std::vector<Miss>& misses = misses_[b];
        for (Miss& miss : misses) miss.next_batch = take_next_batch(batch, static_cast<u32>(b), miss.row, batch_number);
        if (has_later_batch_)
            std::stable_sort(misses.begin(), misses.end(), [&](const Miss& one, const Miss& other) {
                return count_batches_until(one.next_batch, batch_number) <
                       count_batches_until(other.next_batch, batch_number);
            });
        for (std::size_t k = 0; k < misses.size(); ++k) {
            if (const std::size_t later = k + PREFETCH_DISTANCE; later < misses.size())
                sets.prefetch_ways(batch.hashes[misses[later].row]);
            Miss& miss = misses[k];
            const u64 hash = batch.hashes[miss.row];
            const u32 table = batch.tables[miss.row], next = miss.next_batch;
            Way way{hash, table, batch_number, next, 1, 0, 0};
            if (miss.old_entry != NONE) {
                touch(overflow.at(miss.old_entry).way, batch_number, next);
                way = overflow.at(miss.old_entry).way;
            }
            miss.displaced_way = way;
            const bool stays_in_overflow = miss.old_entry != NONE && is_after(miss.last_batch, last_completed);
            miss.slot = stays_in_overflow ? NONE : sets.find_victim_slot(hash, batch_number, last_completed);
            if (miss.slot == NONE) {
                ++part_counts[b].overflows;
                continue;
            }
            ++part_counts[b].insertions;
            miss.is_slot_free = sets.is_free(miss.slot);
            if (!miss.is_slot_free) miss.displaced_way = sets.way(miss.slot);
            sets.prefetch_counters(miss.slot);
            sets.fill(miss.slot, way);
        }
        for (Miss& miss : misses) {
            if (miss.slot == NONE || miss.is_slot_free) continue;
            miss.is_victim_dirty = is_dirty(sets.updates(miss.slot), miss.displaced_way.stored_updates);
            ++(miss.is_victim_dirty ? part_counts[b].evictions_dirty : part_counts[b].evictions_clean);
        }
    };
    if (sets.has_one_bucket_per_set())
        parallel_for(BUCKETS, choose_in_bucket);
    else
        for (std::size_t b = 0; b < BUCKETS; ++b) choose_in_bucket(b);
    counts_ = {};
    for (const CacheCounts& part : part_counts) counts_ += part;
}

void Directory::undo_victims() {
    for_each_miss([&](const Miss& miss) {
        if (miss.slot == NONE) return;
        if (miss.is_slot_free)
            sets.free(miss.slot);
        else
            sets.fill(miss.slot, miss.displaced_way);
    });
}

void Directory::prefetch_lines(const Miss& miss) const {
    if (miss.slot != NONE) prefetch_to_write(sets.line(miss.slot), shape_.line_bytes);
    if (miss.slot != NONE && miss.old_entry != NONE) prefetch_bytes(overflow.line(miss.old_entry), shape_.line_bytes);
}

void Directory::place_misses(const RequestedRows& batch, bool keep_victims) {
    for (std::vector<Miss>& bucket : misses_) {
        for (std::size_t k = 0; k < bucket.size(); ++k) {
            if (k + PREFETCH_DISTANCE < bucket.size()) prefetch_lines(bucket[k + PREFETCH_DISTANCE]);
            Miss& miss = bucket[k];
            u64& line = batch.lines[miss.row];
            if (miss.slot != NONE) {
                line = sets.line(miss.slot);
                if (miss.is_victim_dirty && keep_victims)
                    copy_line(THREAD, overflow.line(overflow.add(miss.displaced_way, true, true)), line, shape_);
                if (miss.old_entry == NONE) continue;
                copy_line(THREAD, line, overflow.line(miss.old_entry), shape_);
                overflow.remove(miss.old_entry);
            } else if (miss.old_entry == NONE) {
                miss.new_entry = overflow.add(miss.displaced_way, false);
                line = overflow.line(miss.new_entry);
            } else if (overflow.at(miss.old_entry).is_being_written) {  // copy: the writer must not see changes
                const u64 old_line = overflow.line(miss.old_entry);
                overflow.remove(miss.old_entry);
                line = overflow.line(overflow.add(miss.displaced_way, false));
                copy_line(THREAD, line, old_line, shape_);
            } else {
                line = overflow.line(miss.old_entry);
            }
        }
    }
}

void Directory::set_stored_updates(const u32* updates) {
    for_each_miss([&](const Miss& miss) {
        if (miss.old_entry != NONE) return;
        (miss.slot == NONE ? overflow.at(miss.new_entry).way : sets.way(miss.slot)).stored_updates = *updates++;
    });
}

void Directory::drop_unfetched_rows() {
    for_each_miss([&](const Miss& miss) {
        if (miss.old_entry != NONE) return;
        if (miss.slot == NONE)
            overflow.remove(miss.new_entry);
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
