#include "ledger.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "ops/native/thread_pool.h"

namespace tierbed {
namespace {

constexpr std::size_t AHEAD = 8;               // rows whose entries are prefetched before they are probed
constexpr std::size_t EVICTION_FRACTION = 64;  // evict at least capacity / 64 rows, because each search reads all rows
constexpr std::size_t SPARE_CANDIDATES = 32;   // candidates per bucket beyond its expected victims
constexpr std::size_t MIN_ENTRIES = 16;        // initial size of a bucket

u64 age(u32 step, u32 now) { return now > step ? now - step : 0; }

}  // namespace

std::size_t Ledger::Bucket::find_slot(u64 hash, u32 table) const {
    std::size_t at = home(hash);
    while (entries[at].updates != 0 && (entries[at].hash != hash || entries[at].table != table)) at = next(at);
    return at;
}

Ledger::Entry& Ledger::Bucket::find_or_insert(u64 hash, u32 table) {
    std::size_t at = find_slot(hash, table);
    if (entries[at].updates == 0) {
        if ((rows + 1) * 5 > entries.size() * 4) {
            grow();
            at = find_slot(hash, table);
        }
        entries[at] = {hash, table, 0, 0, 0};
        ++rows;
    }
    return entries[at];
}

bool Ledger::Bucket::erase(u64 hash, u32 table) {
    std::size_t hole = find_slot(hash, table);
    if (entries[hole].updates == 0) return false;
    const auto distance = [&](std::size_t from, std::size_t to) {
        return to >= from ? to - from : to + entries.size() - from;
    };
    for (std::size_t at = next(hole); entries[at].updates != 0; at = next(at)) {
        if (distance(home(entries[at].hash), at) < distance(hole, at)) continue;  // the entry's home is after the hole
        entries[hole] = entries[at];
        hole = at;
    }
    entries[hole].updates = 0;
    --rows;
    return true;
}

void Ledger::Bucket::grow() {
    std::vector<Entry> before(entries.size() + entries.size() / 4);
    before.swap(entries);
    for (const Entry& entry : before)
        if (entry.updates != 0) entries[find_slot(entry.hash, entry.table)] = entry;
}

Ledger::Ledger(const Policy& policy) : policy_(policy) {
    for (Bucket& bucket : buckets_) bucket.entries.resize(MIN_ENTRIES);
    if (policy.min_lookups > 1) sketch_.begin();
}

bool Ledger::is_admitted(u64 hash, u32 table, u32 now) const {
    const u64 fixed = slot_hash.row_hash(table, hash);
    if (policy_.min_lookups > 1) return sketch_.count(fixed, table) + 1 >= policy_.min_lookups;
    const u64 draw = hash_row(table, fixed ^ hash_row(now, policy_.seed));
    return static_cast<double>(draw >> 11) * 0x1p-53 < policy_.chance;
}

Admitted Ledger::admit(Batch& batch, const Layout& layout, u32 now, bool training) {
    const bool refuses = training && (policy_.min_lookups > 1 || policy_.chance < 1);
    const std::size_t rows_before = rows();
    Admitted admitted;
    if (!refuses && batch.num_unique <= policy_.capacity - std::min(rows_before, policy_.capacity)) return admitted;
    ++batch_;
    const BucketOrder& order = batch.buckets();
    std::array<std::size_t, BUCKETS> fresh{}, refused{};
    Buffer<u64> own(batch.num_unique);
    parallel_for(BUCKETS, [&](std::size_t b) {
        Bucket& bucket = buckets_[b];
        const std::size_t end = order.bucket_begins[b + 1];
        for (std::size_t k = order.bucket_begins[b]; k < end; ++k) {
            if (k + AHEAD < end) bucket.prefetch_slot(batch.hashes[order.row(k + AHEAD)]);
            const std::size_t i = order.row(k);
            own[i] = 0;
            Entry& entry = bucket.entries[bucket.find_slot(batch.hashes[i], batch.tables[i])];
            if (entry.updates != 0) {
                entry.batch = batch_;
            } else if (refuses && !is_admitted(batch.hashes[i], batch.tables[i], now)) {
                own[i] = 1;
                ++refused[b];
            } else {
                ++fresh[b];
            }
        }
    });
    admitted.fresh = std::accumulate(fresh.begin(), fresh.end(), std::size_t{0});
    admitted.refused = std::accumulate(refused.begin(), refused.end(), std::size_t{0});
    if (admitted.fresh != 0 && rows_before + admitted.fresh > policy_.capacity) {
        const std::size_t excess = rows_before + admitted.fresh - policy_.capacity;
        admitted.victims = choose_victims(excess, now);
        const std::size_t evictable = admitted.victims.tables.size();
        if (evictable < excess) {
            admitted.lacking = excess - evictable;
            return admitted;
        }
    }
    if (admitted.refused == 0) return admitted;
    const std::vector<u64> lines = batch.allocate(admitted.refused, layout.shape);
    std::size_t next_line = 0;
    for (std::size_t i = 0; i < batch.num_unique; ++i)
        if (own[i]) own[i] = lines[next_line++];
    parallel_for(BUCKETS, [&](std::size_t b) {
        for (std::size_t k = order.bucket_begins[b]; k < order.bucket_begins[b + 1]; ++k)
            if (const std::size_t i = order.row(k); own[i])
                layout.initialise(own[i], batch.tables[i], batch.key(i));
    });
    batch.own_lines = std::move(own);
    return admitted;
}

void Ledger::commit(const Batch& batch, u32 now) {
    const BucketOrder& order = batch.buckets();
    parallel_for(BUCKETS, [&](std::size_t b) {
        Bucket& bucket = buckets_[b];
        const std::size_t end = order.bucket_begins[b + 1];
        for (std::size_t k = order.bucket_begins[b]; k < end; ++k) {
            if (k + AHEAD < end) bucket.prefetch_slot(batch.hashes[order.row(k + AHEAD)]);
            const std::size_t i = order.row(k);
            if (batch.own_lines.size() && batch.own_lines[i]) {
                if (policy_.min_lookups > 1) sketch_.add(batch.row_hash(i), batch.tables[i]);
                continue;
            }
            Entry& entry = bucket.find_or_insert(batch.hashes[i], batch.tables[i]);
            if (entry.updates != 0xFFFFFFFFu) ++entry.updates;
            entry.step = now;
        }
    });
}

bool Ledger::is_expired(const Entry& entry, u32 now) const { return age(entry.step, now) > policy_.ttl_steps; }

u64 Ledger::rank_of(const Entry& entry, u32 now) const {
    if (policy_.eviction == Eviction::lfu) return static_cast<u64>(entry.updates) << 32 | entry.step;
    if (policy_.eviction != Eviction::distance_lfu) return entry.step;
    const double distance = static_cast<double>(age(entry.step, now) + 1);
    return as_bits(static_cast<double>(entry.updates) / (distance * distance));  // floats >= 0 sort like their bits
}

bool Ledger::Candidate::operator<(const Candidate& other) const {
    return std::tie(rank, table, hash) < std::tie(other.rank, other.table, other.hash);
}

std::vector<Ledger::Candidate> Ledger::candidates(u32 bucket, u32 now, const Candidate& highest) const {
    std::vector<Candidate> found;
    for (const Entry& entry : buckets_[bucket].entries) {
        if (entry.updates == 0 || entry.batch == batch_) continue;
        if (policy_.eviction == Eviction::ttl && !is_expired(entry, now)) continue;
        const u64 rank = rank_of(entry, now);
        if (rank > highest.rank) continue;
        const Candidate candidate{rank, slot_hash.row_hash(entry.table, entry.hash), entry.hash, entry.table};
        if (!(highest < candidate)) found.push_back(candidate);
    }
    return found;
}

RowKeys Ledger::choose_victims(std::size_t needed, u32 now) const {
    if (policy_.eviction == Eviction::none) return {};
    const std::size_t target = std::max(needed, policy_.capacity / EVICTION_FRACTION);
    // Rows are spread evenly over buckets, so the first bucket suffices to estimate the highest rank of all victims.
    constexpr Candidate last{~u64{0}, ~u64{0}, ~u64{0}, ~u32{0}};
    Candidate highest = last;
    std::vector<Candidate> victims = candidates(0, now, last);
    if (const std::size_t nth = target / BUCKETS * 5 / 4 + SPARE_CANDIDATES; nth < victims.size()) {
        std::nth_element(victims.begin(), victims.begin() + static_cast<std::ptrdiff_t>(nth), victims.end());
        highest = victims[nth];
    }
    std::array<std::vector<Candidate>, BUCKETS> by_bucket;
    const auto gather = [&] {
        parallel_for(BUCKETS, [&](std::size_t b) { by_bucket[b] = candidates(static_cast<u32>(b), now, highest); });
        victims.clear();
        for (const std::vector<Candidate>& part : by_bucket) victims.insert(victims.end(), part.begin(), part.end());
    };
    gather();
    if (victims.size() < target && highest < last) {
        highest = last;
        gather();
    }
    if (victims.size() > target) {
        std::nth_element(victims.begin(), victims.begin() + static_cast<std::ptrdiff_t>(target), victims.end());
        victims.resize(target);
    }
    std::sort(victims.begin(), victims.end(), [](const Candidate& a, const Candidate& b) { return a.hash < b.hash; });
    RowKeys all;
    for (const Candidate& victim : victims) {
        all.tables.push_back(victim.table);
        all.keys.push_back(get_key(victim.table, victim.slot_hash));
    }
    return all;
}

RowKeys Ledger::expired(u32 now) const {
    std::array<RowKeys, BUCKETS> parts;
    parallel_for(BUCKETS, [&](std::size_t b) {
        for (const Entry& entry : buckets_[b].entries) {
            if (entry.updates == 0 || !is_expired(entry, now)) continue;
            parts[b].tables.push_back(entry.table);
            parts[b].keys.push_back(get_key(entry.table, entry.hash));
        }
    });
    RowKeys all;
    for (const RowKeys& part : parts) {
        all.tables.insert(all.tables.end(), part.tables.begin(), part.tables.end());
        all.keys.insert(all.keys.end(), part.keys.begin(), part.keys.end());
    }
    return all;
}

void Ledger::load(const u32* tables, const u64* keys, const u32* updates, const u32* steps, std::size_t n) {
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
        if (i + AHEAD < n) {
            const u64 later = slot_hash(tables[i + AHEAD], keys[i + AHEAD]);
            buckets_[get_bucket(later)].prefetch_slot(later);
        }
        const u64 hash = slot_hash(tables[i], keys[i]);
        count += buckets_[get_bucket(hash)].erase(hash, tables[i]);
    }
    return count;
}

std::size_t Ledger::rows() const {
    return std::accumulate(buckets_.begin(), buckets_.end(), std::size_t{0},
                           [](std::size_t total, const Bucket& bucket) { return total + bucket.rows; });
}

std::size_t Ledger::bytes() const {
    return std::accumulate(
        buckets_.begin(), buckets_.end(), sketch_.bytes(),
        [](std::size_t total, const Bucket& bucket) { return total + bucket.entries.capacity() * sizeof(Entry); });
}

}  // namespace tierbed
