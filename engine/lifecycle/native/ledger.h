// The ledger records how often and when each row was written. From these records, the ledger decides which new rows are
// admitted, and which rows expire or are evicted from their table.
//
// The ledger is always in host memory, and is called in step order. The decisions do not depend on tiers or threads, so
// every stack of tiers keeps the same rows.
#pragma once
#include <algorithm>
#include <array>
#include <vector>

#include "ops/kernels/hash.h"
#include "ops/native/batch.h"
#include "store/native/rows.h"

namespace tierbed {

// Estimates how many training steps looked up each refused row. Each bucket has a count-min sketch (Cormode and
// Muthukrishnan, 2005) with one-byte counts and conservative updates. A bucket halves its counts after every COLUMNS /
// 2 lookups. The counts decide which rows exist, so all processes must use the same hash, `hash_row`.
class FrequencySketch {
public:
    void allocate() { counts_.assign(std::size_t{BUCKETS} * DEPTH * COLUMNS, 0); }

    // Returns an estimate of the row's lookups since the last halving. Estimates may be too high. Counts stop at 255.
    u32 estimate_lookups(u64 hash, u32 table) const {
        u32 lowest = MAX_COUNT;
        for (const std::size_t cell : find_cells(hash, table)) lowest = std::min<u32>(lowest, counts_[cell]);
        return lowest;
    }
    // Counts a lookup of the row. Threads may call `add_lookup` in parallel for different buckets.
    void add_lookup(u64 hash, u32 table) {
        const u32 lowest = estimate_lookups(hash, table);
        for (const std::size_t cell : find_cells(hash, table))
            if (counts_[cell] == lowest && lowest < MAX_COUNT) ++counts_[cell];
        const u32 bucket = get_bucket(hash);
        if (++lookups_[bucket] < COLUMNS / 2) return;
        lookups_[bucket] = 0;
        u8* const first = &counts_[std::size_t{bucket} * DEPTH * COLUMNS];
        for (std::size_t i = 0; i < DEPTH * COLUMNS; ++i) first[i] /= 2;
    }
    std::size_t bytes() const { return counts_.size(); }

private:
    static constexpr std::size_t DEPTH = 4, COLUMNS = 1u << 16;
    static constexpr u32 MAX_COUNT = 255;

    std::array<std::size_t, DEPTH> find_cells(u64 hash, u32 table) const {
        const u64 cell_hash = hash_row(table, hash);
        std::array<std::size_t, DEPTH> cells;
        for (std::size_t k = 0; k < DEPTH; ++k)
            cells[k] = (get_bucket(hash) * DEPTH + k) * COLUMNS + (cell_hash >> 16 * k & (COLUMNS - 1));
        return cells;
    }

    std::vector<u8> counts_;
    std::array<u32, BUCKETS> lookups_{};
};

enum class Eviction : u32 { none, lru, lfu, ttl, distance_lfu };

struct Policy {
    Eviction eviction;
    std::size_t capacity;  // maximum row count; SIZE_MAX for no limit
    u64 ttl_steps;         // 0 if rows do not expire
    u32 min_lookups;       // how many training steps must look up a new row before it is admitted
    double probability;    // probability that a step admits a new row; used if < 1
    u64 seed;
};

struct Admission {
    std::size_t num_new = 0;      // how many new rows are admitted; 0 if nothing had to be decided
    std::size_t num_refused = 0;  // how many new rows are not admitted
    std::size_t num_excess = 0;   // how many rows exceed the capacity; if > 0, no row in the batch may be written
    RowKeys victims;              // the rows to erase before the batch is written
};

class Ledger {
public:
    explicit Ledger(const Policy& policy);
    Ledger(const Ledger&) = delete;

    // Decides which new rows of a batch to admit. Call before `step` writes the batch. Only a training step refuses
    // rows. A refused row gets a line in the batch with its initial values. Counts and ages do not change.
    Admission admit(Batch& batch, const Layout& layout, u32 step, bool is_training);
    // Counts a write of each admitted row in the batch, and a lookup of each refused row.
    void record_write(const Batch& batch, u32 step);
    // Returns the rows whose last write was more than ttl_steps ago.
    RowKeys find_expired(u32 step) const;

    // Adds distinct stored rows.
    void add_rows(const u32* tables, const u64* keys, const u32* updates, const u32* steps, std::size_t n);
    // Erases distinct rows. Returns how many of these rows the ledger contained.
    std::size_t erase(const u32* tables, const u64* keys, std::size_t n);

    std::size_t num_rows() const;
    std::size_t bytes() const;

private:
    struct Entry {
        u64 hash;
        u32 table;
        u32 updates;     // 0 if the entry is free
        u32 step;        // the step of the last write
        u32 last_batch;  // number of the last `admit` call whose batch contained the row
    };

    // A hash table with open addressing and linear probing. A row's home slot is proportional to the low half of its
    // hash. This works for any number of entries, so the table can grow by a quarter.
    struct Bucket {
        std::vector<Entry> entries;
        std::size_t num_rows = 0;

        std::size_t home_slot(u64 hash) const { return (hash & 0xFFFFFFFFu) * entries.size() >> 32; }
        std::size_t next_slot(std::size_t slot) const { return slot + 1 == entries.size() ? 0 : slot + 1; }
        TIERBED_INLINE void prefetch_slot(u64 hash) const { prefetch(entries.data() + home_slot(hash)); }
        // Returns the row's slot, or the free slot where its search ends.
        std::size_t find_slot(u64 hash, u32 table) const;
        Entry& find_or_insert(u64 hash, u32 table);
        bool erase(u64 hash, u32 table);
        void grow();
    };

    // True if a training step admits a new row.
    bool is_admitted(u64 hash, u32 table, u32 step) const;
    bool is_expired(const Entry& entry, u32 step) const;
    u64 compute_score(const Entry& entry, u32 step) const;
    struct Candidate {
        u64 score;  // the lowest score is evicted first; ties are broken by table and hash
        u64 hash;   // the row's `hash_row`, the same in every process
        u64 slot_hash;
        u32 table;
        bool operator<(const Candidate& other) const;
    };
    // Returns a bucket's evictable rows with a score up to `highest`.
    std::vector<Candidate> find_candidates(u32 bucket, u32 step, const Candidate& highest) const;
    // Returns the lowest-scored rows that may be evicted: at least `num_needed`, or all if there are fewer.
    RowKeys choose_victims(std::size_t num_needed, u32 step) const;

    Policy policy_;
    std::array<Bucket, BUCKETS> buckets_;
    FrequencySketch sketch_;
    u32 last_batch_ = 0;
};

}  // namespace tierbed
