#include "rocksdb_sorted_files.h"

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
    for (const std::string& file : files_.external_files) try {
            static_cast<void>(env_.DeleteFile(file));
        } catch (...) {  // out of memory: the file remains until the store is next recovered
        }
}

rocksdb::Status SortedFiles::add(const rocksdb::Slice& key, const rocksdb::Slice& value) {
    if (!is_open_) {
        const std::string file = folder_ + "/sorted-" + std::to_string(files_.external_files.size()) + ".sst";
        static_cast<void>(env_.DeleteFile(file));  // if it was left over, the database may have adopted its content
        files_.external_files.push_back(file);
        if (const rocksdb::Status status = writer_.Open(file); !status.ok()) return status;
        is_open_ = true;
    }
    if (const rocksdb::Status status = writer_.Put(key, value); !status.ok()) return status;
    last_key_.assign(key.data(), key.size());
    last_value_.assign(value.data(), value.size());
    return writer_.FileSize() < max_file_bytes_ ? rocksdb::Status::OK() : finish();
}

rocksdb::Status SortedFiles::finish() {
    if (!is_open_) return rocksdb::Status::OK();
    rocksdb::ExternalSstFileInfo info;
    is_open_ = false;
    const rocksdb::Status status = writer_.Finish(&info);
    bytes_ += info.file_size;
    files_.files_checksums.push_back(info.file_checksum);
    files_.files_checksum_func_names.push_back(info.file_checksum_func_name);
    return status;
}

rocksdb::Status SortedFiles::ingest(rocksdb::DB& db) {
    files_.column_family = db.DefaultColumnFamily();
    const rocksdb::Status status = db.IngestExternalFiles({files_});
    if (status.ok()) files_.external_files.clear();
    return status;
}

rocksdb::Status SortedFiles::load_into(rocksdb::DB& db) {
    if (last_key_.empty()) return rocksdb::Status::OK();
    if (const rocksdb::Status status = ingest(db); !status.ok()) return status;
    // Adopting files is no write. Write a row again, so that the number of the last write identifies these rows.
    rocksdb::WriteOptions options;
    options.disableWAL = true;
    return db.Put(options, last_key_, last_value_);
}

rocksdb::Status SortedFiles::write_to(rocksdb::DB& db) {
    const rocksdb::Snapshot* const snapshot = db.GetSnapshot();  // while one exists, adopted rows count as new writes
    const rocksdb::Status status = ingest(db);  // after an exception, the database may be locked: keep the snapshot
    db.ReleaseSnapshot(snapshot);
    return status;
}

}  // namespace tierbed
