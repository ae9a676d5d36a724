#include "rocksdb_fence.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <rocksdb/env.h>
#include <rocksdb/file_system.h>

#include "rocksdb_checkpoint.h"

namespace tierbed {

class Fence::Files : public rocksdb::FileSystemWrapper {
public:
    Files() : FileSystemWrapper(rocksdb::FileSystem::Default()) {}

    const char* Name() const override { return "tierbed"; }

    const std::shared_ptr<FileChecksums> checksums = std::make_shared<FileChecksums>();

    void shut() {
        const std::lock_guard guard(mutex_);
        open_ = false;
        for (rocksdb::FileLock* lock : locks_) target()->UnlockFile(lock, {}, nullptr);
        locks_.clear();
    }

    rocksdb::IOStatus NewWritableFile(const std::string& path, const rocksdb::FileOptions& options,
                                      std::unique_ptr<rocksdb::FSWritableFile>* file,
                                      rocksdb::IODebugContext* debug) override {
        if (!open_) return shut_out();
        const rocksdb::IOStatus status = target()->NewWritableFile(path, options, file, debug);
        if (status.ok() && is_of_rows(path) && !options.use_direct_writes)
            *file = checksums->follow(path, std::move(*file));
        return status;
    }
    rocksdb::IOStatus ReopenWritableFile(const std::string& path, const rocksdb::FileOptions& options,
                                         std::unique_ptr<rocksdb::FSWritableFile>* file,
                                         rocksdb::IODebugContext* debug) override {
        return open_ ? target()->ReopenWritableFile(path, options, file, debug) : shut_out();
    }
    rocksdb::IOStatus ReuseWritableFile(const std::string& path, const std::string& old,
                                        const rocksdb::FileOptions& options,
                                        std::unique_ptr<rocksdb::FSWritableFile>* file,
                                        rocksdb::IODebugContext* debug) override {
        return open_ ? target()->ReuseWritableFile(path, old, options, file, debug) : shut_out();
    }
    rocksdb::IOStatus NewRandomRWFile(const std::string& path, const rocksdb::FileOptions& options,
                                      std::unique_ptr<rocksdb::FSRandomRWFile>* file,
                                      rocksdb::IODebugContext* debug) override {
        return open_ ? target()->NewRandomRWFile(path, options, file, debug) : shut_out();
    }
    rocksdb::IOStatus DeleteFile(const std::string& path, const rocksdb::IOOptions& io,
                                 rocksdb::IODebugContext* debug) override {
        return open_ ? target()->DeleteFile(path, io, debug) : shut_out();
    }
    rocksdb::IOStatus CreateDir(const std::string& path, const rocksdb::IOOptions& io,
                                rocksdb::IODebugContext* debug) override {
        return open_ ? target()->CreateDir(path, io, debug) : shut_out();
    }
    rocksdb::IOStatus CreateDirIfMissing(const std::string& path, const rocksdb::IOOptions& io,
                                         rocksdb::IODebugContext* debug) override {
        return open_ ? target()->CreateDirIfMissing(path, io, debug) : shut_out();
    }
    rocksdb::IOStatus DeleteDir(const std::string& path, const rocksdb::IOOptions& io,
                                rocksdb::IODebugContext* debug) override {
        return open_ ? target()->DeleteDir(path, io, debug) : shut_out();
    }
    rocksdb::IOStatus RenameFile(const std::string& from, const std::string& to, const rocksdb::IOOptions& io,
                                 rocksdb::IODebugContext* debug) override {
        return open_ ? target()->RenameFile(from, to, io, debug) : shut_out();
    }
    rocksdb::IOStatus LinkFile(const std::string& from, const std::string& to, const rocksdb::IOOptions& io,
                               rocksdb::IODebugContext* debug) override {
        return open_ ? target()->LinkFile(from, to, io, debug) : shut_out();
    }
    rocksdb::IOStatus Truncate(const std::string& path, std::size_t bytes, const rocksdb::IOOptions& io,
                               rocksdb::IODebugContext* debug) override {
        return open_ ? target()->Truncate(path, bytes, io, debug) : shut_out();
    }
    rocksdb::IOStatus LockFile(const std::string& path, const rocksdb::IOOptions& io, rocksdb::FileLock** lock,
                               rocksdb::IODebugContext* debug) override {
        const std::lock_guard guard(mutex_);
        if (!open_) return shut_out();
        locks_.reserve(locks_.size() + 1);  // no allocation may fail once the lock is taken
        const rocksdb::IOStatus status = target()->LockFile(path, io, lock, debug);
        if (status.ok()) locks_.push_back(*lock);
        return status;
    }
    rocksdb::IOStatus UnlockFile(rocksdb::FileLock* lock, const rocksdb::IOOptions& io,
                                 rocksdb::IODebugContext* debug) override {
        const std::lock_guard guard(mutex_);
        const auto found = std::find(locks_.begin(), locks_.end(), lock);
        if (found == locks_.end()) return shut_out();
        locks_.erase(found);
        return target()->UnlockFile(lock, io, debug);
    }

private:
    static bool is_of_rows(const std::string& path) {
        constexpr std::string_view ENDING = ".sst";
        return path.size() >= ENDING.size() && path.compare(path.size() - ENDING.size(), ENDING.size(), ENDING) == 0;
    }
    static rocksdb::IOStatus shut_out() {
        return rocksdb::IOStatus::IOError("the database failed inside a call");
    }

    std::atomic<bool> open_{true};
    std::mutex mutex_;
    std::vector<rocksdb::FileLock*> locks_;
};

Fence::Fence() : files_(std::make_shared<Files>()), env_(rocksdb::NewCompositeEnv(files_)) {}

Fence::~Fence() = default;

std::shared_ptr<rocksdb::FileChecksumGenFactory> Fence::checksums() const { return files_->checksums->factory(); }

void Fence::shut() noexcept {
    try {
        files_->shut();
    } catch (...) {  // a lock that remains is reported by the next process that opens the folder
    }
}

}  // namespace tierbed
