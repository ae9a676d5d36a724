// The live files of a database, and their checksums.
#pragma once
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "ops/kernels/portable.h"

namespace rocksdb {
class FileChecksumGenerator;
class FileChecksumGenFactory;
class FSWritableFile;
}  // namespace rocksdb

namespace tierbed {

// The number of a crc32c as RocksDB keeps it in its manifest: four bytes, big-endian.
u32 checksum_number(const char* kept);

// The crc32c of bytes that are passed in pieces.
class Crc32c {
public:
    Crc32c();
    ~Crc32c();
    Crc32c(const Crc32c&) = delete;
    void update(const u8* bytes, std::size_t n);
    u32 finish();  // called once, at the end

private:
    std::unique_ptr<rocksdb::FileChecksumGenerator> generator_;
};

// The checksums of files that RocksDB is writing. RocksDB 7.8's own checksum leaves out the padding between aligned
// blocks, so a wrapper of the file computes the checksum that RocksDB keeps.
class FileChecksums : public std::enable_shared_from_this<FileChecksums> {
public:
    // Wraps a file so that all bytes appended to it are in its checksum.
    std::unique_ptr<rocksdb::FSWritableFile> follow(const std::string& path,
                                                    std::unique_ptr<rocksdb::FSWritableFile> file);

    // Gives RocksDB the checksums of followed files, and computes those of other files.
    std::shared_ptr<rocksdb::FileChecksumGenFactory> factory();

private:
    class Factory;

    void forget(const std::string& path);

    std::mutex mutex_;
    // until RocksDB reads the checksum or closes the file
    std::map<std::string, std::shared_ptr<rocksdb::FileChecksumGenerator>> followed_;
};

struct LiveFile {
    std::string name;                    // shard-N/<file>
    u64 bytes;                           // from its beginning; the live file may grow
    std::optional<u32> crc32c;           // as RocksDB computed it while writing the file
    std::optional<std::string> content;  // the bytes to copy if the live file may be replaced
};

}  // namespace tierbed
