#include "rocksdb_options.h"

#include <algorithm>
#include <cstdarg>
#include <memory>
#include <set>
#include <stdexcept>
#include <thread>
#include <unordered_map>

#include <rocksdb/cache.h>
#include <rocksdb/convenience.h>
#include <rocksdb/env.h>
#include <rocksdb/file_checksum.h>
#include <rocksdb/file_system.h>
#include <rocksdb/filter_policy.h>
#include <rocksdb/listener.h>
#include <rocksdb/options.h>
#include <rocksdb/slice_transform.h>
#include <rocksdb/table.h>
#include <rocksdb/utilities/options_type.h>
#include <rocksdb/version.h>
#include <sys/resource.h>

// RocksDB reads by io_uring only if the process exports this function.
extern "C" __attribute__((visibility("default"))) bool RocksDbIOUringEnable() { return true; }

namespace tierbed {
namespace {

const char BLOCK_TABLE[] = "block_based_table_factory";

[[noreturn]] void reject(const std::string& name, const std::string& value, const std::string& reason) {
    throw std::invalid_argument(name + "='" + value + "': " + reason);
}

constexpr int MERGED_MEMTABLES = 8;  // memtables that a flush merges
constexpr int MAX_MEMTABLES = 12;    // memtables per shard: enough for one flush, and a few to write to meanwhile
constexpr int MIN_FLUSH_THREADS = 4;  // a save flushes all shards at once, and each flush waits for the disk
constexpr std::size_t MIN_MEMTABLE_BYTES = 64 << 10;  // RocksDB's minimum for a memtable
constexpr std::size_t ENTRY_BYTES = 20;               // approximate overhead of a row in a block
constexpr std::size_t BLOCK_BYTES = 64;               // approximate overhead of a block
constexpr std::size_t MAX_UNUSED = 4;                 // align blocks if alignment wastes at most 1/4 of a block

// Drops RocksDB's log: errors are returned anyway, a log takes disk space, and opening a log fails on a full disk.
class NullLogger : public rocksdb::Logger {
public:
    NullLogger() : Logger(rocksdb::FATAL_LEVEL) {}
    using Logger::Logv;
    void Logv(const char*, va_list) override {}
};

// Lowers the severity of I/O errors, so that calls succeed after a full disk gets space again. Turns off RocksDB's own
// retries, because these are seconds apart and would block the call. A failed compaction restarts by itself.
class RecoveryListener : public rocksdb::EventListener {
public:
    void OnBackgroundError(rocksdb::BackgroundErrorReason reason, rocksdb::Status* error) override {
        const auto max_severity = reason == rocksdb::BackgroundErrorReason::kCompaction ? rocksdb::Status::kSoftError
                                                                                        : rocksdb::Status::kHardError;
        if (error->IsIOError() && error->severity() > max_severity) *error = rocksdb::Status(*error, max_severity);
    }
    void OnErrorRecoveryBegin(rocksdb::BackgroundErrorReason, rocksdb::Status, bool* automatic) override {
        *automatic = false;
    }
};

// Returns the open file limit per shard. All shards together get half of the process's limit.
int compute_max_open_files(u32 shards) {
    rlimit limit{};
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return -1;
    return static_cast<int>(std::clamp<rlim_t>(limit.rlim_cur / 2 / shards, 16, 1 << 20));
}

std::size_t compute_data_cache_bytes(const RocksOptions& options) {
    return options.read_mode == "direct" ? options.data_cache_bytes : 0;
}

bool uses_block_cache(const RocksOptions& options) { return compute_data_cache_bytes(options) + options.index_bytes; }

// Divides each file's index and filter into partitions, so that the block cache can hold some of them. Makes both
// smaller, for some CPU time: keys of the index share prefixes, and Ribbon filters take 30 % less than Bloom filters.
void cache_index(rocksdb::BlockBasedTableOptions& table) {
    table.cache_index_and_filter_blocks = true;  // by RocksDB's defaults, data blocks are evicted first
    table.index_type = rocksdb::BlockBasedTableOptions::kTwoLevelIndexSearch;
    table.partition_filters = true;
    table.index_block_restart_interval = 16;
    table.filter_policy.reset(rocksdb::NewRibbonFilterPolicy(10));
}

rocksdb::Options make_tier_options(const RocksOptions& options) {
    rocksdb::BlockBasedTableOptions table;
    table.block_size = options.block_bytes;
    table.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10));
    table.data_block_index_type = rocksdb::BlockBasedTableOptions::kDataBlockBinaryAndHash;
    table.format_version = 5;  // RocksDB 6.6 and later can read this version
    if (options.index_bytes) cache_index(table);
    table.no_block_cache = !uses_block_cache(options);
    rocksdb::Options database;
    database.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
    database.create_if_missing = options.create_if_missing;
    database.max_open_files = compute_max_open_files(options.num_shards);
    database.compression = rocksdb::kNoCompression;
    // Small memtables fit in the CPU cache, so inserts are several times faster. A flush merges several memtables.
    database.write_buffer_size =
        std::max<std::size_t>(options.write_buffer_bytes / options.num_shards / MAX_MEMTABLES, MIN_MEMTABLE_BYTES);
    database.max_write_buffer_number = MAX_MEMTABLES;
    database.min_write_buffer_number_to_merge = MERGED_MEMTABLES;
    database.memtable_whole_key_filtering = true;
    database.memtable_prefix_bloom_size_ratio = 0.01;
    // A key's first byte is its bucket. A batch's keys ascend in each bucket, so an insert starts where the last ended.
    database.memtable_insert_with_hint_prefix_extractor.reset(rocksdb::NewFixedPrefixTransform(1));
    database.allow_concurrent_memtable_write = false;
    // Rows are overwritten at random. Universal compaction rewrites a row less often than level compaction.
    database.compaction_style = rocksdb::kCompactionStyleUniversal;
    database.compaction_options_universal.min_merge_width = 4;
    database.compaction_options_universal.max_size_amplification_percent = 100;
    database.level0_file_num_compaction_trigger = 8;
    database.max_background_jobs =
        std::clamp(static_cast<int>(std::thread::hardware_concurrency()) / 2, 2, 8);  // shared by all databases
    database.compaction_readahead_size = 1 << 20;
    database.avoid_unnecessary_blocking_io = true;
    database.avoid_flush_during_shutdown = true;  // after a restart, rows are served only if flush() was called
    database.info_log = std::make_shared<NullLogger>();
    database.allow_mmap_reads = options.read_mode == "mmap";
    database.use_direct_reads = options.read_mode == "direct";
    database.use_direct_io_for_flush_and_compaction = options.read_mode == "direct";
    database.file_checksum_gen_factory = rocksdb::GetFileChecksumGenCrc32cFactory();
    database.listeners.push_back(std::make_shared<RecoveryListener>());
    return database;
}

void apply_user_options(rocksdb::Options& options, const NamedOptions& user_options) {
    rocksdb::ConfigOptions config;
    config.input_strings_escaped = false;
    config.invoke_prepare_options = false;
    for (const auto& [name, value] : user_options) {
        const std::string option = name + "={" + value + "}";
        const rocksdb::Status status = rocksdb::GetOptionsFromString(config, options, option, &options);
        if (!status.ok()) reject(name, value, "RocksDB " + read_library_version() + ": " + status.ToString());
    }
    const std::vector<rocksdb::CompressionType> supported = rocksdb::GetSupportedCompressions();
    for (const rocksdb::CompressionType type : {options.compression, options.bottommost_compression})
        if (type != rocksdb::kDisableCompressionOption &&
            std::find(supported.begin(), supported.end(), type) == supported.end())
            throw std::invalid_argument("compression: RocksDB was built without this type; give another type");
}

bool is_compressed(const rocksdb::Options& options) {
    const rocksdb::CompressionType last = options.bottommost_compression;
    return options.compression != rocksdb::kNoCompression ||
           (last != rocksdb::kDisableCompressionOption && last != rocksdb::kNoCompression);
}

// Reading an aligned block takes one disk page instead of two. RocksDB aligns only uncompressed blocks whose size is a
// power of two. Large rows would leave too much of an aligned block unused.
void align_blocks(rocksdb::Options& options, std::size_t row_bytes, const NamedOptions& user_options) {
    auto* table = options.table_factory->GetOptions<rocksdb::BlockBasedTableOptions>();
    for (const auto& [name, value] : user_options)
        if (name == BLOCK_TABLE && value.find("block_align") != std::string::npos) return;
    const std::size_t block = table->block_size, entry = row_bytes + ENTRY_BYTES;
    const std::size_t space = block - std::min(block, BLOCK_BYTES);
    const bool is_power = (block & (block - 1)) == 0, is_dense = entry <= space && space % entry <= block / MAX_UNUSED;
    const bool is_checksummed = !options.use_direct_io_for_flush_and_compaction;  // `Fence` does not see direct writes
    table->block_align = is_power && is_dense && is_checksummed && !is_compressed(options);
}

}  // namespace

NamedOptions parse_options(const std::string& text) {
    std::unordered_map<std::string, std::string> map;
    const rocksdb::Status status = rocksdb::StringToMap(text, &map);
    if (!status.ok())
        throw std::invalid_argument("'" + text + "': " + status.ToString() + "; give name=value;name={name=value;...}");
    std::set<std::string> names;
    for (std::size_t at = 0, end; (at = text.find_first_not_of(" \t\n{", at)) != std::string::npos; at = end + 1) {
        const std::size_t equals = text.find('=', at);
        std::string value, name = text.substr(at, equals - at);
        name.erase(name.find_last_not_of(" \t\n") + 1);
        if (map.count(name) && !names.insert(name).second) reject(name, map[name], "it is given twice; give it once");
        const rocksdb::Status rest = rocksdb::OptionTypeInfo::NextToken(text, ';', equals + 1, &end, &value);
        if (!rest.ok() || end == std::string::npos) break;
    }
    NamedOptions named(map.begin(), map.end());
    std::sort(named.begin(), named.end());
    return named;
}

std::shared_ptr<rocksdb::Cache> make_block_cache(const RocksOptions& options) {
    if (!uses_block_cache(options)) return nullptr;
    const std::size_t bytes = compute_data_cache_bytes(options) + options.index_bytes;
    // the share that data blocks cannot take from indexes and filters; without these, RocksDB's default
    const double share = static_cast<double>(options.index_bytes) / static_cast<double>(bytes);
    return rocksdb::NewLRUCache(bytes, -1, false, options.index_bytes ? share : 0.5);
}

rocksdb::Options make_shard_options(const RocksOptions& options, std::size_t row_bytes) {
    rocksdb::Options database = make_tier_options(options);
    apply_user_options(database, options.user_options);
    align_blocks(database, row_bytes, options.user_options);
    // One flush at a time: RocksDB 7 loses a flush that starts while another flush of the same database fails.
    database.max_background_flushes = 1;
    database.max_background_compactions = count_background_threads(database).compactions;
    return database;
}

void check_options(const NamedOptions& user_options) {
    make_shard_options({false, false, 1, 4096, 1 << 20, 0, 1 << 20, "buffered", false, 1, user_options}, 64);
}

std::string read_library_version() { return rocksdb::GetRocksVersionAsString(); }

bool has_async_io() {
    const auto files = rocksdb::Env::Default()->GetFileSystem();
    std::unique_ptr<rocksdb::FSRandomAccessFile> file;
    if (!files->NewRandomAccessFile("/proc/self/exe", rocksdb::FileOptions(), &file, nullptr).ok()) return false;
    char byte;
    rocksdb::FSReadRequest request;
    request.offset = 0;
    request.len = 1;
    request.scratch = &byte;
    void* handle = nullptr;
    rocksdb::IOHandleDeleter release;
    const auto ignore = [](auto&&, void*) {};
    const bool started = file->ReadAsync(request, {}, ignore, nullptr, &handle, &release, nullptr).ok();
    if (handle == nullptr) return false;
    std::vector<void*> handles{handle};
    const bool ended = files->Poll(handles, 1).ok();
    release(handle);
    return started && ended;
}

BackgroundThreads count_background_threads(const rocksdb::Options& options) {
    const int share = std::max(1, options.max_background_jobs / 4);
    return {std::max(share, MIN_FLUSH_THREADS), std::max(1, options.max_background_jobs - share)};
}

}  // namespace tierbed
