// Loads rows into a database as sorted files. RocksDB adopts such files without merging them with other files.
#pragma once
#include <string>

#include <rocksdb/db.h>
#include <rocksdb/options.h>
#include <rocksdb/sst_file_writer.h>
#include <rocksdb/status.h>

namespace tierbed {

class SortedFiles {
public:
    // folder: the database's folder, where the files have other names until the database adopts them.
    SortedFiles(const rocksdb::Options& options, const std::string& folder);
    // True if `add` accepts this key: keys must ascend.
    bool accepts(const rocksdb::Slice& key) const { return key.compare(last_key_) > 0; }
    rocksdb::Status add(const rocksdb::Slice& key, const rocksdb::Slice& value);
    // Makes all rows durable and adds them to the database, which holds none of them.
    rocksdb::Status finish(rocksdb::DB& db);

private:
    rocksdb::Status finish_file();

    const std::string folder_;
    const std::size_t max_file_bytes_;
    rocksdb::SstFileWriter writer_;
    rocksdb::IngestExternalFileArg files_;
    bool is_open_ = false;
    std::string last_key_, last_value_;
};

}  // namespace tierbed
