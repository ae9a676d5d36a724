#include "rocksdb_options.h"

#include <algorithm>
#include <cstdarg>
#include <memory>
#include <set>
#include <stdexcept>
#include <thread>
#include <unordered_map>

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

// RocksDB reads by io_uring only if the process defines this function.
extern "C" __attribute__((visibility("default"))) bool RocksDbIOUringEnable() { return true; }

namespace tierbed {
namespace {

const char TABLE[] = "block_based_table_factory";

[[noreturn]] void refuse(const std::string& name, const std::string& value, const std::string& reason) {
    throw std::invalid_argument(name + "='" + value + "': " + reason);
}

constexpr int MERGED = 8;    // memtables that one flush writes
constexpr int BUFFERS = 12;  // memtables of a shard, at most: those of a flush, and others to write to meanwhile
constexpr std::size_t SMALLEST_BUFFER = 64 << 10;  // RocksDB raises a smaller memtable to it
constexpr std::size_t ENTRY_BYTES = 20;            // about, of a row in a block, next to the row itself
constexpr std::size_t BLOCK_BYTES = 64;            // about, of a block, next to its rows
constexpr std::size_t MAX_UNUSED = 4;              // aligned blocks may waste block / MAX_UNUSED bytes

// Errors are returned and thrown. A log would take disk space, and opening it would fail on a full disk.
class NoLog : public rocksdb::Logger {
public:
    NoLog() : Logger(rocksdb::FATAL_LEVEL) {}
    using Logger::Logv;
    void Logv(const char*, va_list) override {}
};

// A full disk must not make RocksDB refuse every later write, since space may be freed. The next call tries again.
// RocksDB's own retries, which are seconds apart, would refuse it meanwhile. A failed compaction restarts by itself.
class Recoverable : public rocksdb::EventListener {
public:
    void OnBackgroundError(rocksdb::BackgroundErrorReason reason, rocksdb::Status* error) override {
        const auto most = reason == rocksdb::BackgroundErrorReason::kCompaction ? rocksdb::Status::kSoftError
                                                                                : rocksdb::Status::kHardError;
        if (error->IsIOError() && error->severity() > most) *error = rocksdb::Status(*error, most);
    }
    void OnErrorRecoveryBegin(rocksdb::BackgroundErrorReason, rocksdb::Status, bool* automatic) override {
        *automatic = false;
    }
};

// Open files for each shard: half of the process's limit for all shards.
int open_files(u32 shards) {
    rlimit limit{};
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return -1;
    return static_cast<int>(std::clamp<rlim_t>(limit.rlim_cur / 2 / shards, 16, 1 << 20));
}

rocksdb::Options own_options(const RocksOptions& options) {
    rocksdb::BlockBasedTableOptions table;
    table.block_size = options.block_bytes;
    table.no_block_cache = !caches_blocks(options);
    table.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10));
    table.data_block_index_type = rocksdb::BlockBasedTableOptions::kDataBlockBinaryAndHash;
    table.format_version = 5;  // read by 6.6 and later
    rocksdb::Options database;
    database.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
    database.create_if_missing = options.create;
    database.max_open_files = open_files(options.shards);
    database.compression = rocksdb::kNoCompression;
    // Memtables that fit in the CPU cache insert several times faster than large ones; a flush merges them.
    database.write_buffer_size =
        std::max<std::size_t>(options.buffer_bytes / options.shards / BUFFERS, SMALLEST_BUFFER);
    database.max_write_buffer_number = BUFFERS;
    database.min_write_buffer_number_to_merge = MERGED;
    database.memtable_whole_key_filtering = true;
    database.memtable_prefix_bloom_size_ratio = 0.01;
    // Keys of a batch ascend within a bucket, the first byte: each insertion starts at the end of the one before.
    database.memtable_insert_with_hint_prefix_extractor.reset(rocksdb::NewFixedPrefixTransform(1));
    database.allow_concurrent_memtable_write = false;
    // Rows are overwritten at random, and universal compaction rewrites each less often than level compaction.
    database.compaction_style = rocksdb::kCompactionStyleUniversal;
    database.compaction_options_universal.min_merge_width = 4;
    database.compaction_options_universal.max_size_amplification_percent = 100;
    database.level0_file_num_compaction_trigger = 8;
    database.max_background_jobs =
        std::clamp(static_cast<int>(std::thread::hardware_concurrency()) / 2, 2, 8);  // shared by all databases
    database.compaction_readahead_size = 1 << 20;
    database.avoid_unnecessary_blocking_io = true;
    database.avoid_flush_during_shutdown = true;  // without an explicit flush() the live rows are not served again
    database.info_log = std::make_shared<NoLog>();
    database.allow_mmap_reads = options.read_mode == "mmap";
    database.use_direct_reads = options.read_mode == "direct";
    database.use_direct_io_for_flush_and_compaction = options.read_mode == "direct";
    database.file_checksum_gen_factory = rocksdb::GetFileChecksumGenCrc32cFactory();
    database.listeners.push_back(std::make_shared<Recoverable>());
    return database;
}

void apply_all(rocksdb::Options& options, const NamedOptions& more) {
    rocksdb::ConfigOptions config;
    config.input_strings_escaped = false;
    config.invoke_prepare_options = false;
    for (const auto& [name, value] : more) {
        const std::string option = name + "={" + value + "}";
        const rocksdb::Status status = rocksdb::GetOptionsFromString(config, options, option, &options);
        if (!status.ok()) refuse(name, value, "RocksDB " + library_version() + ": " + status.ToString());
    }
    const std::vector<rocksdb::CompressionType> known = rocksdb::GetSupportedCompressions();
    for (const rocksdb::CompressionType type : {options.compression, options.bottommost_compression})
        if (type != rocksdb::kDisableCompressionOption && std::find(known.begin(), known.end(), type) == known.end())
            throw std::invalid_argument("compression: this build of RocksDB lacks it; give another");
}

bool compresses(const rocksdb::Options& options) {
    const rocksdb::CompressionType last = options.bottommost_compression;
    return options.compression != rocksdb::kNoCompression ||
           (last != rocksdb::kDisableCompressionOption && last != rocksdb::kNoCompression);
}

// An aligned block is read as one page of the disk instead of two. RocksDB aligns neither compressed blocks nor sizes
// other than powers of two. With large rows, aligned blocks would waste much space.
void align_blocks(rocksdb::Options& options, std::size_t row_bytes, const NamedOptions& more) {
    auto* table = options.table_factory->GetOptions<rocksdb::BlockBasedTableOptions>();
    for (const auto& [name, value] : more)
        if (name == TABLE && value.find("block_align") != std::string::npos) return;
    const std::size_t block = table->block_size, entry = row_bytes + ENTRY_BYTES;
    const std::size_t space = block - std::min(block, BLOCK_BYTES);
    const bool is_power = (block & (block - 1)) == 0, fills = entry <= space && space % entry <= block / MAX_UNUSED;
    const bool follows = !options.use_direct_io_for_flush_and_compaction;  // `Fence` does not see direct writes
    table->block_align = is_power && fills && follows && !compresses(options);
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
        if (map.count(name) && !names.insert(name).second) refuse(name, map[name], "it is given twice; give it once");
        const rocksdb::Status rest = rocksdb::OptionTypeInfo::NextToken(text, ';', equals + 1, &end, &value);
        if (!rest.ok() || end == std::string::npos) break;
    }
    NamedOptions named(map.begin(), map.end());
    std::sort(named.begin(), named.end());
    return named;
}

bool caches_blocks(const RocksOptions& options) { return options.read_mode == "direct" && options.cache_bytes; }

rocksdb::Options shard_options(const RocksOptions& options, std::size_t row_bytes) {
    rocksdb::Options database = own_options(options);
    apply_all(database, options.more);
    align_blocks(database, row_bytes, options.more);
    // One flush at a time: RocksDB 7 loses a flush that starts while another one of its database fails.
    database.max_background_flushes = 1;
    database.max_background_compactions = background_threads(database).compactions;
    return database;
}

void check_options(const NamedOptions& more) {
    shard_options({false, false, 1, 4096, 1 << 20, 1 << 20, "buffered", false, 1, more}, 64);
}

std::string library_version() { return rocksdb::GetRocksVersionAsString(); }

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
    const bool started =
        file->ReadAsync(request, rocksdb::IOOptions(), ignore, nullptr, &handle, &release, nullptr).ok();
    if (handle == nullptr) return false;
    std::vector<void*> handles{handle};
    const bool ended = files->Poll(handles, 1).ok();
    release(handle);
    return started && ended;
}

BackgroundThreads background_threads(const rocksdb::Options& options) {
    const int flushes = std::max(1, options.max_background_jobs / 4);
    return {flushes, std::max(1, options.max_background_jobs - flushes)};
}

}  // namespace tierbed
