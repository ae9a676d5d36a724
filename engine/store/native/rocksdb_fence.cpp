#include "rocksdb_fence.h"

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <rocksdb/env.h>
#include <rocksdb/file_checksum.h>
#include <rocksdb/file_system.h>

#include "rocksdb_checkpoint.h"

namespace tierbed {

using rocksdb::FileOptions, rocksdb::IOOptions, rocksdb::IOStatus;
using Debug = rocksdb::IODebugContext;
using Checksum = std::shared_ptr<rocksdb::FileChecksumGenerator>;
using WritableFile = std::unique_ptr<rocksdb::FSWritableFile>;

namespace {

// The checksums of files of rows that are being written, by path. RocksDB 7.8's own checksum leaves out the padding
// between aligned blocks, so the file itself computes the checksum that RocksDB keeps.
class Followed {
public:
    Checksum begin(const std::string& path) {
        const std::lock_guard lock(mutex_);
        return files_[path] = make_checksum();
    }
    // Null for a file that is not followed.
    Checksum end(const std::string& path) {
        const std::lock_guard lock(mutex_);
        const auto file = files_.extract(path);
        return file.empty() ? nullptr : file.mapped();
    }

private:
    std::mutex mutex_;
    std::map<std::string, Checksum> files_;  // until RocksDB reads the checksum or closes the file
};

// A file that RocksDB only appends to.
class FollowedFile : public rocksdb::FSWritableFileOwnerWrapper {
public:
    FollowedFile(WritableFile file, std::shared_ptr<Followed> all, const std::string& path)
        : FSWritableFileOwnerWrapper(std::move(file)),
          all_(std::move(all)),
          path_(path),
          checksum_(all_->begin(path)) {}
    ~FollowedFile() override { all_->end(path_); }

    IOStatus Append(const rocksdb::Slice& data, const IOOptions& io, Debug* debug) override {
        checksum_->Update(data.data(), data.size());
        return target()->Append(data, io, debug);
    }
    IOStatus Append(const rocksdb::Slice& data, const IOOptions& io, const rocksdb::DataVerificationInfo& verification,
                    Debug* debug) override {
        checksum_->Update(data.data(), data.size());
        return target()->Append(data, io, verification, debug);
    }

private:
    const std::shared_ptr<Followed> all_;
    const std::string path_;
    const Checksum checksum_;
};

// The checksum of a followed file, which RocksDB closes before it reads the checksum.
class OfFile : public rocksdb::FileChecksumGenerator {
public:
    explicit OfFile(Checksum checksum) : checksum_(std::move(checksum)) {}
    void Update(const char*, std::size_t) override {}
    void Finalize() override { checksum_->Finalize(); }
    std::string GetChecksum() const override { return checksum_->GetChecksum(); }
    const char* Name() const override { return checksum_->Name(); }

private:
    const Checksum checksum_;
};

class Checksums : public rocksdb::FileChecksumGenFactory {
public:
    explicit Checksums(std::shared_ptr<Followed> all) : all_(std::move(all)) {}

    std::unique_ptr<rocksdb::FileChecksumGenerator> CreateFileChecksumGenerator(
        const rocksdb::FileChecksumGenContext& context) override {
        const std::string& wanted = context.requested_checksum_func_name;
        if (!wanted.empty() && wanted != rocksdb::kStandardDbFileChecksumFuncName) return nullptr;
        Checksum followed = all_->end(context.file_name);
        if (!followed) return make_checksum();
        return std::make_unique<OfFile>(std::move(followed));
    }
    // RocksDB's own name, so that other programs can open the database with its options.
    const char* Name() const override { return "FileChecksumGenCrc32cFactory"; }

private:
    const std::shared_ptr<Followed> all_;
};

IOStatus shut_out() { return IOStatus::IOError("the database failed inside a call"); }

}  // namespace

class Fence::Files : public rocksdb::FileSystemWrapper {
public:
    Files() : FileSystemWrapper(rocksdb::FileSystem::Default()) {}

    const char* Name() const override { return "tierbed"; }

    const std::shared_ptr<Followed> followed = std::make_shared<Followed>();

    void shut() {
        const std::lock_guard guard(mutex_);
        open_ = false;
        for (rocksdb::FileLock* lock : locks_) target()->UnlockFile(lock, {}, nullptr);
        locks_.clear();
    }

    IOStatus NewWritableFile(const std::string& path, const FileOptions& options, WritableFile* file,
                             Debug* debug) override {
        if (!open_) return shut_out();
        const IOStatus status = target()->NewWritableFile(path, options, file, debug);
        if (status.ok() && std::filesystem::path(path).extension() == ".sst" && !options.use_direct_writes)
            *file = std::make_unique<FollowedFile>(std::move(*file), followed, path);
        return status;
    }
    IOStatus ReopenWritableFile(const std::string& path, const FileOptions& options, WritableFile* file,
                                Debug* debug) override {
        return open_ ? target()->ReopenWritableFile(path, options, file, debug) : shut_out();
    }
    IOStatus ReuseWritableFile(const std::string& path, const std::string& old, const FileOptions& options,
                               WritableFile* file, Debug* debug) override {
        return open_ ? target()->ReuseWritableFile(path, old, options, file, debug) : shut_out();
    }
    IOStatus NewRandomRWFile(const std::string& path, const FileOptions& options,
                             std::unique_ptr<rocksdb::FSRandomRWFile>* file, Debug* debug) override {
        return open_ ? target()->NewRandomRWFile(path, options, file, debug) : shut_out();
    }
    IOStatus DeleteFile(const std::string& path, const IOOptions& io, Debug* debug) override {
        return open_ ? target()->DeleteFile(path, io, debug) : shut_out();
    }
    IOStatus CreateDir(const std::string& path, const IOOptions& io, Debug* debug) override {
        return open_ ? target()->CreateDir(path, io, debug) : shut_out();
    }
    IOStatus CreateDirIfMissing(const std::string& path, const IOOptions& io, Debug* debug) override {
        return open_ ? target()->CreateDirIfMissing(path, io, debug) : shut_out();
    }
    IOStatus DeleteDir(const std::string& path, const IOOptions& io, Debug* debug) override {
        return open_ ? target()->DeleteDir(path, io, debug) : shut_out();
    }
    IOStatus RenameFile(const std::string& from, const std::string& to, const IOOptions& io, Debug* debug) override {
        return open_ ? target()->RenameFile(from, to, io, debug) : shut_out();
    }
    IOStatus LinkFile(const std::string& from, const std::string& to, const IOOptions& io, Debug* debug) override {
        return open_ ? target()->LinkFile(from, to, io, debug) : shut_out();
    }
    IOStatus Truncate(const std::string& path, std::size_t bytes, const IOOptions& io, Debug* debug) override {
        return open_ ? target()->Truncate(path, bytes, io, debug) : shut_out();
    }
    IOStatus LockFile(const std::string& path, const IOOptions& io, rocksdb::FileLock** lock, Debug* debug) override {
        const std::lock_guard guard(mutex_);
        if (!open_) return shut_out();
        locks_.reserve(locks_.size() + 1);  // no allocation may fail once the lock is taken
        const IOStatus status = target()->LockFile(path, io, lock, debug);
        if (status.ok()) locks_.push_back(*lock);
        return status;
    }
    IOStatus UnlockFile(rocksdb::FileLock* lock, const IOOptions& io, Debug* debug) override {
        const std::lock_guard guard(mutex_);
        const auto found = std::find(locks_.begin(), locks_.end(), lock);
        if (found == locks_.end()) return shut_out();
        locks_.erase(found);
        return target()->UnlockFile(lock, io, debug);
    }

private:
    std::atomic<bool> open_{true};
    std::mutex mutex_;
    std::vector<rocksdb::FileLock*> locks_;
};

Fence::Fence() : files_(std::make_shared<Files>()), env_(rocksdb::NewCompositeEnv(files_)) {}

Fence::~Fence() = default;

std::shared_ptr<rocksdb::FileChecksumGenFactory> Fence::checksums() const {
    return std::make_shared<Checksums>(files_->followed);
}

void Fence::shut() noexcept {
    try {
        files_->shut();
    } catch (...) {  // a lock that remains is reported by the next process that opens the folder
    }
}

}  // namespace tierbed
