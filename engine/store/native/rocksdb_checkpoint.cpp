#include "rocksdb_checkpoint.h"

#include <limits>

#include <unistd.h>

#include <rocksdb/db.h>
#include <rocksdb/file_checksum.h>
#include <rocksdb/metadata.h>
#include <rocksdb/options.h>

#include "rocksdb_checksum.h"
#include "rocksdb_status.h"
#include "rocksdb_tier.h"

namespace tierbed {
namespace {

// None of a file that was written before files had checksums.
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
    options.wal_size_for_flush = std::numeric_limits<u64>::max();  // it was flushed already
    try {
        for (std::size_t i = 0; i < shards_.size(); ++i) {
            rocksdb::DB& db = *shards_[i]->db;
            check(call([&] { return db.DisableFileDeletions(); }), db.GetName(), "keep files");
            std::vector<rocksdb::LiveFileStorageInfo> found;
            check(call([&] { return db.GetLiveFilesStorageInfo(options, &found); }), db.GetName(), "list files");
            for (const rocksdb::LiveFileStorageInfo& file : found) {
                if (file.file_type == rocksdb::kWalFile) continue;  // nothing is in it
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
        for (auto& shard : shards_) static_cast<void>(shard->db->EnableFileDeletions());
}

}  // namespace tierbed
