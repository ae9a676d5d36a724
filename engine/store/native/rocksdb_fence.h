// A fence keeps a failed database from changing its folder. The failed database is still open.
#pragma once
#include <memory>

namespace rocksdb {
class Env;
class FileChecksumGenFactory;
}  // namespace rocksdb

namespace tierbed {

// If a RocksDB call ends with an exception, RocksDB's locks and queues stay as they are, and closing the database could
// hang. So the database and its threads stay alive. After `close`, the failed database can no longer create,
// remove or rename files, and another database may open the same folder.
class Fence {
public:
    Fence();
    ~Fence();
    Fence(const Fence&) = delete;

    // The file system to open the database with.
    rocksdb::Env* env() const { return env_.get(); }
    // Returns a factory of checksums. For a file written through `env`, the checksum was computed during the write.
    std::shared_ptr<rocksdb::FileChecksumGenFactory> make_checksum_factory() const;
    // May be called more than once.
    void close() noexcept;

private:
    class FencedFileSystem;

    std::shared_ptr<FencedFileSystem> files_;
    std::unique_ptr<rocksdb::Env> env_;
};

}  // namespace tierbed
