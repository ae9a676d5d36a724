// Writes many rows to a database as sorted files, which the database adopts. This skips memtables and their flush.
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
    SortedFiles(const rocksdb::Options& options, const std::string& folder, std::size_t max_file_bytes);
    ~SortedFiles();  // removes the files that the database has not adopted
    SortedFiles(const SortedFiles&) = delete;
    // True if `add` accepts this key: keys must ascend.
    bool accepts(const rocksdb::Slice& key) const { return key.compare(last_key_) > 0; }
    rocksdb::Status add(const rocksdb::Slice& key, const rocksdb::Slice& value);
    // Ends the last file. Call after the last `add`.
    rocksdb::Status finish();
    // Adds all rows durably to a database that holds none of them.
    rocksdb::Status load_into(rocksdb::DB& db);
    // Adds all rows durably to a database whose memtables are empty. They replace older rows.
    rocksdb::Status write_to(rocksdb::DB& db);
    std::size_t bytes() const { return bytes_; }  // of all finished files

private:
    rocksdb::Status ingest(rocksdb::DB& db);

    const std::string folder_;
    const std::size_t max_file_bytes_;
    rocksdb::Env& env_;
    rocksdb::SstFileWriter writer_;
    rocksdb::IngestExternalFileArg files_;
    bool is_open_ = false;
    std::size_t bytes_ = 0;
    std::string last_key_, last_value_;
};

}  // namespace tierbed
