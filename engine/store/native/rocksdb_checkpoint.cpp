#include "rocksdb_checkpoint.h"

#include <cstring>
#include <limits>
#include <unistd.h>

#include <rocksdb/db.h>
#include <rocksdb/file_checksum.h>
#include <rocksdb/file_system.h>
#include <rocksdb/metadata.h>
#include <rocksdb/options.h>

#include "rocksdb_status.h"
#include "rocksdb_tier.h"

#ifdef __SSE4_2__
#include <nmmintrin.h>
#endif

namespace tierbed {
namespace {

// In RocksDB 8.9, the argument `true` overrides all earlier calls that disabled deletions. RocksDB 9 takes no argument.
template <class Database>
auto allow_deletions(Database& db, int) -> decltype(db.EnableFileDeletions(true)) {
    return db.EnableFileDeletions(true);
}
template <class Database>
auto allow_deletions(Database& db, long) -> decltype(db.EnableFileDeletions()) {
    return db.EnableFileDeletions();
}

#ifdef __SSE4_2__
// RocksDB's checksum with the CPU's crc32 instruction. Linux distributions build RocksDB without this instruction.
class HardwareChecksumGenerator : public rocksdb::FileChecksumGenerator {
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
        checksum_.assign(reinterpret_cast<const char*>(&big_endian), sizeof big_endian);
    }
    std::string GetChecksum() const override { return checksum_; }
    const char* Name() const override { return rocksdb::kStandardDbFileChecksumFuncName; }

private:
    u32 crc_ = ~0u;
    std::string checksum_;
};

#endif

// Decodes a crc32c from RocksDB's manifest: four bytes, big-endian.
u32 decode_checksum(const std::string& bytes) {
    u32 big_endian;
    std::memcpy(&big_endian, bytes.data(), sizeof big_endian);
    return __builtin_bswap32(big_endian);
}

// Returns a file's crc32c, or nothing if RocksDB computed none. RocksDB computes it for files of rows.
std::optional<u32> find_checksum(const rocksdb::LiveFileStorageInfo& file) {
    const bool has_checksum = file.file_checksum_func_name == rocksdb::kStandardDbFileChecksumFuncName;
    return has_checksum && file.file_checksum.size() == sizeof(u32) ? std::optional(decode_checksum(file.file_checksum))
                                                                    : std::nullopt;
}

}  // namespace

std::unique_ptr<rocksdb::FileChecksumGenerator> make_checksum_generator() {
#ifdef __SSE4_2__
    return std::make_unique<HardwareChecksumGenerator>();
#else
    return rocksdb::GetFileChecksumGenCrc32cFactory()->CreateFileChecksumGenerator({});
#endif
}

Crc32c::Crc32c() : generator_(make_checksum_generator()) {}

Crc32c::~Crc32c() = default;

void Crc32c::update(const u8* bytes, std::size_t n) { generator_->Update(reinterpret_cast<const char*>(bytes), n); }

u32 Crc32c::finish() {
    generator_->Finalize();
    return decode_checksum(generator_->GetChecksum());
}

std::vector<DatabaseFile> RocksTier::hold_files() {
    make_writable();
    flush();
    std::vector<DatabaseFile> database_files;
    rocksdb::LiveFilesStorageInfoOptions options;
    options.include_checksum_info = true;
    options.wal_size_for_flush = std::numeric_limits<u64>::max();  // no second flush
    {
        const std::unique_lock lock(open_mutex_);
        has_held_files_ = true;
    }
    try {
        for (std::size_t i = 0; i < shards_.size(); ++i) {
            rocksdb::DB& db = *shards_[i]->db;
            check(call([&] { return db.DisableFileDeletions(); }), db.GetName(), "keep files");
            std::vector<rocksdb::LiveFileStorageInfo> files;
            check(call([&] { return db.GetLiveFilesStorageInfo(options, &files); }), db.GetName(), "list files");
            for (const rocksdb::LiveFileStorageInfo& file : files) {
                if (file.file_type == rocksdb::kWalFile) continue;  // the write-ahead log is always empty
                database_files.push_back(
                    {"shard-" + std::to_string(i) + "/" + file.relative_filename, file.size, find_checksum(file),
                     file.replacement_contents.empty() ? std::nullopt : std::optional(file.replacement_contents)});
            }
        }
    } catch (...) {
        release_files();
        throw;
    }
    return database_files;
}

void RocksTier::release_files() {
    if (process_id_ == getpid() && !has_failed())
        for (auto& shard : shards_) static_cast<void>(allow_deletions(*shard->db, 0));
    const std::unique_lock lock(open_mutex_);
    has_held_files_ = false;
}

}  // namespace tierbed
