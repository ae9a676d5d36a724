// What the databases of a RocksTier are opened with: the tier's own settings, then what a user sets by name.
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

enum class ReadMode { BUFFERED, MMAP, DIRECT };

struct RocksOptions {
    bool create;     // an existing shard that is missing is an error
    bool read_only;  // nothing is written to the folder
    u32 shards;
    std::size_t block_bytes;
    std::size_t cache_bytes;   // of blocks, for direct reads: the page cache has them otherwise
    std::size_t buffer_bytes;  // of memtables, the most of all shards together
    ReadMode read_mode;
    bool async_io;             // where the library has it
    std::size_t read_threads;  // the most of a call, the caller among them
    NamedOptions more;
};

bool caches_blocks(const RocksOptions& options);

// Options of one shard whose rows have so many bytes, without what the shards share (cache, statistics). Throws as
// `check_options`.
rocksdb::Options shard_options(const RocksOptions& options, std::size_t row_bytes);

// Throws std::invalid_argument, "name='value': reason and remedy", where RocksDB does not know an option, cannot read
// its value, or where it would break what the tier promises.
void check_options(const NamedOptions& more);

// Names and values of RocksDB's options string. Throws std::invalid_argument.
NamedOptions parse_options(const std::string& text);

// Every name that `check_options` may take, and the fields of block_based_table_factory, for suggestions.
std::vector<std::string> option_names();
std::vector<std::string> table_field_names();

std::string library_version();

// Whether the library reads by io_uring here.
bool has_async_io();

// Of this process, for all databases together.
struct BackgroundThreads {
    int flushes, compactions;
};
BackgroundThreads background_threads(const rocksdb::Options& options);

}  // namespace tierbed
