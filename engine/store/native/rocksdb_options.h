// The options of a RocksTier's databases: the tier's own settings, and the options that a user sets by name.
#pragma once
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "ops/kernels/portable.h"

namespace rocksdb {
struct Options;
}  // namespace rocksdb

namespace tierbed {

using NamedOptions = std::vector<std::pair<std::string, std::string>>;

struct RocksOptions {
    bool create;     // an existing shard that is missing is an error
    bool read_only;  // nothing is written to the folder
    u32 shards;
    std::size_t block_bytes;
    std::size_t cache_bytes;   // of RocksDB's block cache, for direct reads; other reads use the page cache
    std::size_t buffer_bytes;  // of the memtables of all shards, at most
    std::string read_mode;     // buffered, mmap or direct
    bool async_io;             // used if the library has it
    std::size_t read_threads;  // of a call, at most, the caller included
    NamedOptions more;
};

bool caches_blocks(const RocksOptions& options);

// Options of one shard with rows of `row_bytes`, without what all shards share (cache, statistics). Throws as
// `check_options` does.
rocksdb::Options shard_options(const RocksOptions& options, std::size_t row_bytes);

// Throws std::invalid_argument if this build of RocksDB lacks an option. engine/options/rocksdb_options.py lists those
// that users may set.
void check_options(const NamedOptions& more);

// The names and values of RocksDB's options string. Throws std::invalid_argument.
NamedOptions parse_options(const std::string& text);

std::string library_version();

// Whether RocksDB can read by io_uring on this machine.
bool has_async_io();

// The threads of this process, which all databases share.
struct BackgroundThreads {
    int flushes, compactions;
};
BackgroundThreads background_threads(const rocksdb::Options& options);

}  // namespace tierbed
