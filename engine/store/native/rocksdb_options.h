// What the databases of a RocksTier are opened with: the tier's own settings, then what a user sets by name.
#pragma once
#include <cstddef>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ops/kernels/portable.h"

namespace rocksdb {
struct Options;
}  // namespace rocksdb

namespace tierbed {

// The names of RocksDB's options, what each may be, and what is wrong with a value, for people.
const char TABLE[] = "block_based_table_factory";
const char CACHE[] = "give rocksdb_cache_mb instead";
const char DAMAGE[] = "damage of a file would go unseen; leave it out";

using Values = std::unordered_map<std::string, std::string>;

// As RocksDB writes them.
Values values_of(const rocksdb::Options& options);

const Values& defaults();
const Values& table_fields();  // of block_based_table_factory

// Why an option is not to be set, or null.
const char* refusal(const std::string& name);

[[noreturn]] void wrong(const std::string& name, const std::string& value, const std::string& reason);

// RocksDB reads what it can of a number: "64 MB" as 64, -1 as the largest. What is wrong with `given`, or nothing;
// `read` is what RocksDB made of it, `standard` its default, which tells the type.
std::string misread(const std::string& name, const std::string& given, const std::string& standard,
                    const std::string& read);

// What a value that RocksDB refused should have been; `standard`, the default of `name`, tells the type.
std::string expected(const std::string& name, const std::string& standard);

// What is wrong with a value of block_based_table_factory that RocksDB refused.
std::string table_problem(const std::string& value);

// As Python shows a value: a whole number as it is, else in quotes.
std::string shown(const std::string& value);

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
