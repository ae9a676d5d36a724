// How many rows were asked for of each table, and found.
#pragma once
#include <array>
#include <mutex>
#include <vector>

#include "../kernels/hash.h"

namespace tierbed {

// Threads count apart, so that they add without a lock, to memory that stays in their caches.
class TableCounts {
    struct Part {
        std::mutex mutex;
        std::vector<u64> counts;  // [tables, 2], misses and hits; empty until it is used
    };

public:
    explicit TableCounts(u32 tables) : tables_(tables) {}

    // A part that no other thread adds to while this lives.
    class Share {
    public:
        void add(u32 table, bool hit) {
            if (table < tables_) ++counts_[2 * std::size_t{table} + hit];
        }
        // A row that was added as a hit is a miss.
        void missed(u32 table) {
            if (table >= tables_) return;
            --counts_[2 * std::size_t{table} + 1];
            ++counts_[2 * std::size_t{table}];
        }

    private:
        friend class TableCounts;
        Share(std::unique_lock<std::mutex> lock, u64* counts, u32 tables)
            : lock_(std::move(lock)), counts_(counts), tables_(tables) {}

        std::unique_lock<std::mutex> lock_;
        u64* counts_;
        u32 tables_;
    };

    // For the tasks of one loop over buckets at a time: each finds one that is free.
    Share share() {
        for (Part& part : parts_)
            if (std::unique_lock lock(part.mutex, std::try_to_lock); lock) return share_of(part, std::move(lock));
        return share_of(parts_[0], std::unique_lock(parts_[0].mutex));
    }

    // [tables, 2], hits and misses; not beside `share`
    std::vector<u64> sums() const {
        std::vector<u64> all(2 * std::size_t{tables_});
        for (const Part& part : parts_)
            for (std::size_t i = 0; i < all.size() && !part.counts.empty(); ++i) all[i ^ 1] += part.counts[i];
        return all;
    }

private:
    static constexpr std::size_t APART = 16;  // counts between two parts: they share no line of the processor's cache

    Share share_of(Part& part, std::unique_lock<std::mutex> lock) {
        if (part.counts.empty()) part.counts.resize(2 * std::size_t{tables_} + APART);
        return {std::move(lock), part.counts.data(), tables_};
    }

    u32 tables_;
    std::array<Part, BUCKETS> parts_;
};

}  // namespace tierbed
