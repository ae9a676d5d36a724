// The RocksDB tier: shards of buckets, one database for each, with keys (bucket u8, table u32, key u64) big-endian.
//
// There is no write-ahead log: rows are durable after `flush`. Reads of a shard run in parallel, writes one at a time.
// Failures throw std::runtime_error with the folder, RocksDB's status and the remedy.
//
// If the disk has no space to open a database for writing, it is opened read-only, until `make_writable`. After an
// exception inside RocksDB, as when memory runs out, every call throws, and `close` does not close the databases.
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
class Statistics;
class Status;
class WriteBatch;
struct FlushOptions;
struct Options;
}  // namespace rocksdb

namespace tierbed {

struct RocksInfo {
    BackgroundThreads threads;   // of the process, which all databases share
    std::size_t memtable_bytes;  // of all shards, at most
    bool async_io;
};

class RocksTier : public Tier {
public:
    RocksTier(const std::string& folder, u32 width, const RocksOptions& options);
    ~RocksTier() override;
    RocksTier(const RocksTier&) = delete;

    void read(const RowSpan& rows, bool* found, bool touch) override;
    void write(const RowSpan& rows) override;
    void erase(const RowSpan& rows) override;
    bool on_disk() const override { return true; }
    // The record of a row. Counts no hit.
    std::optional<Record> locate(u32 table, u64 key) const;
    void flush();
    // To be called before rows are written or erased.
    void make_writable();
    // Merges all files of a shard, which drops every replaced version of a row, and its key from the list of files.
    void compact();
    // Flushes, and returns the files that have all rows written so far. RocksDB deletes none of them until
    // `release_files`. One caller at a time.
    std::vector<LiveFile> hold_files();
    void release_files();
    void close();  // scans must be closed before; nothing may be called after
    bool failed() const { return failed_; }
    // For each shard, the identity of its database and the number of its last write. Compactions change neither.
    std::vector<std::pair<std::string, u64>> versions() const;
    Metrics metrics() const;
    RocksInfo info() const { return info_; }

    // Iterates over a consistent view of all rows, by (bucket, table, key). The tier must outlive it.
    class Scan {
    public:
        explicit Scan(const RocksTier& tier);
        ~Scan();
        Scan(const Scan&) = delete;
        u32 width() const { return tier_.shape_.width; }
        // Packs up to max_rows rows of one bucket into out, and returns their number: 0 at the end.
        std::size_t next(u8* out, std::size_t max_rows, u32& bucket);
        // Releases the databases. `next` throws after that.
        void close();

    private:
        struct View {
            std::shared_ptr<rocksdb::DB> db;  // outlives the iterator
            std::unique_ptr<rocksdb::Iterator> iterator;
        };

        const RocksTier& tier_;
        std::unique_ptr<std::vector<View>> views_;  // null after `close`
        u32 bucket_ = 0;
    };

private:
    struct Place;  // of a row of a call, in the order of RocksDB's keys

    struct Shard {
        std::string folder;
        std::shared_ptr<rocksdb::DB> db;
        bool is_writable;
        bool lists_merged_files = false;
        std::atomic<i64> until_flush{0};  // bytes until its one early flush
        std::mutex flushing;              // held to flush, or to retry a failed flush
    };

    // Since the tier was opened.
    struct Counts {
        std::atomic<u64> hits{0}, misses{0}, rows_written{0}, rows_erased{0};
        Histogram fetch, write;  // latencies of calls
    };

    // The rows of each shard, sorted.
    std::vector<std::vector<Place>> places_of(const RowSpan& rows) const;
    // Returns the number of rows found.
    std::size_t read_places(rocksdb::DB& db, const RowSpan& rows, const Place* places, std::size_t n,
                            bool* found) const;
    void change(const RowSpan& rows, bool erase);
    void apply(Shard& shard, rocksdb::WriteBatch& batch) const;
    rocksdb::Status flush_shard(Shard& shard, bool wait) const;
    rocksdb::Status write_batch(Shard& shard, rocksdb::WriteBatch& batch) const;
    static rocksdb::Status flush_rows(rocksdb::DB& db, const rocksdb::FlushOptions& options);
    static bool resume(Shard& shard, const rocksdb::Status& failed);
    void open(Shard& shard, bool read_only, bool create);
    void renew_lists();
    void leave_alone();
    void fail() const noexcept;
    // Calls RocksDB. If an exception leaves it, the tier fails for good.
    template <class Call>
    auto call(const Call& body) const {
        try {
            return body();
        } catch (...) {
            fail();
            throw;
        }
    }
    Shard& shard_of(u32 bucket) const { return *shards_[bucket % shards_.size()]; }
    void require_open() const;

    LineShape shape_;
    std::string folder_;
    pid_t process_;
    mutable std::atomic<bool> failed_{false};
    std::unique_ptr<Fence> fence_ = std::make_unique<Fence>();
    std::unique_ptr<rocksdb::Options> database_;
    std::atomic<bool> lacks_room_{false};  // a shard is read-only because the disk is full
    bool keeps_files_ = false;             // by `hold_files`, guarded by `opening_`
    mutable std::shared_mutex opening_;    // shared by users of the databases, exclusive where one is opened again
    RocksInfo info_{};
    std::shared_ptr<rocksdb::Cache> cache_;
    std::shared_ptr<rocksdb::Statistics> statistics_;
    std::vector<std::unique_ptr<Shard>> shards_;
    std::unique_ptr<ReadThreads> readers_;
    Counts counts_;
};

}  // namespace tierbed
