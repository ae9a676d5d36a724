// Keeps a failed database, which cannot be closed, away from its folder.
#pragma once
#include <memory>

namespace rocksdb {
class Env;
class FileChecksumGenFactory;
}  // namespace rocksdb

namespace tierbed {

// If an exception leaves RocksDB in the middle of a call, RocksDB's locks and queues stay as they are, and closing the
// database could hang. The database stays open instead, with its threads: after `shut` they create, remove and rename
// no files, so another database may be opened in the same folder.
class Fence {
public:
    Fence();
    ~Fence();
    Fence(const Fence&) = delete;

    // The file system behind the fence.
    rocksdb::Env* env() const { return env_.get(); }
    // Gives RocksDB the checksums of files of rows that are written through the fence, and computes those of others.
    std::shared_ptr<rocksdb::FileChecksumGenFactory> checksums() const;
    // Idempotent.
    void shut() noexcept;

private:
    class Files;

    std::shared_ptr<Files> files_;
    std::unique_ptr<rocksdb::Env> env_;
};

}  // namespace tierbed
