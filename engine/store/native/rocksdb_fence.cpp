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

// Checksums of the row files that RocksDB is writing, by path. RocksDB 7.8's own checksum leaves out the padding
// between aligned blocks, so `ChecksummedFile` computes the checksum.
class PendingChecksums {
public:
    Checksum add(const std::string& path) {
        const std::lock_guard lock(mutex_);
        return files_[path] = make_checksum_generator();
    }
    // Returns null for a file without a pending checksum.
    Checksum take(const std::string& path) {
        const std::lock_guard lock(mutex_);
        const auto file = files_.extract(path);
        return file.empty() ? nullptr : file.mapped();
    }

private:
    std::mutex mutex_;
    std::map<std::string, Checksum> files_;  // an entry stays until RocksDB reads the checksum or closes the file
};

// A file that computes its checksum while RocksDB writes the file. RocksDB only appends to such files.
class ChecksummedFile : public rocksdb::FSWritableFileOwnerWrapper {
public:
    ChecksummedFile(WritableFile file, std::shared_ptr<PendingChecksums> pending, const std::string& path)
        : FSWritableFileOwnerWrapper(std::move(file)),
          pending_(std::move(pending)),
          path_(path),
          checksum_(pending_->add(path)) {}
    ~ChecksummedFile() override { pending_->take(path_); }

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
    const std::shared_ptr<PendingChecksums> pending_;
    const std::string path_;
    const Checksum checksum_;
};

// Returns the checksum that a file has computed. RocksDB closes the file before it asks for the checksum.
class WrittenChecksum : public rocksdb::FileChecksumGenerator {
public:
    explicit WrittenChecksum(Checksum checksum) : checksum_(std::move(checksum)) {}
    void Update(const char*, std::size_t) override {}
    void Finalize() override { checksum_->Finalize(); }
    std::string GetChecksum() const override { return checksum_->GetChecksum(); }
    const char* Name() const override { return checksum_->Name(); }

private:
    const Checksum checksum_;
};

class ChecksumFactory : public rocksdb::FileChecksumGenFactory {
public:
    explicit ChecksumFactory(std::shared_ptr<PendingChecksums> pending) : pending_(std::move(pending)) {}

    std::unique_ptr<rocksdb::FileChecksumGenerator> CreateFileChecksumGenerator(
        const rocksdb::FileChecksumGenContext& context) override {
        const std::string& name = context.requested_checksum_func_name;
        if (!name.empty() && name != rocksdb::kStandardDbFileChecksumFuncName) return nullptr;
        Checksum checksum = pending_->take(context.file_name);
        if (!checksum) return make_checksum_generator();
        return std::make_unique<WrittenChecksum>(std::move(checksum));
    }
    // RocksDB's own name for this checksum. With another name, other programs could not load the database's options.
    const char* Name() const override { return "FileChecksumGenCrc32cFactory"; }

private:
    const std::shared_ptr<PendingChecksums> pending_;
};

IOStatus make_closed_error() { return IOStatus::IOError("the database failed inside a call"); }

}  // namespace

class Fence::FencedFileSystem : public rocksdb::FileSystemWrapper {
public:
    FencedFileSystem() : FileSystemWrapper(rocksdb::FileSystem::Default()) {}

    const char* Name() const override { return "tierbed"; }

    const std::shared_ptr<PendingChecksums> pending = std::make_shared<PendingChecksums>();

    void close() {
        const std::lock_guard guard(mutex_);
        is_open_ = false;
        for (rocksdb::FileLock* lock : locks_) target()->UnlockFile(lock, {}, nullptr);
        locks_.clear();
    }

    IOStatus NewWritableFile(const std::string& path, const FileOptions& options, WritableFile* file,
                             Debug* debug) override {
        if (!is_open_) return make_closed_error();
        const IOStatus status = target()->NewWritableFile(path, options, file, debug);
        if (status.ok() && std::filesystem::path(path).extension() == ".sst" && !options.use_direct_writes)
            *file = std::make_unique<ChecksummedFile>(std::move(*file), pending, path);
        return status;
    }
    IOStatus ReopenWritableFile(const std::string& path, const FileOptions& options, WritableFile* file,
                                Debug* debug) override {
        return is_open_ ? target()->ReopenWritableFile(path, options, file, debug) : make_closed_error();
    }
    IOStatus ReuseWritableFile(const std::string& path, const std::string& old, const FileOptions& options,
                               WritableFile* file, Debug* debug) override {
        return is_open_ ? target()->ReuseWritableFile(path, old, options, file, debug) : make_closed_error();
    }
    IOStatus NewRandomRWFile(const std::string& path, const FileOptions& options,
                             std::unique_ptr<rocksdb::FSRandomRWFile>* file, Debug* debug) override {
        return is_open_ ? target()->NewRandomRWFile(path, options, file, debug) : make_closed_error();
    }
    IOStatus DeleteFile(const std::string& path, const IOOptions& io, Debug* debug) override {
        return is_open_ ? target()->DeleteFile(path, io, debug) : make_closed_error();
    }
    IOStatus CreateDir(const std::string& path, const IOOptions& io, Debug* debug) override {
        return is_open_ ? target()->CreateDir(path, io, debug) : make_closed_error();
    }
    IOStatus CreateDirIfMissing(const std::string& path, const IOOptions& io, Debug* debug) override {
        return is_open_ ? target()->CreateDirIfMissing(path, io, debug) : make_closed_error();
    }
    IOStatus DeleteDir(const std::string& path, const IOOptions& io, Debug* debug) override {
        return is_open_ ? target()->DeleteDir(path, io, debug) : make_closed_error();
    }
    IOStatus RenameFile(const std::string& from, const std::string& to, const IOOptions& io, Debug* debug) override {
        return is_open_ ? target()->RenameFile(from, to, io, debug) : make_closed_error();
    }
    IOStatus LinkFile(const std::string& from, const std::string& to, const IOOptions& io, Debug* debug) override {
        return is_open_ ? target()->LinkFile(from, to, io, debug) : make_closed_error();
    }
    IOStatus Truncate(const std::string& path, std::size_t bytes, const IOOptions& io, Debug* debug) override {
        return is_open_ ? target()->Truncate(path, bytes, io, debug) : make_closed_error();
    }
    IOStatus LockFile(const std::string& path, const IOOptions& io, rocksdb::FileLock** lock, Debug* debug) override {
        const std::lock_guard guard(mutex_);
        if (!is_open_) return make_closed_error();
        locks_.reserve(locks_.size() + 1);  // reserve first, so that nothing can fail once the lock is taken
        const IOStatus status = target()->LockFile(path, io, lock, debug);
        if (status.ok()) locks_.push_back(*lock);
        return status;
    }
    IOStatus UnlockFile(rocksdb::FileLock* lock, const IOOptions& io, Debug* debug) override {
        const std::lock_guard guard(mutex_);
        const auto position = std::find(locks_.begin(), locks_.end(), lock);
        if (position == locks_.end()) return make_closed_error();
        locks_.erase(position);
        return target()->UnlockFile(lock, io, debug);
    }

private:
    std::atomic<bool> is_open_{true};
    std::mutex mutex_;
    std::vector<rocksdb::FileLock*> locks_;
};

Fence::Fence() : files_(std::make_shared<FencedFileSystem>()), env_(rocksdb::NewCompositeEnv(files_)) {}

Fence::~Fence() = default;

std::shared_ptr<rocksdb::FileChecksumGenFactory> Fence::make_checksum_factory() const {
    return std::make_shared<ChecksumFactory>(files_->pending);
}

void Fence::close() noexcept {
    try {
        files_->close();
    } catch (...) {  // ignored: if a lock remains, the next process that opens the folder reports the lock
    }
}

}  // namespace tierbed
