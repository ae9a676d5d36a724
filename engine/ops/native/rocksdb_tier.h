// Rows in RocksDB: shards of buckets, one database each, keyed by (bucket u8, table u32, key u64) big-endian.
//
// The write-ahead log is off: the live folder is scratch until `flush`. Reads run in parallel, each shard has one
// writer. Failures throw std::runtime_error with RocksDB's own words.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include <sys/types.h>

#include "layout.h"

namespace rocksdb {
class DB;
class Iterator;
}  // namespace rocksdb

namespace tierbed {

struct RocksOptions {
    bool create;  // an existing shard that is missing is an error
    u32 shards;
    std::size_t block_bytes;
    std::size_t block_cache_bytes;
    std::size_t write_buffer_bytes;
};

class RocksTier {
public:
    RocksTier(const std::string& folder, u32 width, const RocksOptions& options);
    ~RocksTier();
    RocksTier(const RocksTier&) = delete;

    void read(const u32* tables, const u64* keys, const u64* lines, bool* found, std::size_t n) const;
    void write(const u32* tables, const u64* keys, const u64* lines, std::size_t n);
    void flush();
    void close();  // nothing may be read or written after it; scans must be closed before
    u64 property(const std::string& name) const;  // summed over shards

    // Walks a consistent view of all rows: buckets ascending, within one (table, key) ascending.
    class Scan {
    public:
        explicit Scan(const RocksTier& tier);
        ~Scan();
        Scan(const Scan&) = delete;
        // Packs up to max_rows rows of one bucket into out; 0 rows at the end.
        u32 width() const { return shape_.width; }
        std::size_t next(u8* out, std::size_t max_rows, u32& bucket);
        // Lets go of the databases; `next` throws from then on.
        void close();

    private:
        std::vector<std::unique_ptr<rocksdb::Iterator>> iterators_;
        LineShape shape_;
        pid_t process_;
        u32 bucket_ = 0;
    };

private:
    rocksdb::DB& shard_of(u32 bucket) const { return *shards_[bucket % shards_.size()]; }

    LineShape shape_;
    pid_t process_;
    std::vector<std::unique_ptr<rocksdb::DB>> shards_;
};

}  // namespace tierbed
