// Describes the files that hold a database's current rows. Computes checksums of files.
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

// Returns a generator of RocksDB's file checksum, a crc32c.
std::unique_ptr<rocksdb::FileChecksumGenerator> make_checksum_generator();

// Computes the crc32c of bytes that are passed in pieces.
class Crc32c {
public:
    Crc32c();
    ~Crc32c();
    Crc32c(const Crc32c&) = delete;
    void update(const u8* bytes, std::size_t n);
    u32 finish();  // call once, at the end

private:
    std::unique_ptr<rocksdb::FileChecksumGenerator> generator_;
};

struct DatabaseFile {
    std::string name;                    // shard-N/<file>
    u64 bytes;                           // how many bytes to copy; the file may grow later
    std::optional<u32> crc32c;           // computed by RocksDB while it wrote the file
    std::optional<std::string> content;  // a copy of the file's bytes; set only if RocksDB may replace the file
};

}  // namespace tierbed
