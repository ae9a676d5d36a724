// The RocksDB tier: the last tier of a stack, on disk. Buckets are divided among shards, and each shard is one RocksDB
// database. RocksDB's key is (bucket u8, table u32, key u64), big-endian, so iterators return rows in scan order.
// RocksDB's value is the row's line: the row's numbers and counters.
//
// A read sorts its rows by key and splits them into MultiGets for many threads, since a disk needs many reads in
// flight. A write puts each shard's rows into WriteBatches, or into a sorted file if a flush follows. Shards write in
// parallel, but each shard's writes run one at a time. There is no write-ahead log: `flush` makes rows durable.
//
// Failures throw std::runtime_error with the folder, RocksDB's status and a remedy. Two failures have lasting effects.
// If the disk is too full to open a database for writing, the database opens read-only until `make_writable`. If a
// RocksDB call ends with an exception, for example because memory ran out, RocksDB's locks may stay taken. Then the
// tier has failed, and all its calls throw. `close` cannot close a failed tier's databases safely, so it leaves them
// open. A `Fence` then stops the databases from changing their folders (rocksdb_fence.h).
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include <sys/types.h>

#include "ops/native/histogram.h"
#include "ops/native/layout.h"
#include "read_threads.h"
#include "rocksdb_checkpoint.h"
#include "rocksdb_fence.h"
#include "rocksdb_options.h"
#include "tier.h"

namespace rocksdb {
class Cache;
class DB;
class Iterator;
class Slice;
class Statistics;
class Status;
class WriteBatch;
struct FlushOptions;
struct Options;
}  // namespace rocksdb

namespace tierbed {

struct RocksInfo {
    BackgroundThreads threads;   // the process's threads, shared by all databases
    std::size_t memtable_bytes;  // limit for all shards' memtables together
    bool async_io;
};

class SortedFiles;

class RocksTier : public Tier {
public:
    RocksTier(const std::string& folder, u32 width, const RocksOptions& options);
    ~RocksTier() override;
    RocksTier(const RocksTier&) = delete;

    void read(const RowSpan& rows, bool* is_hit, bool should_touch) override;
    void write(const RowSpan& rows) override;
    void write_for_flush(const RowSpan& rows) override;
    void erase(const RowSpan& rows) override;
    bool is_on_disk() const override { return true; }
    // Returns a row's counters without counting a hit.
    std::optional<RowCounters> locate(u32 table, u64 key) const;
    // Begins to load rows into an empty tier. Until `finish_load`, rows written in the order of a scan are invisible.
    void begin_load();
    void finish_load();
    void flush();
    // Reopens read-only databases for writing. Call before rows are written or erased.
    void make_writable();
    // Merges each shard's files to remove old versions of rows, and rewrites the MANIFEST, which still has their keys.
    void compact();
    // Flushes, and returns the files that hold all rows. Keeps the files until `release_files`. One caller at a time.
    std::vector<DatabaseFile> hold_files();
    void release_files();
    void close();  // before `close`, close all scans; after `close`, call no other method
    bool has_failed() const { return has_failed_; }
    // Returns each shard's database identity and the number of its last write. Compactions change neither value.
    std::vector<std::pair<std::string, u64>> read_versions() const;
    Metrics metrics() const;
    RocksInfo info() const { return info_; }

    // Iterates over a consistent view of all rows, by (bucket, table, key). Must not outlive the tier. `num_parts` scans
    // divide the rows: scan `part` has each bucket whose number is `part` modulo `num_parts`, a divisor of the shards.
    class Scan {
    public:
        explicit Scan(const RocksTier& tier, u32 part = 0, u32 num_parts = 1);
        ~Scan();
        Scan(const Scan&) = delete;
        u32 width() const { return tier_.shape_.width; }
        // Packs up to max_rows rows of one bucket into `out`. Returns the number of packed rows; 0 after the last row.
        std::size_t next(u8* out, std::size_t max_rows, u32& bucket);
        // Releases the databases. Afterwards `next` throws.
        void close();

    private:
        struct View {
            std::shared_ptr<rocksdb::DB> db;  // keeps the database open while the iterator exists
            std::unique_ptr<rocksdb::Iterator> iterator;
            bool is_started = false;
        };

        const RocksTier& tier_;
        std::unique_ptr<std::vector<View>> views_;  // null after `close`
        u32 bucket_;
        const u32 num_parts_;
    };

private:
    struct SortedRow;  // a row to read or write; operator< is RocksDB's key order

    struct Shard {
        std::string folder;
        std::shared_ptr<rocksdb::DB> db;
        bool is_writable;
        bool manifest_is_stale = false;      // the MANIFEST still contains keys of merged files
        std::atomic<i64> bytes_to_flush{0};  // writing this many bytes triggers an early flush, once
        std::shared_ptr<SortedFiles> load;   // during a load
        std::mutex flush_mutex;              // held to flush, or to retry a failed flush
    };

    // Counts since the tier was opened.
    struct Counts {
        std::atomic<u64> hits{0}, misses{0}, rows_written{0}, rows_erased{0};
        std::atomic<u64> file_bytes{0};         // of files that `write_for_flush` wrote
        std::atomic<u64> read_buffer_bytes{0};  // the most memory of blocks that one call's threads held
        Histogram fetch, write;  // call latencies
    };

    // Returns the sorted rows of each shard.
    std::vector<std::vector<SortedRow>> sort_rows(const RowSpan& rows) const;
    // Reads rows with one MultiGet. Returns the number of hits.
    std::size_t read_sorted(rocksdb::DB& db, const RowSpan& rows, const SortedRow* sorted, std::size_t n,
                            bool* is_hit) const;
    // Calls `body(shard, sorted)` in parallel, with the sorted rows of each shard that has any.
    template <class Body>
    void for_each_shard(const RowSpan& rows, const Body& body);
    rocksdb::Slice get_value(const RowSpan& rows, const SortedRow& row) const;
    void write_or_erase(Shard& shard, const RowSpan& rows, const std::vector<SortedRow>& sorted, bool is_erase);
    // Writes a shard's rows to a file, durably. Returns false if they should go to memtables.
    bool write_file(Shard& shard, const RowSpan& rows, const std::vector<SortedRow>& sorted);
    void apply_batch(Shard& shard, rocksdb::WriteBatch& batch) const;
    rocksdb::Status flush_shard(Shard& shard, bool wait) const;
    rocksdb::Status write_batch(Shard& shard, rocksdb::WriteBatch& batch) const;
    static rocksdb::Status flush_rows(rocksdb::DB& db, const rocksdb::FlushOptions& options);
    static bool resume(Shard& shard, const rocksdb::Status& failed);  // makes a database accept writes after an error
    void open(Shard& shard, bool read_only, bool create);
    void rewrite_manifests();
    void abandon();  // leaks the databases, because closing them could hang
    void mark_failed() const noexcept;
    // Calls RocksDB. If RocksDB throws an exception, the tier has failed.
    template <class Call>
    auto call(const Call& body) const {
        try {
            return body();
        } catch (...) {
            mark_failed();
            throw;
        }
    }
    Shard& find_shard(u32 bucket) const { return *shards_[bucket % shards_.size()]; }
    void require_open() const;

    LineShape shape_;
    std::string folder_;
    pid_t process_id_;
    mutable std::atomic<bool> has_failed_{false};
    std::unique_ptr<Fence> fence_ = std::make_unique<Fence>();
    const std::size_t block_bytes_;
    const bool caches_data_;  // the block cache, if any, is for data blocks too
    std::unique_ptr<rocksdb::Options> options_;
    std::atomic<bool> is_disk_full_{false};  // a shard is read-only because the disk was full
    bool has_held_files_ = false;            // between `hold_files` and `release_files`; guarded by `open_mutex_`
    mutable std::shared_mutex open_mutex_;   // a shared lock to use a database, a unique lock to reopen one
    RocksInfo info_{};
    std::shared_ptr<rocksdb::Cache> cache_;
    std::shared_ptr<rocksdb::Statistics> statistics_;
    std::vector<std::unique_ptr<Shard>> shards_;
    std::unique_ptr<ReadThreadPool> read_threads_;
    Counts counts_;
};

}  // namespace tierbed
