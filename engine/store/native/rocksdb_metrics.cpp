#include "rocksdb_metrics.h"

#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/statistics.h>
#if __has_include(<rocksdb/advanced_cache.h>)  // newer versions have the class there
#include <rocksdb/advanced_cache.h>
#endif

namespace tierbed {
namespace {

u64 sum_of(const std::vector<rocksdb::DB*>& shards, const std::string& property) {
    u64 total = 0;
    for (rocksdb::DB* db : shards) {
        u64 value = 0;
        db->GetIntProperty(property, &value);
        total += value;
    }
    return total;
}

}  // namespace

Metrics metrics_of(const RocksCounts& counts, u64 row_bytes, std::size_t read_threads,
                   const std::vector<rocksdb::DB*>& shards, const rocksdb::Cache* cache,
                   const rocksdb::Statistics& statistics) {
    const auto ticker = [&](u32 type) { return statistics.getTickerCount(type); };
    const u64 written = counts.rows_written * row_bytes;
    const u64 flushed = ticker(rocksdb::FLUSH_WRITE_BYTES), compacted = ticker(rocksdb::COMPACT_WRITE_BYTES);
    const u64 memtables = sum_of(shards, "rocksdb.size-all-mem-tables");
    const u64 readers = sum_of(shards, "rocksdb.estimate-table-readers-mem");
    const u64 blocks = cache ? cache->GetUsage() : 0;
    Metrics metrics;
    metrics.counts = {
        {"hits", counts.hits},
        {"misses", counts.misses},
        {"insertions", counts.rows_written},
        {"resident_rows", sum_of(shards, "rocksdb.estimate-num-keys")},
        {"rows_written", counts.rows_written},
        {"rows_erased", counts.rows_erased},
        {"bytes_in", written},
        {"bytes_out", counts.hits * row_bytes},
        {"bytes", memtables + readers + blocks},
        {"read_threads", read_threads},
        {"memtable_bytes", memtables},
        {"index_filter_bytes", readers},
        {"block_cache_bytes", blocks},
        {"block_cache_hits", ticker(rocksdb::BLOCK_CACHE_HIT)},
        {"block_cache_misses", ticker(rocksdb::BLOCK_CACHE_MISS)},
        {"bloom_useful", ticker(rocksdb::BLOOM_FILTER_USEFUL)},
        {"sst_bytes", sum_of(shards, "rocksdb.total-sst-files-size")},
        {"live_data_bytes", sum_of(shards, "rocksdb.estimate-live-data-size")},
        {"flush_bytes", flushed},
        {"compaction_read_bytes", ticker(rocksdb::COMPACT_READ_BYTES)},
        {"compaction_bytes", compacted},
        {"pending_compaction_bytes", sum_of(shards, "rocksdb.estimate-pending-compaction-bytes")},
        {"running_flushes", sum_of(shards, "rocksdb.num-running-flushes")},
        {"running_compactions", sum_of(shards, "rocksdb.num-running-compactions")},
        {"background_errors", sum_of(shards, "rocksdb.background-errors")},
    };
    metrics.reals = {
        {"stall_seconds", static_cast<double>(ticker(rocksdb::STALL_MICROS)) * 1e-6},
        {"write_amplification",
         written ? static_cast<double>(flushed + compacted) / static_cast<double>(written) : 0.0},
    };
    metrics.add("fetch", counts.fetch);
    metrics.add("write", counts.write);
    return metrics;
}

}  // namespace tierbed
