// Keeps a database that may never be closed off its folder.
#pragma once
#include <memory>

namespace rocksdb {
class Env;
class FileChecksumGenFactory;
}  // namespace rocksdb

namespace tierbed {

// An exception that leaves RocksDB in the middle of a call leaves its locks and queues as they were, so that closing
// the database could wait for ever. It stays open instead, with threads of its own: from `shut` on, these create,
// remove and rename nothing, and other databases may be opened in the same places.
class Fence {
public:
    Fence();
    ~Fence();
    Fence(const Fence&) = delete;

    // The files of the system, through the fence.
    rocksdb::Env* env() const { return env_.get(); }
    // The checksums of files of rows that are written through it.
    std::shared_ptr<rocksdb::FileChecksumGenFactory> checksums() const;
    // May be called again.
    void shut() noexcept;

private:
    class Files;

    std::shared_ptr<Files> files_;
    std::unique_ptr<rocksdb::Env> env_;
};

}  // namespace tierbed
