// Rows listed one by one, to be handed to a tier.
#pragma once
#include <algorithm>
#include <vector>

#include "lines/kernels/hash.h"
#include "tier.h"

namespace tierbed {

class RowList {
public:
    void add(u32 table, u64 hash, u64 line) { all_.push_back({hash, line, table}); }
    void clear() { all_.clear(); }
    std::size_t size() const { return all_.size(); }

    // Buckets ascending, as they are listed otherwise; until the list changes.
    Rows rows() {
        const auto earlier = [](const Row& a, const Row& b) { return bucket_of(a.hash) < bucket_of(b.hash); };
        if (!std::is_sorted(all_.begin(), all_.end(), earlier)) std::stable_sort(all_.begin(), all_.end(), earlier);
        tables_.clear(), hashes_.clear(), lines_.clear();
        for (const Row& row : all_) {
            tables_.push_back(row.table);
            hashes_.push_back(row.hash);
            lines_.push_back(row.line);
        }
        return {tables_.data(), hashes_.data(), lines_.data(), all_.size()};
    }

private:
    struct Row {
        u64 hash, line;
        u32 table;
    };

    std::vector<Row> all_;
    std::vector<u32> tables_;
    std::vector<u64> hashes_, lines_;
};

}  // namespace tierbed
