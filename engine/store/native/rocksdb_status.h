// What RocksDB says of a failure, with the folder and a remedy.
#pragma once
#include <string>

namespace rocksdb {
class Status;
}  // namespace rocksdb

namespace tierbed {

// Throws std::runtime_error, "RocksDB in <folder>: <what>: <its own words>; <remedy>", unless all is well.
void check(const rocksdb::Status& status, const std::string& folder, const char* what);

}  // namespace tierbed
