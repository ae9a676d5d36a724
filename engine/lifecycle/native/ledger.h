// How often and when each row was written: what decides which rows may stay, and which new ones are kept.
//
// It is kept in host memory, whatever tiers the rows are in, and asked in the order of steps; nothing that tiers or
// threads do reaches it. So every stack keeps the same rows.
#pragma once
#include <algorithm>
#include <array>
#include <vector>

#include "ops/kernels/hash.h"
#include "ops/native/batch.h"
#include "store/native/rows.h"

namespace tierbed {

// About how many training steps looked up each row that is not kept: a count-min sketch (Cormode and Muthukrishnan,
// 2005) of bytes for each bucket, counting conservatively, halved when it has taken half as many sights as it is wide.
class FrequencySketch {
public:
    void begin() { counts_.assign(std::size_t{BUCKETS} * DEPTH * COLUMNS, 0); }
    bool empty() const { return counts_.empty(); }

    // Never less than the sights since the last halving; 255 at most.
    u32 count(u64 hash, u32 table) const {
        u32 least = MOST;
        for (const std::size_t at : places(hash, table)) least = std::min<u32>(least, counts_[at]);
        return least;
    }
    // Buckets may be used in several threads.
    void add(u64 hash, u32 table) {
        const u32 least = count(hash, table);
        for (const std::size_t at : places(hash, table))
            if (counts_[at] == least && least < MOST) ++counts_[at];
        const u32 bucket = bucket_of(hash);
        if (++taken_[bucket] < COLUMNS / 2) return;
        taken_[bucket] = 0;
        u8* const first = &counts_[std::size_t{bucket} * DEPTH * COLUMNS];
        for (std::size_t i = 0; i < DEPTH * COLUMNS; ++i) first[i] /= 2;
    }
    std::size_t bytes() const { return counts_.size(); }

private:
    static constexpr std::size_t DEPTH = 4, COLUMNS = 1u << 16;
    static constexpr u32 MOST = 255;

    std::array<std::size_t, DEPTH> places(u64 hash, u32 table) const {
        const u64 mixed = hash_row(table, hash);
        std::array<std::size_t, DEPTH> at;
        for (std::size_t k = 0; k < DEPTH; ++k)
            at[k] = (bucket_of(hash) * DEPTH + k) * COLUMNS + (mixed >> 16 * k & (COLUMNS - 1));
        return at;
    }

    std::vector<u8> counts_;
    std::array<u32, BUCKETS> taken_{};
};

enum class Eviction : u32 { none, lru, lfu, ttl, distance_lfu };

struct Policy {
    Eviction eviction;
    std::size_t capacity;  // rows; the largest number for no limit
    u64 ttl_steps;         // 0 for none
    u32 sights;            // steps that must look a new row up before one keeps it, where it is > 1
    double chance;         // of a new row to be kept by a step, where it is < 1
    u64 seed;
};

struct Admitted {
    std::size_t fresh = 0;    // new rows that are kept, where they had to be counted
    std::size_t refused = 0;  // new rows that are not kept
    std::size_t lacking = 0;  // rows too many: nothing was decided and no row may be written
    RowKeys victims;         // that must go before the batch is written
};

class Ledger {
public:
    explicit Ledger(const Policy& policy);
    Ledger(const Ledger&) = delete;

    // Decides what becomes of the rows of a batch that is written at step `now`; new ones are refused in training
    // alone. A refused row gets its initial values in a line of the batch. The ledger does not change.
    Admitted admit(Batch& batch, const Layout& layout, u32 now, bool training);
    // The rows of the batch were written, but for the refused ones, which were seen.
    void commit(const Batch& batch, u32 now);
    // Rows that were not written for more than ttl_steps.
    RowKeys expired(u32 now) const;

    // Rows as they were stored, distinct.
    void load(const u32* tables, const u64* keys, const u32* updates, const u32* steps, std::size_t n);
    // Returns how many of the rows, distinct, were there.
    std::size_t erase(const u32* tables, const u64* keys, std::size_t n);
    // updates [n], 0 for rows that are not there, and steps [n]
    void find(const u32* tables, const u64* keys, u32* updates, u32* steps, std::size_t n) const;

    std::size_t rows() const;
    std::size_t bytes() const;

private:
    struct Entry {
        u64 hash;
        u32 table;
        u32 updates;  // 0 where the entry is free
        u32 step;     // of the last write
        u32 batch;    // number of the last admission that asked for the row
    };

    // Open addressing with linear probing. A row's home is in proportion to the low half of its hash, so that any
    // number of entries will do and growing by a quarter wastes little.
    struct Bucket {
        std::vector<Entry> entries;
        std::size_t rows = 0;

        std::size_t home(u64 hash) const { return (hash & 0xFFFFFFFFu) * entries.size() >> 32; }
        std::size_t next(std::size_t at) const { return at + 1 == entries.size() ? 0 : at + 1; }
        TIERBED_INLINE void fetch(u64 hash) const { prefetch(entries.data() + home(hash)); }
        // Where the row is, or the free entry where it would be.
        std::size_t place(u64 hash, u32 table) const;
        Entry& find_or_insert(u64 hash, u32 table);
        bool erase(u64 hash, u32 table);
        void grow();
    };

    // Whether a new row is kept by a training step.
    bool is_kept(u64 hash, u32 table, u32 now) const;
    bool is_expired(const Entry& entry, u32 now) const;
    u64 rank_of(const Entry& entry, u32 now) const;
    struct Candidate {
        u64 rank;  // the lowest goes first; rows of equal rank in the order of table and hash
        u64 hash;
        u32 table;
        bool operator<(const Candidate& other) const;
    };
    // Rows of a bucket that may go, up to the highest.
    std::vector<Candidate> candidates(u32 bucket, u32 now, const Candidate& highest) const;
    // The lowest of the rows that may go, `needed` of them or more where there are so many.
    RowKeys choose_victims(std::size_t needed, u32 now) const;

    Policy policy_;
    std::array<Bucket, BUCKETS> buckets_;
    FrequencySketch sketch_;
    u32 batch_ = 0;
};

}  // namespace tierbed
