#include "rocksdb_tier.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/filter_policy.h>
#include <rocksdb/table.h>
#include <rocksdb/write_batch.h>

#include "batch.h"
#include "packed_row.h"
#include "pool.h"

namespace tierbed {
namespace {

constexpr std::size_t KEY_BYTES = 13;
constexpr std::size_t READS = 1024;            // keys a MultiGet
constexpr std::size_t BATCH_BYTES = 4u << 20;  // a WriteBatch

struct Key {
    char bytes[KEY_BYTES];
    Key(u32 bucket, u32 table, u64 key) {
        bytes[0] = static_cast<char>(bucket);
        const u32 t = __builtin_bswap32(table);
        const u64 k = __builtin_bswap64(key);
        std::memcpy(bytes + 1, &t, sizeof t);
        std::memcpy(bytes + 5, &k, sizeof k);
    }
    rocksdb::Slice slice() const { return {bytes, KEY_BYTES}; }
};

void check(const rocksdb::Status& status, const char* what) {
    if (!status.ok()) throw std::runtime_error(std::string(what) + ": " + status.ToString());
}

void check_size(std::size_t stored, const LineShape& shape) {
    if (stored != stored_bytes_of(shape.width))
        throw std::runtime_error("a stored row of " + std::to_string(stored) + " bytes where " +
                                 std::to_string(stored_bytes_of(shape.width)) + " are expected");
}

// A share of the files that the process may open, half of them left to others.
int open_files(u32 shards) {
    rlimit limit{};
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return -1;
    return static_cast<int>(std::clamp<rlim_t>(limit.rlim_cur / 2 / shards, 16, 1 << 20));
}

rocksdb::Options database_options(const RocksOptions& options, std::shared_ptr<rocksdb::Cache> cache) {
    rocksdb::BlockBasedTableOptions table;
    table.block_size = options.block_bytes;
    table.block_cache = std::move(cache);
    table.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10));
    table.data_block_index_type = rocksdb::BlockBasedTableOptions::kDataBlockBinaryAndHash;
    rocksdb::Options database;
    database.create_if_missing = options.create;
    database.max_open_files = open_files(options.shards);
    database.compression = rocksdb::kNoCompression;
    database.write_buffer_size = options.write_buffer_bytes;
    database.max_write_buffer_number = 3;
    database.max_background_jobs = 2;
    database.avoid_flush_during_shutdown = true;  // flush() is explicit; without it the live folder is scratch
    database.keep_log_file_num = 1;
    database.info_log_level = rocksdb::WARN_LEVEL;
    database.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
    return database;
}

// RocksDB's destructors of globals wait for threads, which a forked child does not have: a child that calls exit would
// hang for ever. So it ends right before them.
void end_forked_children_early() {
    static const int once = pthread_atfork(nullptr, nullptr, [] {
        on_exit(
            [](int status, void*) {
                std::fflush(nullptr);
                _exit(status);
            },
            nullptr);
    });
    static_cast<void>(once);
}

}  // namespace

RocksTier::RocksTier(const std::string& folder, u32 width, const RocksOptions& options)
    : shape_{width, width, line_bytes_of(width)}, process_(getpid()) {
    end_forked_children_early();
    const auto cache = rocksdb::NewLRUCache(options.block_cache_bytes);
    for (u32 i = 0; i < options.shards; ++i) {
        rocksdb::DB* db = nullptr;
        check(rocksdb::DB::Open(database_options(options, cache), folder + "/shard-" + std::to_string(i), &db), "open");
        shards_.emplace_back(db);
    }
}

// A forked child has the databases' memory but not their threads, which closing waits for: it leaves them alone.
RocksTier::~RocksTier() { close(); }

void RocksTier::close() {
    if (process_ != getpid())
        for (auto& shard : shards_) static_cast<void>(shard.release());
    shards_.clear();
}

void RocksTier::read(const u32* tables, const u64* keys, const u64* lines, bool* found, std::size_t n) const {
    Grouped grouped = group_by_bucket(tables, keys, n);
    parallel_for(BUCKETS, [&](std::size_t bucket) {
        Entry* begin = grouped.entries.data() + grouped.begin[bucket];
        Entry* end = grouped.entries.data() + grouped.begin[bucket + 1];
        std::sort(begin, end, [&](const Entry& a, const Entry& b) {
            return a.table != b.table ? a.table < b.table : keys[a.position] < keys[b.position];
        });
        rocksdb::DB& db = shard_of(static_cast<u32>(bucket));
        std::vector<Key> names;
        std::vector<rocksdb::Slice> slices;
        for (Entry* chunk = begin; chunk < end; chunk += READS) {
            const std::size_t count = std::min<std::size_t>(READS, static_cast<std::size_t>(end - chunk));
            names.clear();
            slices.clear();
            for (std::size_t i = 0; i < count; ++i)
                names.emplace_back(static_cast<u32>(bucket), chunk[i].table, keys[chunk[i].position]);
            for (const Key& name : names) slices.push_back(name.slice());
            std::vector<rocksdb::PinnableSlice> values(count);
            std::vector<rocksdb::Status> statuses(count);
            db.MultiGet(rocksdb::ReadOptions(), db.DefaultColumnFamily(), count, slices.data(), values.data(),
                        statuses.data(), true);
            for (std::size_t i = 0; i < count; ++i) {
                const u32 position = chunk[i].position;
                found[position] = !statuses[i].IsNotFound();
                if (!found[position]) continue;
                check(statuses[i], "read");
                check_size(values[i].size(), shape_);
                std::memcpy(floats(lines[position]), values[i].data(), values[i].size());
            }
        }
    });
}

void RocksTier::write(const u32* tables, const u64* keys, const u64* lines, std::size_t n) {
    const Grouped grouped = group_by_bucket(tables, keys, n);
    const std::size_t value_bytes = stored_bytes_of(shape_.width);
    parallel_for(shards_.size(), [&](std::size_t shard) {
        rocksdb::WriteOptions options;
        options.disableWAL = true;
        rocksdb::WriteBatch batch;
        for (std::size_t bucket = shard; bucket < BUCKETS; bucket += shards_.size()) {
            for (std::size_t i = grouped.begin[bucket]; i < grouped.begin[bucket + 1]; ++i) {
                const Entry& entry = grouped.entries[i];
                const Key name(static_cast<u32>(bucket), entry.table, keys[entry.position]);
                check(batch.Put(name.slice(), {reinterpret_cast<const char*>(lines[entry.position]), value_bytes}),
                      "write");
                if (batch.GetDataSize() < BATCH_BYTES) continue;
                check(shards_[shard]->Write(options, &batch), "write");
                batch.Clear();
            }
        }
        if (batch.Count()) check(shards_[shard]->Write(options, &batch), "write");
    });
}

void RocksTier::flush() {
    parallel_for(shards_.size(), [&](std::size_t i) { check(shards_[i]->Flush(rocksdb::FlushOptions()), "flush"); });
}

u64 RocksTier::property(const std::string& name) const {
    u64 total = 0;
    for (const auto& db : shards_) {
        u64 value = 0;
        if (!db->GetIntProperty(name, &value)) throw std::runtime_error("property: RocksDB has no " + name);
        total += value;
    }
    return total;
}

RocksTier::Scan::Scan(const RocksTier& tier) : shape_(tier.shape_), process_(tier.process_) {
    rocksdb::ReadOptions options;
    options.fill_cache = false;
    options.readahead_size = std::size_t{2} << 20;
    for (const auto& db : tier.shards_) {
        iterators_.emplace_back(db->NewIterator(options));
        iterators_.back()->SeekToFirst();
    }
}

RocksTier::Scan::~Scan() { close(); }

void RocksTier::Scan::close() {
    if (process_ != getpid())
        for (auto& iterator : iterators_) static_cast<void>(iterator.release());
    iterators_.clear();
}

std::size_t RocksTier::Scan::next(u8* out, std::size_t max_rows, u32& bucket) {
    if (iterators_.empty()) throw std::runtime_error("scan: the databases were closed");
    for (; bucket_ < BUCKETS; ++bucket_) {
        rocksdb::Iterator& it = *iterators_[bucket_ % iterators_.size()];
        std::size_t rows = 0;
        for (; rows < max_rows && it.Valid() && static_cast<u8>(it.key()[0]) == bucket_; it.Next(), ++rows) {
            u32 table;
            u64 key;
            std::memcpy(&table, it.key().data() + 1, sizeof table);
            std::memcpy(&key, it.key().data() + 5, sizeof key);
            check_size(it.value().size(), shape_);
            out = pack_row(out, __builtin_bswap32(table), __builtin_bswap64(key), it.value().data(), shape_);
        }
        check(it.status(), "scan");
        bucket = bucket_;
        if (rows) return rows;
    }
    return 0;
}

}  // namespace tierbed
