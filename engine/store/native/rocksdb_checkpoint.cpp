#include "rocksdb_checkpoint.h"

#include <cstring>
#include <functional>
#include <limits>
#include <unistd.h>
#include <utility>

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

// In RocksDB 8.9 an argument says whether deletions are allowed however often they were forbidden; 9 has none.
template <class Database>
auto allow_deletions(Database& db, int) -> decltype(db.EnableFileDeletions(true)) {
    return db.EnableFileDeletions(true);
}
template <class Database>
auto allow_deletions(Database& db, long) -> decltype(db.EnableFileDeletions()) {
    return db.EnableFileDeletions();
}

#ifdef __SSE4_2__
// RocksDB's checksum by the processor's instruction, which distributions build RocksDB without.
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

#endif

std::unique_ptr<rocksdb::FileChecksumGenerator> make_generator() {
#ifdef __SSE4_2__
    return std::make_unique<Generator>();
#else
    return rocksdb::GetFileChecksumGenCrc32cFactory()->CreateFileChecksumGenerator({});
#endif
}

// A file that RocksDB only appends to.
class FollowedFile : public rocksdb::FSWritableFileOwnerWrapper {
public:
    FollowedFile(std::unique_ptr<rocksdb::FSWritableFile> file, std::shared_ptr<rocksdb::FileChecksumGenerator> checksum,
                 std::function<void()> closed)
        : FSWritableFileOwnerWrapper(std::move(file)), checksum_(std::move(checksum)), closed_(std::move(closed)) {}
    ~FollowedFile() override { closed_(); }

    rocksdb::IOStatus Append(const rocksdb::Slice& data, const rocksdb::IOOptions& io,
                             rocksdb::IODebugContext* debug) override {
        checksum_->Update(data.data(), data.size());
        return target()->Append(data, io, debug);
    }
    rocksdb::IOStatus Append(const rocksdb::Slice& data, const rocksdb::IOOptions& io,
                             const rocksdb::DataVerificationInfo& verification,
                             rocksdb::IODebugContext* debug) override {
        checksum_->Update(data.data(), data.size());
        return target()->Append(data, io, verification, debug);
    }

private:
    std::shared_ptr<rocksdb::FileChecksumGenerator> checksum_;
    std::function<void()> closed_;
};

// The checksum of a followed file, which RocksDB closes before it reads the checksum.
class OfFile : public rocksdb::FileChecksumGenerator {
public:
    explicit OfFile(std::shared_ptr<rocksdb::FileChecksumGenerator> checksum) : checksum_(std::move(checksum)) {}
    void Update(const char*, std::size_t) override {}
    void Finalize() override { checksum_->Finalize(); }
    std::string GetChecksum() const override { return checksum_->GetChecksum(); }
    const char* Name() const override { return checksum_->Name(); }

private:
    std::shared_ptr<rocksdb::FileChecksumGenerator> checksum_;
};

}  // namespace

u32 checksum_number(const char* kept) {
    u32 big_endian;
    std::memcpy(&big_endian, kept, sizeof big_endian);
    return __builtin_bswap32(big_endian);
}

Crc32c::Crc32c() : generator_(make_generator()) {}

Crc32c::~Crc32c() = default;

void Crc32c::update(const u8* bytes, std::size_t n) { generator_->Update(reinterpret_cast<const char*>(bytes), n); }

u32 Crc32c::finish() {
    generator_->Finalize();
    return checksum_number(generator_->GetChecksum().data());
}

class FileChecksums::Factory : public rocksdb::FileChecksumGenFactory {
public:
    explicit Factory(std::shared_ptr<FileChecksums> files) : files_(std::move(files)) {}

    std::unique_ptr<rocksdb::FileChecksumGenerator> CreateFileChecksumGenerator(
        const rocksdb::FileChecksumGenContext& context) override {
        const std::string& wanted = context.requested_checksum_func_name;
        if (!wanted.empty() && wanted != rocksdb::kStandardDbFileChecksumFuncName) return nullptr;
        const std::lock_guard lock(files_->mutex_);
        const auto followed = files_->followed_.extract(context.file_name);
        if (followed.empty()) return make_generator();
        return std::make_unique<OfFile>(followed.mapped());
    }
    // RocksDB's own name, so that other programs can open the database with its options.
    const char* Name() const override { return "FileChecksumGenCrc32cFactory"; }

private:
    std::shared_ptr<FileChecksums> files_;
};

std::unique_ptr<rocksdb::FSWritableFile> FileChecksums::follow(const std::string& path,
                                                               std::unique_ptr<rocksdb::FSWritableFile> file) {
    std::shared_ptr<rocksdb::FileChecksumGenerator> checksum = make_generator();
    const std::lock_guard lock(mutex_);
    followed_[path] = checksum;
    return std::make_unique<FollowedFile>(std::move(file), std::move(checksum),
                                          [files = shared_from_this(), path] { files->forget(path); });
}

void FileChecksums::forget(const std::string& path) {
    const std::lock_guard lock(mutex_);
    followed_.erase(path);
}

std::shared_ptr<rocksdb::FileChecksumGenFactory> FileChecksums::factory() {
    return std::make_shared<Factory>(shared_from_this());
}

namespace {

// None for a file of a version without checksums.
std::optional<u32> checksum_of(const rocksdb::LiveFileStorageInfo& file) {
    const bool known = file.file_checksum_func_name == rocksdb::kStandardDbFileChecksumFuncName;
    return known && file.file_checksum.size() == sizeof(u32) ? std::optional(checksum_number(file.file_checksum.data()))
                                                             : std::nullopt;
}

}  // namespace

std::vector<LiveFile> RocksTier::hold_files() {
    make_writable();
    flush();
    std::vector<LiveFile> all;
    rocksdb::LiveFilesStorageInfoOptions options;
    options.include_checksum_info = true;
    options.wal_size_for_flush = std::numeric_limits<u64>::max();  // the rows are flushed already
    {
        const std::unique_lock lock(opening_);
        keeps_files_ = true;
    }
    try {
        for (std::size_t i = 0; i < shards_.size(); ++i) {
            rocksdb::DB& db = *shards_[i]->db;
            check(call([&] { return db.DisableFileDeletions(); }), db.GetName(), "keep files");
            std::vector<rocksdb::LiveFileStorageInfo> found;
            check(call([&] { return db.GetLiveFilesStorageInfo(options, &found); }), db.GetName(), "list files");
            for (const rocksdb::LiveFileStorageInfo& file : found) {
                if (file.file_type == rocksdb::kWalFile) continue;  // it is empty
                const bool replaced = !file.replacement_contents.empty();
                all.push_back({"shard-" + std::to_string(i) + "/" + file.relative_filename, file.size,
                               checksum_of(file), replaced ? std::optional(file.replacement_contents) : std::nullopt});
            }
        }
    } catch (...) {
        release_files();
        throw;
    }
    return all;
}

void RocksTier::release_files() {
    if (process_ == getpid() && !failed())
        for (auto& shard : shards_) static_cast<void>(allow_deletions(*shard->db, 0));
    const std::unique_lock lock(opening_);
    keeps_files_ = false;
}

}  // namespace tierbed
