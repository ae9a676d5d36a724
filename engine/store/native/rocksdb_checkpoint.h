// The live files of a database, and checksums of files.
#pragma once
#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "ops/kernels/portable.h"

namespace rocksdb {
class FileChecksumGenerator;
}  // namespace rocksdb

namespace tierbed {

// Computes the crc32c that RocksDB keeps of a file.
std::unique_ptr<rocksdb::FileChecksumGenerator> make_checksum();

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

struct LiveFile {
    std::string name;                    // shard-N/<file>
    u64 bytes;                           // from its beginning; the live file may grow
    std::optional<u32> crc32c;           // as RocksDB computed it while writing the file
    std::optional<std::string> content;  // the bytes to copy if the live file may be replaced
};

}  // namespace tierbed
