// Throws RocksDB's errors, with the folder and a remedy.
#pragma once
#include <string>

namespace rocksdb {
class Status;
}  // namespace rocksdb

namespace tierbed {

// Throws std::runtime_error, "RocksDB in <folder>: <what>: <status>; <remedy>", unless the status is OK.
void check(const rocksdb::Status& status, const std::string& folder, const char* what);

}  // namespace tierbed
