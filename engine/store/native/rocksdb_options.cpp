#include "rocksdb_options.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdarg>
#include <map>
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
const char CACHE[] = "give rocksdb_cache_mb instead";
const char DAMAGE[] = "damage of a file would go unseen; leave it out";
const char OPENED_BY_TIERBED[] = "tierbed decides which files there are; leave it out";
const char NO_LOG[] = "the store has no write-ahead log, and snapshots survive a crash; leave it out";
const char ORDER[] = "rows are stored in the order and with the bytes that tierbed gives them; leave it out";
const char READ_MODE[] = "give read_mode='buffered', 'mmap' or 'direct' instead";
const char JOBS[] = "give max_background_jobs instead";
const char SCANS[] = "snapshots of a running table would mix rows of two steps; leave it out";
constexpr double SMALLEST_DIFFERENCE = 1e-6;  // of numbers: RocksDB writes 6 digits of a fraction

using Values = std::unordered_map<std::string, std::string>;

const std::map<std::string, const char*>& refused() {
    static const std::map<std::string, const char*> reasons{
        {"allow_2pc", NO_LOG},
        {"allow_mmap_reads", READ_MODE},
        {"allow_mmap_writes", "a full disk would end the process; leave it out"},
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
        {"enable_blob_files", "the bounds of disk use leave such files out; leave it out"},
        {"env", OPENED_BY_TIERBED},
        {"error_if_exists", OPENED_BY_TIERBED},
        {"file_system", OPENED_BY_TIERBED},
        {"force_consistency_checks", DAMAGE},
        {"inplace_callback", SCANS},
        {"inplace_update_support", SCANS},
        {"manual_wal_flush", NO_LOG},
        {"max_background_compactions", JOBS},
        {"max_background_flushes", JOBS},
        {"merge_operator", ORDER},
        {"no_block_cache", CACHE},
        {"num_levels", "the folder would not open with another number; leave it out"},
        {"paranoid_checks", DAMAGE},
        {"plain_table_factory", ORDER},
        {"skip_checking_sst_file_sizes_on_db_open", DAMAGE},
        {"table_factory", "set block_based_table_factory={...} instead"},
        {"two_write_queues", NO_LOG},
        {"unordered_write", SCANS},
        {"use_direct_reads", READ_MODE},
    };
    return reasons;
}

// The number that a text such as "-12", "0.5" or "64K" is, nan for any other text.
double number_of(const std::string& text) {
    double number = 0;
    const char* const end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, number);
    if (error != std::errc() || end - rest > 1) return std::nan("");
    if (rest == end) return number;
    const std::size_t power = std::string("kmgt").find(static_cast<char>(std::tolower(*rest)));
    return power == std::string::npos ? std::nan("") : std::ldexp(number, 10 * (static_cast<int>(power) + 1));
}

[[noreturn]] void refuse(const std::string& name, const std::string& value, const std::string& reason) {
    throw std::invalid_argument(name + "='" + value + "': " + reason);
}

// Why the store does not take an option, or null.
const char* refusal(const std::string& name) {
    const auto found = refused().find(name);
    if (found != refused().end()) return found->second;
    std::string lower(name);
    std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
    return lower.rfind("wal_", 0) == 0 || lower.find("_wal_") != std::string::npos ? NO_LOG : nullptr;
}

Values fields_of(const std::string& text) {
    Values fields;
    static_cast<void>(rocksdb::StringToMap(text, &fields));
    return fields;
}

// All options by name, as RocksDB writes them.
Values values_of(const rocksdb::Options& options) {
    Values all, of_families;
    std::string text;
    const rocksdb::ConfigOptions config;
    if (rocksdb::GetStringFromDBOptions(config, options, &text).ok()) all = fields_of(text);
    if (rocksdb::GetStringFromColumnFamilyOptions(config, options, &text).ok()) of_families = fields_of(text);
    all.insert(of_families.begin(), of_families.end());
    if (options.table_factory->GetOptionString(config, &text).ok()) all[TABLE] = text;
    return all;
}

const Values& defaults() {
    static const Values values = values_of(rocksdb::Options());
    return values;
}

const Values& table_fields() {
    static const Values fields = fields_of(defaults().at(TABLE));
    return fields;
}

std::vector<std::string> sorted_names(const Values& values) {
    std::vector<std::string> names;
    for (const auto& [name, value] : values)
        if (!refusal(name)) names.push_back(name);
    std::sort(names.begin(), names.end());
    return names;
}

std::string like_default(const std::string& standard) {
    const bool has_fields = standard.find('=') != std::string::npos;
    return "give a value such as its default, '" + (has_fields ? "{" + standard + "}" : standard) + "'";
}

// Refuses a value that RocksDB did not read whole. RocksDB reads what it can of a number: "64 MB" as 64, -1 as the
// largest. read: the value as RocksDB writes it after reading. standard: the default, which shows the type.
void check_read(const std::string& name, const std::string& value, const std::string& standard,
                const std::string& read) {
    if (standard.find('=') != std::string::npos) {
        if (value.find('=') == std::string::npos) refuse(name, value, "it has fields; " + like_default(standard));
        const Values standards = fields_of(standard), reads = fields_of(read);
        for (const auto& [field, of_field] : parse_options(value))
            if (standards.count(field) && reads.count(field))
                check_read(name + "." + field, of_field, standards.at(field), reads.at(field));
        return;
    }
    const bool is_list =
        standard.find(':') != std::string::npos && standard.find_first_not_of("0123456789:") == std::string::npos;
    const bool is_number = !std::isnan(number_of(standard));
    const double number = number_of(value);
    if (is_list ? value != read : is_number && !(std::abs(number - number_of(read)) < SMALLEST_DIFFERENCE))
        refuse(name, value, "RocksDB would read '" + read + "'; " + like_default(standard));
    const bool negative =
        standard[0] == '-' || name == "compression_opts.level" || name == "level0_slowdown_writes_trigger";
    if (is_number && number < 0 && !negative) refuse(name, value, "it cannot be negative; " + like_default(standard));
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

std::vector<std::string> option_names() { return sorted_names(defaults()); }

std::vector<std::string> table_field_names() { return sorted_names(table_fields()); }

namespace {

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
    database.allow_mmap_reads = options.read_mode == ReadMode::MMAP;
    database.use_direct_reads = options.read_mode == ReadMode::DIRECT;
    database.use_direct_io_for_flush_and_compaction = options.read_mode == ReadMode::DIRECT;
    database.file_checksum_gen_factory = rocksdb::GetFileChecksumGenCrc32cFactory();
    database.listeners.push_back(std::make_shared<Recoverable>());
    return database;
}

// How the options break what the tier promises, or null.
const char* problem_of(const rocksdb::Options& options) {
    const auto* table = options.table_factory->GetOptions<rocksdb::BlockBasedTableOptions>();
    if (options.compaction_style != rocksdb::kCompactionStyleLevel &&
        options.compaction_style != rocksdb::kCompactionStyleUniversal)
        return "it would drop rows or stop writes forever; give kCompactionStyleLevel or kCompactionStyleUniversal";
    if (options.max_background_jobs == 0) return "RocksDB would run some anyway; give a number >= 1";
    if (options.write_buffer_size < SMALLEST_BUFFER) return "RocksDB would raise it; give 64K or more";
    if (table->block_size == 0) return "a block holds rows; give a number of bytes > 0";
    if (table->checksum == rocksdb::kNoChecksum) return DAMAGE;
    return table->block_align ? "blocks are aligned if it pays; leave it out" : nullptr;
}

// Sets an option, or a field of block_based_table_factory if `in_table`.
void apply(rocksdb::Options& options, const std::string& name, const std::string& value, bool in_table = false) {
    const std::string path = in_table ? TABLE + ("." + name) : name;
    if (const char* reason = refusal(name)) refuse(path, value, reason);
    rocksdb::ConfigOptions config;
    config.ignore_unknown_options = false;
    config.input_strings_escaped = false;
    config.invoke_prepare_options = false;
    const std::string option = name + "={" + value + "}";
    const rocksdb::Status status =
        rocksdb::GetOptionsFromString(config, options, in_table ? TABLE + ("={" + option + "}") : option, &options);
    const Values& known = in_table ? table_fields() : defaults();
    const auto standard = known.find(name);
    if (standard == known.end()) {
        if (in_table && status.ok()) return;  // a field of earlier versions, which RocksDB ignores
        refuse(path, value,
               "RocksDB " + library_version() +
                   " has no option of this name; see the fields of its DBOptions, ColumnFamilyOptions and "
                   "BlockBasedTableOptions");
    }
    if (!status.ok()) refuse(path, value, status.ToString() + "; " + like_default(standard->second));
    Values values = values_of(options);
    check_read(path, value, standard->second, in_table ? fields_of(values[TABLE])[name] : values[name]);
    if (const char* problem = problem_of(options)) refuse(path, value, problem);
}

void apply_all(rocksdb::Options& options, const NamedOptions& more) {
    for (const auto& [name, value] : more) {
        if (name == TABLE && value.find('=') != std::string::npos)
            for (const auto& [field, of_field] : parse_options(value)) apply(options, field, of_field, true);
        else if (name == TABLE)
            refuse(name, value, "it has fields; give some, such as {block_size=8192}");
        else if (table_fields().count(name) && !defaults().count(name) && !refusal(name))
            refuse(name, value,
                   std::string("it is a field of ") + TABLE + "; give {'" + TABLE + "': {'" + name + "': '" + value +
                       "'}}");
        else
            apply(options, name, value);
    }
    const auto* table = options.table_factory->GetOptions<rocksdb::BlockBasedTableOptions>();
    if (table->index_type == rocksdb::BlockBasedTableOptions::kHashSearch && !options.prefix_extractor)
        refuse(TABLE + std::string(".index_type"), "kHashSearch",
               "it needs a prefix of keys; set prefix_extractor as well, or leave it out");
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
    const bool follows = !options.use_direct_io_for_flush_and_compaction;  // `FileChecksums` does not see direct writes
    table->block_align = is_power && fills && follows && !compresses(options);
}

}  // namespace

bool caches_blocks(const RocksOptions& options) { return options.read_mode == ReadMode::DIRECT && options.cache_bytes; }

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
    shard_options({false, false, 1, 4096, 1 << 20, 1 << 20, ReadMode::BUFFERED, false, 1, more}, 64);
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
