// A place for rows below a cache: the full table, RocksDB, or another cache.
#pragma once
#include <cstddef>

#include "memory.h"

namespace tierbed {

// Distinct rows (table, hash), buckets ascending, each with the address of a line.
struct Rows {
    const u32* tables;
    const u64* hashes;
    const u64* lines;
    std::size_t n;
};

// Collects rows in the order in which a tier takes them.
class RowList {
public:
    explicit RowList(std::size_t most) : tables_(most), hashes_(most), lines_(most) {}
    void add(u32 table, u64 hash, u64 line) {
        tables_[n_] = table;
        hashes_[n_] = hash;
        lines_[n_++] = line;
    }
    Rows rows() const { return {tables_.data(), hashes_.data(), lines_.data(), n_}; }

private:
    Buffer<u32> tables_;
    Buffer<u64> hashes_, lines_;
    std::size_t n_ = 0;
};

// May be called by several threads at once for different rows.
class Tier {
public:
    virtual ~Tier() = default;
    // Copies each held row to its line and sets found; other lines stay. `touch`: the read counts for recency.
    virtual void read(const Rows& rows, bool* found, bool touch) = 0;
    // Inserts or replaces.
    virtual void write(const Rows& rows) = 0;
    // Lines are not looked at; rows that are not there are fine.
    virtual void erase(const Rows& rows) = 0;
    // Whether writes are worth a thread of their own.
    virtual bool on_disk() const = 0;
};

}  // namespace tierbed
