// The files that a database consists of at one moment.
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

// crc32c, the checksum that RocksDB keeps of each file of rows in its manifest.
// What RocksDB keeps: four bytes, the highest first.
u32 checksum_number(const char* kept);

// Of bytes that come in pieces.
class Crc32c {
public:
    Crc32c();
    ~Crc32c();
    Crc32c(const Crc32c&) = delete;
    void update(const u8* bytes, std::size_t n);
    u32 finish();  // ends it

private:
    std::unique_ptr<rocksdb::FileChecksumGenerator> generator_;
};

// Of files while RocksDB writes them. What RocksDB 7.8 takes itself leaves out the padding between aligned blocks, so
// the file takes the checksum, and RocksDB keeps that one.
class FileChecksums : public std::enable_shared_from_this<FileChecksums> {
public:
    // The file, with a checksum of all that is appended to it.
    std::unique_ptr<rocksdb::FSWritableFile> follow(const std::string& path,
                                                    std::unique_ptr<rocksdb::FSWritableFile> file);

    // Gives RocksDB the checksums of the files that are followed, and takes those of others.
    std::shared_ptr<rocksdb::FileChecksumGenFactory> factory();

private:
    class Factory;

    void forget(const std::string& path);

    std::mutex mutex_;
    std::map<std::string, std::shared_ptr<rocksdb::FileChecksumGenerator>> followed_;  // until RocksDB asks, or closes the file
};

struct LiveFile {
    std::string name;                    // shard-N/<file>
    u64 bytes;                           // from its beginning: the live file may grow
    std::optional<u32> crc32c;           // as RocksDB kept it when it wrote the file
    std::optional<std::string> content;  // what it is to hold where the live file may be replaced
};

}  // namespace tierbed
