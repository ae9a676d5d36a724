// crc32c, the checksum that RocksDB keeps of each file of rows in its manifest.
#pragma once
#include <cstddef>
#include <memory>

#include "ops/kernels/portable.h"

namespace rocksdb {
class FileChecksumGenerator;
class FileChecksumGenFactory;
}  // namespace rocksdb

namespace tierbed {

// What takes it while RocksDB writes a file.
std::shared_ptr<rocksdb::FileChecksumGenFactory> file_checksums();

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

}  // namespace tierbed
