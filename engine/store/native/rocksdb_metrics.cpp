// The metrics of a RocksTier: its own counts and RocksDB's statistics.
#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/statistics.h>
#if __has_include(<rocksdb/advanced_cache.h>)  // newer RocksDB versions define rocksdb::Cache here
#include <rocksdb/advanced_cache.h>
#endif

#include "rocksdb_tier.h"

namespace tierbed {

Metrics RocksTier::metrics() const {
    require_open();
    const std::shared_lock lock(open_mutex_);
    const auto sum_property = [&](const std::string& property) {  // sums over shards
        u64 total = 0, value = 0;
        for (const auto& shard : shards_)
            total += call([&] { return shard->db->GetIntProperty(property, &value); }) ? value : 0;
        return total;
    };
    const auto read_ticker = [&](u32 type) { return statistics_->getTickerCount(type); };
    const u64 row_bytes = compute_stored_bytes(shape_.width), written = counts_.rows_written * row_bytes;
    const u64 flushed = read_ticker(rocksdb::FLUSH_WRITE_BYTES) + counts_.file_bytes;
    const u64 compacted = read_ticker(rocksdb::COMPACT_WRITE_BYTES);
    const u64 memtables = sum_property("rocksdb.size-all-mem-tables");
    const u64 readers = sum_property("rocksdb.estimate-table-readers-mem");
    const u64 blocks = cache_ ? cache_->GetUsage() : 0;
    Metrics metrics;
    metrics.counts = {
        {"hits", counts_.hits},
        {"misses", counts_.misses},
        {"insertions", counts_.rows_written},
        {"resident_rows", sum_property("rocksdb.estimate-num-keys")},
        {"rows_written", counts_.rows_written},
        {"rows_erased", counts_.rows_erased},
        {"bytes_in", written},
        {"bytes_out", counts_.hits * row_bytes},
        {"bytes", memtables + readers + blocks + counts_.read_buffer_bytes},
        {"read_threads", read_threads_->thread_target()},
        {"read_buffer_bytes", counts_.read_buffer_bytes},
        {"memtable_bytes", memtables},
        {"index_filter_bytes", readers},
        {"block_cache_bytes", blocks},
        {"block_cache_hits", read_ticker(rocksdb::BLOCK_CACHE_HIT)},
        {"block_cache_misses", read_ticker(rocksdb::BLOCK_CACHE_MISS)},
        {"bloom_useful", read_ticker(rocksdb::BLOOM_FILTER_USEFUL)},
        {"sst_bytes", sum_property("rocksdb.total-sst-files-size")},
        {"live_data_bytes", sum_property("rocksdb.estimate-live-data-size")},
        {"flush_bytes", flushed},
        {"compaction_read_bytes", read_ticker(rocksdb::COMPACT_READ_BYTES)},
        {"compaction_bytes", compacted},
        {"pending_compaction_bytes", sum_property("rocksdb.estimate-pending-compaction-bytes")},
        {"running_flushes", sum_property("rocksdb.num-running-flushes")},
        {"running_compactions", sum_property("rocksdb.num-running-compactions")},
        {"background_errors", sum_property("rocksdb.background-errors")},
    };
    metrics.reals = {
        {"stall_seconds", static_cast<double>(read_ticker(rocksdb::STALL_MICROS)) * 1e-6},
        {"write_amplification",
         written ? static_cast<double>(flushed + compacted) / static_cast<double>(written) : 0.0},
    };
    metrics.add("fetch", counts_.fetch);
    metrics.add("write", counts_.write);
    return metrics;
}

}  // namespace tierbed
