// Opening a database of any RocksDB: before 9.11 its functions give a DB*, from 11.0 on a std::unique_ptr<DB>, and in
// between either.
#pragma once
#include <memory>
#include <type_traits>

#include <rocksdb/db.h>

namespace tierbed {

// What `open(where)` returns, with `where` of the kind that it takes; the database is in `db`.
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
