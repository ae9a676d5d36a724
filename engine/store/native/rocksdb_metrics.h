// Metrics of a RocksTier: its own counts, and RocksDB's statistics.
#pragma once
#include <atomic>
#include <vector>

#include "ops/kernels/portable.h"
#include "ops/native/histogram.h"

namespace rocksdb {
class Cache;
class DB;
class Statistics;
}  // namespace rocksdb

namespace tierbed {

// Since the tier was opened.
struct RocksCounts {
    std::atomic<u64> hits{0}, misses{0}, rows_written{0}, rows_erased{0};
    Histogram fetch, write;  // latencies of calls
};

// Sums over the shards. read_threads: of the next read. cache: may be null.
Metrics metrics_of(const RocksCounts& counts, u64 row_bytes, std::size_t read_threads,
                   const std::vector<rocksdb::DB*>& shards, const rocksdb::Cache* cache,
                   const rocksdb::Statistics& statistics);

}  // namespace tierbed
