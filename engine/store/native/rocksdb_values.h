// The names of RocksDB's options, what each may be, and what is wrong with a value, for people.
#pragma once
#include <string>
#include <unordered_map>

#include "rocksdb_options.h"

namespace tierbed {

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

}  // namespace tierbed
