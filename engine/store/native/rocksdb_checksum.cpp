#include "rocksdb_checksum.h"

#include <cstring>
#include <string>

#include <rocksdb/file_checksum.h>

#ifdef __SSE4_2__
#include <nmmintrin.h>
#endif

namespace tierbed {
namespace {

#ifdef __SSE4_2__
// RocksDB's own, with the processor's instruction, which distributions build RocksDB without: many times as fast.
class Generator : public rocksdb::FileChecksumGenerator {
public:
    void Update(const char* data, std::size_t n) override {
        u64 crc = crc_;
        for (; n >= sizeof(u64); data += sizeof(u64), n -= sizeof(u64)) {
            u64 word;
            std::memcpy(&word, data, sizeof word);
            crc = _mm_crc32_u64(crc, word);
        }
        crc_ = static_cast<u32>(crc);
        for (; n; ++data, --n) crc_ = _mm_crc32_u8(crc_, static_cast<u8>(*data));
    }
    void Finalize() override {
        const u32 big_endian = __builtin_bswap32(~crc_);
        kept_.assign(reinterpret_cast<const char*>(&big_endian), sizeof big_endian);
    }
    std::string GetChecksum() const override { return kept_; }
    const char* Name() const override { return rocksdb::kStandardDbFileChecksumFuncName; }

private:
    u32 crc_ = ~0u;
    std::string kept_;
};

class Factory : public rocksdb::FileChecksumGenFactory {
public:
    std::unique_ptr<rocksdb::FileChecksumGenerator> CreateFileChecksumGenerator(
        const rocksdb::FileChecksumGenContext& context) override {
        const std::string& wanted = context.requested_checksum_func_name;
        if (!wanted.empty() && wanted != rocksdb::kStandardDbFileChecksumFuncName) return nullptr;
        return std::make_unique<Generator>();
    }
    // RocksDB's name of it, so that other programs can open a database with the options that it was written with.
    const char* Name() const override { return "FileChecksumGenCrc32cFactory"; }
};
#endif

}  // namespace

std::shared_ptr<rocksdb::FileChecksumGenFactory> file_checksums() {
#ifdef __SSE4_2__
    return std::make_shared<Factory>();
#else
    return rocksdb::GetFileChecksumGenCrc32cFactory();
#endif
}

u32 checksum_number(const char* kept) {
    u32 big_endian;
    std::memcpy(&big_endian, kept, sizeof big_endian);
    return __builtin_bswap32(big_endian);
}

Crc32c::Crc32c() : generator_(file_checksums()->CreateFileChecksumGenerator({})) {}

Crc32c::~Crc32c() = default;

void Crc32c::update(const u8* bytes, std::size_t n) { generator_->Update(reinterpret_cast<const char*>(bytes), n); }

u32 Crc32c::finish() {
    generator_->Finalize();
    return checksum_number(generator_->GetChecksum().data());
}

}  // namespace tierbed
