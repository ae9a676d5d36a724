// Opens a database with any version of RocksDB.
#pragma once
#include <memory>
#include <type_traits>

#include <rocksdb/db.h>

namespace tierbed {

// Calls open(&db). Before RocksDB 9.11, db is a DB*. From 11.0 on, it is a std::unique_ptr<DB>. In between, try both.
template <class Open>
rocksdb::Status open_into(std::unique_ptr<rocksdb::DB>& db, const Open& open) {
    if constexpr (std::is_invocable_v<const Open&, std::unique_ptr<rocksdb::DB>*>) {
        return open(&db);
    } else {
        rocksdb::DB* opened = nullptr;
        const rocksdb::Status status = open(&opened);
        db.reset(opened);
        return status;
    }
}

}  // namespace tierbed
