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

// RocksDB reads by io_uring only in a process that says so by this name.
extern "C" __attribute__((visibility("default"))) bool RocksDbIOUringEnable() { return true; }

namespace tierbed {
namespace {

const char OPENED_BY_TIERBED[] = "tierbed decides which files there are; leave it out";
const char NO_LOG[] = "the store writes no write-ahead log, snapshots are what survives; leave it out";
const char ORDER[] = "rows are stored in the order and with the bytes that tierbed gives them; leave it out";
const char READ_MODE[] = "give read_mode='buffered', 'mmap' or 'direct' instead";
const char JOBS[] = "give max_background_jobs instead";
const char SCANS[] = "snapshots of a running table would mix rows of two steps; leave it out";

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
        {"flush_block_policy_factory", ORDER},
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

// The whole number that "-12" or "64K" says, in digits alone; empty for anything else.
std::string whole_number(const std::string& text) {
    const std::size_t sign = text.rfind('-', 0) == 0;
    u64 number = 0;
    const char* const end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data() + sign, end, number);
    if (error != std::errc() || end - rest > 1) return "";
    if (rest != end) {
        const std::size_t power = std::string("kmgt").find(static_cast<char>(std::tolower(*rest)));
        if (power == std::string::npos || __builtin_mul_overflow(number, u64{1} << (10 * (power + 1)), &number))
            return "";
    }
    return text.substr(0, sign) + std::to_string(number);
}

bool is_real(const std::string& text) {
    double number = 0;
    const char* const end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, number);
    return error == std::errc() && rest == end && std::isfinite(number);
}

// Those that this build can write.
std::string compressions() {
    std::string names;
    for (const rocksdb::CompressionType type : rocksdb::GetSupportedCompressions()) {
        rocksdb::Options options;
        options.compression = type;
        names += (names.empty() ? "" : ", ") + values_of(options)["compression"];
    }
    return names;
}

std::vector<std::string> sorted_names(const Values& values) {
    std::vector<std::string> names;
    for (const auto& [name, value] : values)
        if (!refusal(name)) names.push_back(name);
    std::sort(names.begin(), names.end());
    return names;
}

}  // namespace

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

Values values_of(const rocksdb::Options& options) {
    Values all, of_families;
    std::string text;
    const rocksdb::ConfigOptions config;
    if (rocksdb::GetStringFromDBOptions(config, options, &text).ok())
        static_cast<void>(rocksdb::StringToMap(text, &all));
    if (rocksdb::GetStringFromColumnFamilyOptions(config, options, &text).ok())
        static_cast<void>(rocksdb::StringToMap(text, &of_families));
    all.insert(of_families.begin(), of_families.end());
    if (options.table_factory->GetOptionString(config, &text).ok()) all[TABLE] = text;
    return all;
}

const Values& defaults() {
    static const Values values = values_of(rocksdb::Options());
    return values;
}

const Values& table_fields() {
    static const Values fields = [] {
        Values read;
        static_cast<void>(rocksdb::StringToMap(defaults().at(TABLE), &read));
        return read;
    }();
    return fields;
}

std::string misread(const std::string& name, const std::string& given, const std::string& standard,
                    const std::string& read) {
    if (standard.find('=') != std::string::npos) {
        if (given.find('=') == std::string::npos) return "give {name=value;...}";
        Values standards, reads;
        static_cast<void>(rocksdb::StringToMap(standard, &standards));
        static_cast<void>(rocksdb::StringToMap(read, &reads));
        for (const auto& [field, value] : parse_options(given)) {
            if (!standards.count(field)) continue;
            const std::string reason = misread(field, value, standards[field], reads[field]);
            if (!reason.empty()) return field + "='" + value + "': " + reason;
        }
        return "";
    }
    const bool negative = standard[0] == '-' || name == "level" || name == "level0_slowdown_writes_trigger";
    if (!whole_number(standard).empty()) {
        if (whole_number(given) != read || read.empty())
            return "RocksDB would read another number; give a whole number of its type, such as 4096 or 64M";
        return given[0] == '-' && !negative ? "it cannot be negative; give a number >= 0" : "";
    }
    if (is_real(standard) && (!is_real(given) || given[0] == '-')) return "give a number >= 0, such as 0.5";
    const bool list = standard.find_first_not_of("0123456789:") == std::string::npos && !standard.empty();
    return list && given != read ? "give whole numbers with a colon between, such as 1:2" : "";
}

std::string shown(const std::string& value) { return whole_number(value).empty() ? "'" + value + "'" : value; }

std::string expected(const std::string& name, const std::string& standard) {
    if (standard == "true" || standard == "false") return "give true or false";
    if (!whole_number(standard).empty()) return "give a whole number of its type, such as 4096 or 64M";
    if (is_real(standard)) return "give a number, such as 0.5";
    if (name == "compression" || name == "bottommost_compression") return "give one of " + compressions();
    if (standard.find('=') != std::string::npos) return "give {name=value;...} with its fields, {" + standard + "}";
    return "give one of its type" + (standard.empty() ? "" : ", such as its default " + standard);
}

std::string table_problem(const std::string& value) {
    if (value.find('=') == std::string::npos) return "give {name=value;...} with fields of its BlockBasedTableOptions";
    for (const auto& [field, of_field] : parse_options(value)) {
        if (const char* reason = refusal(field)) return field + "='" + of_field + "': " + reason;
        const auto standard = table_fields().find(field);
        if (standard == table_fields().end())
            return "it has no field named " + field + "; give fields of its BlockBasedTableOptions";
        rocksdb::BlockBasedTableOptions read;
        rocksdb::ConfigOptions config;
        config.ignore_unknown_options = false;
        config.input_strings_escaped = false;
        if (!rocksdb::GetBlockBasedTableOptionsFromMap(config, read, {{field, of_field}}, &read).ok())
            return field + "='" + of_field + "': RocksDB cannot read this value; " + expected(field, standard->second);
    }
    return "RocksDB cannot read this value; give {name=value;...} with fields of its BlockBasedTableOptions";
}

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
        if (map.count(name) && !names.insert(name).second) wrong(name, map[name], "it is given twice; give it once");
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
constexpr int BUFFERS = 12;  // memtables of a shard, at most: those, and room to write while they are flushed
constexpr std::size_t SMALLEST_BUFFER = 64 << 10;  // RocksDB raises a smaller memtable to it
constexpr std::size_t ENTRY_BYTES = 20;            // of a row in a block beside the row itself, about
constexpr std::size_t BLOCK_BYTES = 64;            // of a block beside its rows, about
constexpr std::size_t MOST_UNUSED = 4;             // a part of a block: what aligned blocks may leave unused

// Errors are returned and thrown; a log beside them would take disk, and fail to open where there is none.
class NoLog : public rocksdb::Logger {
public:
    NoLog() : Logger(rocksdb::FATAL_LEVEL) {}
    using Logger::Logv;
    void Logv(const char*, va_list) override {}
};

// An error that a disk with space again can mend is no reason to refuse every later write. The next call tries again;
// RocksDB's own attempts, seconds apart, would turn it away meanwhile. A failed compaction starts again by itself.
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

// The value of an option, or nothing.
std::string given_in(const NamedOptions& more, const std::string& name) {
    for (const auto& [key, value] : more)
        if (key == name) return value;
    return {};
}

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
    database.write_buffer_size =
        std::max<std::size_t>(options.buffer_bytes / options.shards / BUFFERS, SMALLEST_BUFFER);
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
    database.file_checksum_gen_factory = rocksdb::GetFileChecksumGenCrc32cFactory();
    database.listeners.push_back(std::make_shared<Recoverable>());
    return database;
}

void apply(rocksdb::Options& options, const std::string& name, const std::string& value) {
    if (const char* reason = refusal(name)) wrong(name, value, reason);
    const auto standard = defaults().find(name);
    if (standard == defaults().end() && table_fields().count(name))
        wrong(name, value,
              std::string("it is a field of ") + TABLE + "; give " + TABLE + "={'" + name + "': " + shown(value) + "}");
    if (standard == defaults().end())
        wrong(name, value,
              "RocksDB " + rocksdb::GetRocksVersionAsString() +
                  " has no option of this name; see the fields of its "
                  "DBOptions and ColumnFamilyOptions");
    rocksdb::ConfigOptions config;
    config.ignore_unknown_options = false;
    config.input_strings_escaped = false;
    config.invoke_prepare_options = false;
    const std::unordered_map<std::string, std::string> one{{name, value}};
    rocksdb::DBOptions database;
    const rocksdb::Status of_database = rocksdb::GetDBOptionsFromMap(config, options, one, &database);
    if (of_database.ok()) {
        options = rocksdb::Options(database, options);
    } else {
        rocksdb::ColumnFamilyOptions family;
        const rocksdb::Status of_family = rocksdb::GetColumnFamilyOptionsFromMap(config, options, one, &family);
        if (!of_family.ok())
            wrong(name, value,
                  name == TABLE ? table_problem(value)
                                : "RocksDB cannot read this value; " + expected(name, standard->second));
        options = rocksdb::Options(options, family);
    }
    const std::string reason = misread(name, value, standard->second, values_of(options)[name]);
    if (!reason.empty()) wrong(name, value, reason);
}

bool compresses(const rocksdb::Options& options) {
    const rocksdb::CompressionType last = options.bottommost_compression;
    return options.compression != rocksdb::kNoCompression ||
           (last != rocksdb::kDisableCompressionOption && last != rocksdb::kNoCompression);
}

// A block that begins with a page of the disk is read as one page, and not as two. RocksDB aligns no compressed blocks
// and no odd sizes; large rows would leave much of each block unused.
void align_blocks(rocksdb::Options& options, std::size_t row_bytes, const NamedOptions& more) {
    auto* table = options.table_factory->GetOptions<rocksdb::BlockBasedTableOptions>();
    const std::string nested = given_in(more, TABLE);
    if (table->block_align) wrong(TABLE, nested, "block_align=true: blocks are aligned where it pays; leave it out");
    if (nested.find("block_align") != std::string::npos) return;
    const std::size_t block = table->block_size, entry = row_bytes + ENTRY_BYTES;
    const std::size_t room = block - std::min(block, BLOCK_BYTES);
    const bool is_power = (block & (block - 1)) == 0, fills = entry <= room && room % entry <= block / MOST_UNUSED;
    const bool follows = !options.use_direct_io_for_flush_and_compaction;  // `FileChecksums` sees no other writes
    table->block_align = is_power && fills && follows && !compresses(options);
}

// What cannot be told from one name alone.
void check_together(const rocksdb::Options& options, const NamedOptions& more) {
    const auto given = [&](const std::string& name) { return given_in(more, name); };
    if (options.compaction_style != rocksdb::kCompactionStyleLevel &&
        options.compaction_style != rocksdb::kCompactionStyleUniversal)
        wrong("compaction_style", given("compaction_style"),
              "it would drop rows or stop writes for ever; give kCompactionStyleLevel or kCompactionStyleUniversal");
    if (options.max_background_jobs == 0)
        wrong("max_background_jobs", given("max_background_jobs"),
              "RocksDB would run some all the same; give a number >= 1");
    if (options.write_buffer_size < SMALLEST_BUFFER)
        wrong("write_buffer_size", given("write_buffer_size"), "RocksDB would raise it; give 64K or more");
    const auto* table = options.table_factory->GetOptions<rocksdb::BlockBasedTableOptions>();
    const std::string nested = given(TABLE);
    if (nested.empty()) return;
    if (table->block_size == 0) wrong(TABLE, nested, "block_size=0: a block holds rows; give a number of bytes > 0");
    if (table->checksum == rocksdb::kNoChecksum) wrong(TABLE, nested, std::string("checksum=kNoChecksum: ") + DAMAGE);
    if (table->index_type == rocksdb::BlockBasedTableOptions::kHashSearch && !options.prefix_extractor)
        wrong(TABLE, nested,
              "index_type=kHashSearch needs a prefix of keys; set prefix_extractor as well, or leave it out");
    for (const char* name : {"block_cache", "no_block_cache"})
        if (nested.find(name) != std::string::npos) wrong(TABLE, nested, CACHE);
}

}  // namespace

bool caches_blocks(const RocksOptions& options) { return options.read_mode == ReadMode::DIRECT && options.cache_bytes; }

rocksdb::Options shard_options(const RocksOptions& options, std::size_t row_bytes) {
    rocksdb::Options database = own_options(options);
    for (const auto& [name, value] : options.more) apply(database, name, value);
    align_blocks(database, row_bytes, options.more);
    check_together(database, options.more);
    // RocksDB 7 forgets a flush that is to begin when another of its database fails: there is one at a time.
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
