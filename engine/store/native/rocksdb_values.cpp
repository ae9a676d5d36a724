#include "rocksdb_values.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <set>
#include <stdexcept>

#include <rocksdb/convenience.h>
#include <rocksdb/options.h>
#include <rocksdb/table.h>
#include <rocksdb/utilities/options_type.h>

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

}  // namespace tierbed
