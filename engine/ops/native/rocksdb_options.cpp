#include "rocksdb_options.h"

#include <algorithm>
#include <cstdarg>
#include <map>
#include <memory>
#include <stdexcept>
#include <thread>
#include <unordered_map>

#include <sys/resource.h>

#include <rocksdb/convenience.h>
#include <rocksdb/env.h>
#include <rocksdb/file_system.h>
#include <rocksdb/filter_policy.h>
#include <rocksdb/listener.h>
#include <rocksdb/options.h>
#include <rocksdb/slice_transform.h>
#include <rocksdb/table.h>
#include <rocksdb/version.h>

// RocksDB reads by io_uring only in a process that says so by this name.
extern "C" __attribute__((visibility("default"))) bool RocksDbIOUringEnable() { return true; }

namespace tierbed {
namespace {

constexpr int MERGED = 8;    // memtables that one flush writes
constexpr int BUFFERS = 12;  // memtables of a shard, at most: those, and room to write while they are flushed

const char OPENED_BY_TIERBED[] = "tierbed decides which files there are; leave it out";
const char NO_LOG[] = "the store writes no write-ahead log, snapshots are what survives; leave it out";
const char ORDER[] = "rows are stored in the order and with the bytes that tierbed gives them; leave it out";
const char READ_MODE[] = "give read_mode='buffered', 'mmap' or 'direct' instead";
const char CACHE[] = "give rocksdb_cache_mb instead";
const char DAMAGE[] = "damage of a file would go unseen; leave it out";
const char SCANS[] = "snapshots of a running table would mix rows of two steps; leave it out";

const std::map<std::string, const char*>& refused() {
    static const std::map<std::string, const char*> reasons{
        {"allow_2pc", NO_LOG},
        {"allow_mmap_reads", READ_MODE},
        {"best_efforts_recovery", DAMAGE},
        {"block_cache", CACHE},
        {"block_cache_compressed", CACHE},
        {"cf_paths", OPENED_BY_TIERBED},
        {"comparator", ORDER},
        {"compaction_filter", ORDER},
        {"compaction_filter_factory", ORDER},
        {"create_if_missing", OPENED_BY_TIERBED},
        {"create_missing_column_families", OPENED_BY_TIERBED},
        {"db_log_dir", OPENED_BY_TIERBED},
        {"db_paths", OPENED_BY_TIERBED},
        {"env", OPENED_BY_TIERBED},
        {"error_if_exists", OPENED_BY_TIERBED},
        {"file_system", OPENED_BY_TIERBED},
        {"flush_block_policy_factory", ORDER},
        {"force_consistency_checks", DAMAGE},
        {"inplace_callback", SCANS},
        {"inplace_update_support", SCANS},
        {"manual_wal_flush", NO_LOG},
        {"merge_operator", ORDER},
        {"no_block_cache", CACHE},
        {"paranoid_checks", DAMAGE},
        {"plain_table_factory", ORDER},
        {"skip_checking_sst_file_sizes_on_db_open", DAMAGE},
        {"table_factory", "set block_based_table_factory={...} instead"},
        {"unordered_write", SCANS},
        {"use_direct_reads", READ_MODE},
    };
    return reasons;
}

const char* refusal(const std::string& name) {
    const auto found = refused().find(name);
    if (found != refused().end()) return found->second;
    std::string lower(name);
    std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
    return lower.rfind("wal_", 0) == 0 || lower.find("_wal_") != std::string::npos ? NO_LOG : nullptr;
}

[[noreturn]] void wrong(const std::string& name, const std::string& value, const std::string& reason) {
    throw std::invalid_argument(name + "='" + value + "': " + reason);
}

std::unordered_map<std::string, std::string> known_options() {
    std::unordered_map<std::string, std::string> all, of_families;
    std::string text;
    const rocksdb::ConfigOptions config;
    if (rocksdb::GetStringFromDBOptions(config, rocksdb::DBOptions(), &text).ok())
        static_cast<void>(rocksdb::StringToMap(text, &all));
    if (rocksdb::GetStringFromColumnFamilyOptions(config, rocksdb::ColumnFamilyOptions(), &text).ok())
        static_cast<void>(rocksdb::StringToMap(text, &of_families));
    all.insert(of_families.begin(), of_families.end());
    all.emplace("block_based_table_factory", "");
    return all;
}

// Errors are returned and thrown; a log beside them would take disk, and fail to open where there is none.
class NoLog : public rocksdb::Logger {
public:
    NoLog() : Logger(rocksdb::FATAL_LEVEL) {}
    using Logger::Logv;
    void Logv(const char*, va_list) override {}
};

// An error that a disk with space again can mend is no reason to refuse every later write. The next call tries again;
// RocksDB's own attempts, seconds apart, would turn it away meanwhile.
class Recoverable : public rocksdb::EventListener {
public:
    void OnBackgroundError(rocksdb::BackgroundErrorReason, rocksdb::Status* error) override {
        if (error->IsIOError() && error->severity() > rocksdb::Status::kHardError)
            *error = rocksdb::Status(*error, rocksdb::Status::kHardError);
    }
    void OnErrorRecoveryBegin(rocksdb::BackgroundErrorReason, rocksdb::Status, bool* automatic) override {
        *automatic = false;
    }
};

// A share of the files that the process may open, half of them left to others.
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
    // Memtables that stay in the processor's cache take a row several times as fast as large ones; a flush merges them.
    database.write_buffer_size = std::max<std::size_t>(options.buffer_bytes / options.shards / BUFFERS, 64 << 10);
    database.max_write_buffer_number = BUFFERS;
    database.min_write_buffer_number_to_merge = MERGED;
    database.memtable_whole_key_filtering = true;
    database.memtable_prefix_bloom_size_ratio = 0.01;
    // A batch ascends within a bucket, the first byte of a key: each insertion starts where the one before ended.
    database.memtable_insert_with_hint_prefix_extractor.reset(rocksdb::NewFixedPrefixTransform(1));
    database.allow_concurrent_memtable_write = false;
    // Rows are overwritten at random: universal compaction rewrites each less often than levels do.
    database.compaction_style = rocksdb::kCompactionStyleUniversal;
    database.compaction_options_universal.min_merge_width = 4;
    database.compaction_options_universal.max_size_amplification_percent = 100;
    database.level0_file_num_compaction_trigger = 8;
    database.max_background_jobs =
        std::clamp(static_cast<int>(std::thread::hardware_concurrency()) / 2, 2, 8);  // shared by all databases
    database.compaction_readahead_size = 1 << 20;
    database.avoid_unnecessary_blocking_io = true;
    database.avoid_flush_during_shutdown = true;  // flush() is explicit; without it the live folder is scratch
    database.info_log = std::make_shared<NoLog>();
    database.allow_mmap_reads = options.read_mode == ReadMode::MMAP;
    database.use_direct_reads = options.read_mode == ReadMode::DIRECT;
    database.use_direct_io_for_flush_and_compaction = options.read_mode == ReadMode::DIRECT;
    database.listeners.push_back(std::make_shared<Recoverable>());
    return database;
}

void apply(rocksdb::Options& options, const std::string& name, const std::string& value) {
    if (const char* reason = refusal(name)) wrong(name, value, reason);
    rocksdb::ConfigOptions config;
    config.ignore_unknown_options = false;
    config.input_strings_escaped = false;
    config.invoke_prepare_options = false;
    const std::unordered_map<std::string, std::string> one{{name, value}};
    rocksdb::DBOptions database;
    const rocksdb::Status of_database = rocksdb::GetDBOptionsFromMap(config, options, one, &database);
    if (of_database.ok()) {
        options = rocksdb::Options(database, options);
        return;
    }
    rocksdb::ColumnFamilyOptions family;
    const rocksdb::Status of_family = rocksdb::GetColumnFamilyOptionsFromMap(config, options, one, &family);
    if (of_family.ok()) {
        options = rocksdb::Options(options, family);
        return;
    }
    if (!known_options().count(name))
        wrong(name, value,
              "RocksDB " + rocksdb::GetRocksVersionAsString() +
                  " has no option of this name; see the fields of its "
                  "DBOptions and ColumnFamilyOptions");
    const bool nested = name == "block_based_table_factory";
    wrong(name, value,
          "RocksDB cannot read this value (" + of_family.ToString() + "); give " +
              (nested ? "{name=value;...} with fields of its BlockBasedTableOptions" : "one of its type"));
}

// What cannot be told from one name alone.
void check_together(const rocksdb::Options& options, const NamedOptions& more) {
    const auto given = [&](const std::string& name) {
        for (const auto& [key, value] : more)
            if (key == name) return value;
        return std::string();
    };
    if (options.compaction_style == rocksdb::kCompactionStyleFIFO)
        wrong("compaction_style", given("compaction_style"),
              "FIFO drops rows; give kCompactionStyleLevel or -Universal");
    const auto* table = options.table_factory->GetOptions<rocksdb::BlockBasedTableOptions>();
    const std::string nested = given("block_based_table_factory");
    if (nested.empty()) return;
    if (table->checksum == rocksdb::kNoChecksum)
        wrong("block_based_table_factory", nested, std::string("checksum=kNoChecksum: ") + DAMAGE);
    for (const char* name : {"block_cache", "no_block_cache"})
        if (nested.find(name) != std::string::npos) wrong("block_based_table_factory", nested, CACHE);
}

}  // namespace

bool caches_blocks(const RocksOptions& options) { return options.read_mode == ReadMode::DIRECT && options.cache_bytes; }

rocksdb::Options shard_options(const RocksOptions& options) {
    rocksdb::Options database = own_options(options);
    for (const auto& [name, value] : options.more) apply(database, name, value);
    check_together(database, options.more);
    return database;
}

void check_options(const NamedOptions& more) {
    shard_options({false, 1, 4096, 1 << 20, 1 << 20, ReadMode::BUFFERED, false, more});
}

NamedOptions parse_options(const std::string& text) {
    std::unordered_map<std::string, std::string> map;
    const rocksdb::Status status = rocksdb::StringToMap(text, &map);
    if (!status.ok())
        throw std::invalid_argument("'" + text + "': " + status.ToString() + "; give name=value;name={name=value;...}");
    NamedOptions named(map.begin(), map.end());
    std::sort(named.begin(), named.end());
    return named;
}

std::vector<std::string> option_names() {
    std::vector<std::string> names;
    for (const auto& [name, value] : known_options())
        if (!refusal(name)) names.push_back(name);
    std::sort(names.begin(), names.end());
    return names;
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
