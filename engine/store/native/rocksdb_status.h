// Turns RocksDB's errors into exceptions that name the folder and a remedy.
#pragma once
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

#include <rocksdb/status.h>

namespace tierbed {

inline const char* find_remedy(const rocksdb::Status& status) {
    // RocksDB reports a write as incomplete if it waited for a compaction that failed. The status names the reason.
    const bool waited = status.IsIncomplete() && status.ToString().find(std::strerror(ENOSPC)) != std::string::npos;
    if (status.IsNoSpace() || waited)
        return "free space on its disk and go on: unwritten rows are kept, the next call tries again";
    if (status.ToString().find(std::strerror(EMFILE)) != std::string::npos)
        return "let this process open more files (ulimit -n), then try again";
    if (status.IsCorruption())
        return "a file is damaged; load the last snapshot (rows of other files can still be read)";
    if (status.IsInvalidArgument() || status.IsNotSupported())
        return "open it with the rocksdb_options that it was made with, or load the last snapshot";
    return "check the disk and the folder's permissions, then try again or load the last snapshot";
}

// Throws std::runtime_error, "RocksDB in <folder>: <what>: <status>; <remedy>", unless the status is OK.
inline void check(const rocksdb::Status& status, const std::string& folder, const char* what) {
    if (!status.ok())
        throw std::runtime_error("RocksDB in " + folder + ": " + what + ": " + status.ToString() + "; " +
                                 find_remedy(status));
}

}  // namespace tierbed
