// A place for rows below a cache: the full table, RocksDB, or another cache.
#pragma once
#include <cstddef>

#include "lines/kernels/portable.h"

namespace tierbed {

// Distinct rows (table, hash), buckets ascending, each with the address of a line.
struct Rows {
    const u32* tables;
    const u64* hashes;
    const u64* lines;
    std::size_t n;
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
    // Waits for writes of its own that are under way, and forgets why some failed: their rows are tried again.
    virtual void forget_errors() {}
    // Whether writes are worth a thread of their own.
    virtual bool on_disk() const = 0;
};

}  // namespace tierbed
