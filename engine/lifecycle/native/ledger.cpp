#include "ledger.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "ops/native/thread_pool.h"

namespace tierbed {
namespace {

constexpr std::size_t PREFETCH_DISTANCE = 8;   // in rows
constexpr std::size_t EVICTION_FRACTION = 64;  // evict at least capacity / 64 rows, because each search reads all rows
constexpr std::size_t SPARE_CANDIDATES = 32;   // extra candidates per bucket, beyond its expected number of victims
constexpr std::size_t MIN_ENTRIES = 16;        // initial number of entries in a bucket

u64 get_age(u32 written, u32 step) { return step > written ? step - written : 0; }

}  // namespace

std::size_t Ledger::Bucket::find_slot(u64 hash, u32 table) const {
    std::size_t slot = home_slot(hash);
    while (entries[slot].updates != 0 && (entries[slot].hash != hash || entries[slot].table != table))
        slot = next_slot(slot);
    return slot;
}

Ledger::Entry& Ledger::Bucket::find_or_insert(u64 hash, u32 table) {
    std::size_t slot = find_slot(hash, table);
    if (entries[slot].updates == 0) {
        if ((num_rows + 1) * 5 > entries.size() * 4) {
            grow();
            slot = find_slot(hash, table);
        }
        entries[slot] = {hash, table, 0, 0, 0};
        ++num_rows;
    }
    return entries[slot];
}

bool Ledger::Bucket::erase(u64 hash, u32 table) {
    std::size_t hole = find_slot(hash, table);
    if (entries[hole].updates == 0) return false;
    const auto distance = [&](std::size_t from, std::size_t to) {
        return to >= from ? to - from : to + entries.size() - from;
    };
    for (std::size_t slot = next_slot(hole); entries[slot].updates != 0; slot = next_slot(slot)) {
        if (distance(home_slot(entries[slot].hash), slot) < distance(hole, slot)) continue;  // home is after the hole
        entries[hole] = entries[slot];
        hole = slot;
    }
    entries[hole].updates = 0;
    --num_rows;
    return true;
}

void Ledger::Bucket::grow() {
    std::vector<Entry> old_entries(entries.size() + entries.size() / 4);
    old_entries.swap(entries);
    for (const Entry& entry : old_entries)
        if (entry.updates != 0) entries[find_slot(entry.hash, entry.table)] = entry;
}

Ledger::Ledger(const Policy& policy) : policy_(policy) {
    for (Bucket& bucket : buckets_) bucket.entries.resize(MIN_ENTRIES);
    if (policy.min_lookups > 1) sketch_.allocate();
}

bool Ledger::is_admitted(u64 hash, u32 table, u32 step) const {
    const u64 row_hash = slot_hash.row_hash(table, hash);
    if (policy_.min_lookups > 1) return sketch_.estimate_lookups(row_hash, table) + 1 >= policy_.min_lookups;
    const u64 draw = hash_row(table, row_hash ^ hash_row(step, policy_.seed));
    return static_cast<double>(draw >> 11) * 0x1p-53 < policy_.probability;
}

Admission Ledger::admit(Batch& batch, const Layout& layout, u32 step, bool is_training) {
    const bool has_admission_rule = is_training && (policy_.min_lookups > 1 || policy_.probability < 1);
    const std::size_t num_rows_before = num_rows();
    Admission admission;
    const std::size_t num_free = policy_.capacity - std::min(num_rows_before, policy_.capacity);
    if (!has_admission_rule && batch.num_unique <= num_free) return admission;
    ++last_batch_;
    const BucketOrder& order = batch.buckets();
    std::array<std::size_t, BUCKETS> num_new{}, num_refused{};
    Buffer<u64> refused_lines(batch.num_unique);
    parallel_for(BUCKETS, [&](std::size_t b) {
        Bucket& bucket = buckets_[b];
        const std::size_t end = order.bucket_offsets[b + 1];
        for (std::size_t k = order.bucket_offsets[b]; k < end; ++k) {
            if (k + PREFETCH_DISTANCE < end) bucket.prefetch_slot(batch.hashes[order.row(k + PREFETCH_DISTANCE)]);
            const std::size_t i = order.row(k);
            refused_lines[i] = 0;
            Entry& entry = bucket.entries[bucket.find_slot(batch.hashes[i], batch.tables[i])];
            if (entry.updates != 0) {
                entry.last_batch = last_batch_;
            } else if (has_admission_rule && !is_admitted(batch.hashes[i], batch.tables[i], step)) {
                refused_lines[i] = 1;
                ++num_refused[b];
            } else {
                ++num_new[b];
            }
        }
    });
    admission.num_new = std::accumulate(num_new.begin(), num_new.end(), std::size_t{0});
    admission.num_refused = std::accumulate(num_refused.begin(), num_refused.end(), std::size_t{0});
    if (admission.num_new != 0 && num_rows_before + admission.num_new > policy_.capacity) {
        const std::size_t excess = num_rows_before + admission.num_new - policy_.capacity;
        admission.victims = choose_victims(excess, step);
        const std::size_t evictable = admission.victims.tables.size();
        if (evictable < excess) {
            admission.num_excess = excess - evictable;
            return admission;
        }
    }
    if (admission.num_refused == 0) return admission;
    const std::vector<u64> lines = batch.allocate_lines(admission.num_refused, layout.shape);
    std::size_t next_line = 0;
    for (std::size_t i = 0; i < batch.num_unique; ++i)
        if (refused_lines[i]) refused_lines[i] = lines[next_line++];
    parallel_for(BUCKETS, [&](std::size_t b) {
        for (std::size_t k = order.bucket_offsets[b]; k < order.bucket_offsets[b + 1]; ++k)
            if (const std::size_t i = order.row(k); refused_lines[i])
                layout.initialise(refused_lines[i], batch.tables[i], batch.key(i));
    });
    batch.refused_lines = std::move(refused_lines);
    return admission;
}

void Ledger::record_write(const Batch& batch, u32 step) {
    const BucketOrder& order = batch.buckets();
    parallel_for(BUCKETS, [&](std::size_t b) {
        Bucket& bucket = buckets_[b];
        const std::size_t end = order.bucket_offsets[b + 1];
        for (std::size_t k = order.bucket_offsets[b]; k < end; ++k) {
            if (k + PREFETCH_DISTANCE < end) bucket.prefetch_slot(batch.hashes[order.row(k + PREFETCH_DISTANCE)]);
            const std::size_t i = order.row(k);
            if (batch.refused_lines.size() && batch.refused_lines[i]) {
                if (policy_.min_lookups > 1) sketch_.add_lookup(batch.row_hash(i), batch.tables[i]);
                continue;
            }
            Entry& entry = bucket.find_or_insert(batch.hashes[i], batch.tables[i]);
            if (entry.updates != 0xFFFFFFFFu) ++entry.updates;
            entry.step = step;
        }
    });
}

bool Ledger::is_expired(const Entry& entry, u32 step) const { return get_age(entry.step, step) > policy_.ttl_steps; }

u64 Ledger::compute_score(const Entry& entry, u32 step) const {
    if (policy_.eviction == Eviction::lfu) return static_cast<u64>(entry.updates) << 32 | entry.step;
    if (policy_.eviction != Eviction::distance_lfu) return entry.step;
    const double distance = static_cast<double>(get_age(entry.step, step) + 1);
    return as_bits(static_cast<double>(entry.updates) / (distance * distance));  // floats >= 0 sort like their bits
}

bool Ledger::Candidate::operator<(const Candidate& other) const {
    return std::tie(score, table, hash) < std::tie(other.score, other.table, other.hash);
}

std::vector<Ledger::Candidate> Ledger::find_candidates(u32 bucket, u32 step, const Candidate& highest) const {
    std::vector<Candidate> candidates;
    for (const Entry& entry : buckets_[bucket].entries) {
        if (entry.updates == 0 || entry.last_batch == last_batch_) continue;
        if (policy_.eviction == Eviction::ttl && !is_expired(entry, step)) continue;
        const u64 score = compute_score(entry, step);
        if (score > highest.score) continue;
        const Candidate candidate{score, slot_hash.row_hash(entry.table, entry.hash), entry.hash, entry.table};
        if (!(highest < candidate)) candidates.push_back(candidate);
    }
    return candidates;
}

RowKeys Ledger::choose_victims(std::size_t num_needed, u32 step) const {
    if (policy_.eviction == Eviction::none) return {};
    const std::size_t num_victims = std::max(num_needed, policy_.capacity / EVICTION_FRACTION);
    // Rows are spread evenly over buckets, so the first bucket suffices to estimate the highest score of all victims.
    constexpr Candidate worst{~u64{0}, ~u64{0}, ~u64{0}, ~u32{0}};
    Candidate highest = worst;
    std::vector<Candidate> victims = find_candidates(0, step, worst);
    if (const std::size_t index = num_victims / BUCKETS * 5 / 4 + SPARE_CANDIDATES; index < victims.size()) {
        std::nth_element(victims.begin(), victims.begin() + static_cast<std::ptrdiff_t>(index), victims.end());
        highest = victims[index];
    }
    std::array<std::vector<Candidate>, BUCKETS> by_bucket;
    const auto collect_victims = [&] {
        parallel_for(BUCKETS, [&](u64 b) { by_bucket[b] = find_candidates(static_cast<u32>(b), step, highest); });
        victims.clear();
        for (const std::vector<Candidate>& part : by_bucket) victims.insert(victims.end(), part.begin(), part.end());
    };
    collect_victims();
    if (victims.size() < num_victims && highest < worst) {
        highest = worst;
        collect_victims();
    }
    if (victims.size() > num_victims) {
        std::nth_element(victims.begin(), victims.begin() + static_cast<std::ptrdiff_t>(num_victims), victims.end());
        victims.resize(num_victims);
    }
    std::sort(victims.begin(), victims.end(), [](const Candidate& a, const Candidate& b) { return a.hash < b.hash; });
    RowKeys rows;
    for (const Candidate& victim : victims) {
        rows.tables.push_back(victim.table);
        rows.keys.push_back(get_key(victim.table, victim.slot_hash));
    }
    return rows;
}

RowKeys Ledger::find_expired(u32 step) const {
    std::array<RowKeys, BUCKETS> parts;
    parallel_for(BUCKETS, [&](std::size_t b) {
        for (const Entry& entry : buckets_[b].entries) {
            if (entry.updates == 0 || !is_expired(entry, step)) continue;
            parts[b].tables.push_back(entry.table);
            parts[b].keys.push_back(get_key(entry.table, entry.hash));
        }
    });
    RowKeys rows;
    for (const RowKeys& part : parts) {
        rows.tables.insert(rows.tables.end(), part.tables.begin(), part.tables.end());
        rows.keys.insert(rows.keys.end(), part.keys.begin(), part.keys.end());
    }
    return rows;
}

void Ledger::add_rows(const u32* tables, const u64* keys, const u32* updates, const u32* steps, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) {
        const u64 hash = slot_hash(tables[i], keys[i]);
        Entry& entry = buckets_[get_bucket(hash)].find_or_insert(hash, tables[i]);
        entry.updates = updates[i];
        entry.step = steps[i];
    }
}

std::size_t Ledger::erase(const u32* tables, const u64* keys, std::size_t n) {
    std::size_t count = 0;
    for (std::size_t i = 0; i < n; ++i) {
        if (const std::size_t k = i + PREFETCH_DISTANCE; k < n) {
            const u64 next_hash = slot_hash(tables[k], keys[k]);
            buckets_[get_bucket(next_hash)].prefetch_slot(next_hash);
        }
        const u64 hash = slot_hash(tables[i], keys[i]);
        count += buckets_[get_bucket(hash)].erase(hash, tables[i]);
    }
    return count;
}

std::size_t Ledger::num_rows() const {
    return std::accumulate(buckets_.begin(), buckets_.end(), std::size_t{0},
                           [](std::size_t total, const Bucket& bucket) { return total + bucket.num_rows; });
}

std::size_t Ledger::bytes() const {
    return std::accumulate(
        buckets_.begin(), buckets_.end(), sketch_.bytes(),
        [](std::size_t total, const Bucket& bucket) { return total + bucket.entries.capacity() * sizeof(Entry); });
}

}  // namespace tierbed
