#include "rocksdb_load.h"

namespace tierbed {

constexpr std::size_t SYNC_BYTES = 1 << 20;  // RocksDB starts to write this many bytes to the disk at a time

SortedFiles::SortedFiles(const rocksdb::Options& options, const std::string& folder, std::size_t max_file_bytes)
    : folder_(folder),
      max_file_bytes_(max_file_bytes),
      env_(*options.env),
      writer_(
          [&] {
              rocksdb::EnvOptions files(options);
              files.bytes_per_sync = SYNC_BYTES;
              return files;
          }(),
          options, nullptr, false) {
    files_.options.move_files = true;
    files_.options.write_global_seqno = false;
    files_.options.verify_file_checksum = false;
}

SortedFiles::~SortedFiles() {
    for (const std::string& file : files_.external_files) static_cast<void>(env_.DeleteFile(file));
}

rocksdb::Status SortedFiles::add(const rocksdb::Slice& key, const rocksdb::Slice& value) {
    if (!is_open_) {
        files_.external_files.push_back(folder_ + "/load-" + std::to_string(files_.external_files.size()) + ".sst");
        if (const rocksdb::Status status = writer_.Open(files_.external_files.back()); !status.ok()) return status;
        is_open_ = true;
    }
    if (const rocksdb::Status status = writer_.Put(key, value); !status.ok()) return status;
    last_key_.assign(key.data(), key.size());
    last_value_.assign(value.data(), value.size());
    return writer_.FileSize() < max_file_bytes_ ? rocksdb::Status::OK() : finish_file();
}

rocksdb::Status SortedFiles::finish_file() {
    rocksdb::ExternalSstFileInfo info;
    is_open_ = false;
    const rocksdb::Status status = writer_.Finish(&info);
    bytes_ += info.file_size;
    files_.files_checksums.push_back(info.file_checksum);
    files_.files_checksum_func_names.push_back(info.file_checksum_func_name);
    return status;
}

rocksdb::Status SortedFiles::ingest(rocksdb::DB& db) {
    if (is_open_)
        if (const rocksdb::Status status = finish_file(); !status.ok()) return status;
    files_.column_family = db.DefaultColumnFamily();
    return db.IngestExternalFiles({files_});
}

rocksdb::Status SortedFiles::finish_load(rocksdb::DB& db) {
    if (last_key_.empty()) return rocksdb::Status::OK();
    if (const rocksdb::Status status = ingest(db); !status.ok()) return status;
    // Adopting files is no write. Write a row again, so that the number of the last write identifies these rows.
    rocksdb::WriteOptions options;
    options.disableWAL = true;
    return db.Put(options, last_key_, last_value_);
}

rocksdb::Status SortedFiles::finish_write(rocksdb::DB& db) {
    const rocksdb::ManagedSnapshot snapshot(&db);  // while a snapshot exists, adopted rows count as new writes
    return ingest(db);
}

}  // namespace tierbed
