// Options for a RocksTier's databases: the tier's own settings, and options that a user sets by name.
#pragma once
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/kernels/portable.h"

namespace rocksdb {
class Cache;
struct Options;
}  // namespace rocksdb

namespace tierbed {

using NamedOptions = std::vector<std::pair<std::string, std::string>>;

struct RocksOptions {
    bool create_if_missing;  // if false, a missing shard is an error
    bool read_only;          // if true, nothing is written to the folder
    u32 num_shards;
    std::size_t block_bytes;
    std::size_t data_cache_bytes;    // memory for data blocks, for direct reads only; other reads use the page cache
    std::size_t index_bytes;         // limit for the memory of indexes and filters; 0: no limit
    std::size_t write_buffer_bytes;  // limit for all shards' memtables together
    std::string read_mode;           // buffered, mmap or direct
    bool async_io;                   // ignored if the library cannot use io_uring
    std::size_t max_read_threads;    // maximum threads of one call, including the caller
    NamedOptions user_options;
};

// Returns the block cache of all shards, or null if nothing is cached in it.
std::shared_ptr<rocksdb::Cache> make_block_cache(const RocksOptions& options);

// Returns a shard's options, except the cache and statistics that all shards share. Throws as `check_options` does.
rocksdb::Options make_shard_options(const RocksOptions& options, std::size_t row_bytes);

// Throws std::invalid_argument if this RocksDB lacks one of the options (engine/options/rocksdb_options.py).
void check_options(const NamedOptions& user_options);

// Parses RocksDB's options string into names and values. Throws std::invalid_argument.
NamedOptions parse_options(const std::string& text);

std::string read_library_version();

// True if RocksDB can read by io_uring on this machine.
bool has_async_io();

// RocksDB's background threads in this process, shared by all databases.
struct BackgroundThreads {
    int flushes, compactions;
};
BackgroundThreads count_background_threads(const rocksdb::Options& options);

}  // namespace tierbed
