// About how many training steps looked up each row that is not kept: a count-min sketch (Cormode and Muthukrishnan,
// 2005) of bytes for each bucket, counting conservatively, halved when it has taken half as many sights as it is wide.
#pragma once
#include <algorithm>
#include <array>
#include <vector>

#include "lines/kernels/hash.h"

namespace tierbed {

class Sights {
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

}  // namespace tierbed
