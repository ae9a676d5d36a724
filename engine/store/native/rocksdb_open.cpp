// How the databases of a RocksTier are opened, and closed or left as they are.
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <stdexcept>

#include <pthread.h>
#include <unistd.h>

#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/env.h>
#include <rocksdb/statistics.h>
#include <rocksdb/table.h>

#include "rocksdb_open.h"
#include "rocksdb_status.h"
#include "rocksdb_tier.h"

namespace tierbed {
namespace {

// RocksDB's destructors of globals wait for threads. Where these may never end, the process ends right before them.
void end_early() {
    on_exit(
        [](int status, void*) {
            std::fflush(nullptr);
            _exit(status);
        },
        nullptr);
}

// A forked child does not have the threads.
void end_forked_children_early() {
    static const int once = pthread_atfork(nullptr, nullptr, end_early);
    static_cast<void>(once);
}

rocksdb::Status open_database(const rocksdb::Options& options, const std::string& folder, bool read_only,
                              std::unique_ptr<rocksdb::DB>& db) {
    const auto open = [&](auto* where) -> decltype(rocksdb::DB::Open(options, folder, where)) {
        return read_only ? rocksdb::DB::OpenForReadOnly(options, folder, where)
                         : rocksdb::DB::Open(options, folder, where);
    };
    return open_into(db, open);
}

}  // namespace

RocksTier::RocksTier(const std::string& folder, u32 width, const RocksOptions& options)
    : shape_{width, width, line_bytes_of(width)},
      folder_(folder),
      process_(getpid()),
      database_(std::make_unique<rocksdb::Options>(shard_options(options, stored_bytes_of(width)))),
      readers_(std::make_unique<ReadThreads>(options.read_threads)) {
    end_forked_children_early();
    rocksdb::Options& database = *database_;
    database.env = fence_->env();
    if (database.file_checksum_gen_factory)  // a checkpoint need not read files whose checksums are kept
        database.file_checksum_gen_factory = fence_->checksums();
    database.env->IncBackgroundThreadsIfNeeded(background_threads(database).flushes, rocksdb::Env::HIGH);
    auto* table = database.table_factory->GetOptions<rocksdb::BlockBasedTableOptions>();
    if (caches_blocks(options)) table->block_cache = cache_ = rocksdb::NewLRUCache(options.cache_bytes);
    database.statistics = statistics_ = rocksdb::CreateDBStatistics();
    statistics_->set_stats_level(rocksdb::kExceptHistogramOrTimers);
    info_ = {background_threads(database),
             database.write_buffer_size * static_cast<std::size_t>(database.max_write_buffer_number) * options.shards,
             options.async_io && has_async_io()};
    // Shards fill alike: each is flushed once at another part of its way, so that they do not flush at the same time.
    const u64 cycle = database.write_buffer_size * static_cast<u64>(database.min_write_buffer_number_to_merge);
    try {
        for (u32 i = 0; i < options.shards; ++i) {
            auto shard = std::make_unique<Shard>();
            shard->folder = folder + "/shard-" + std::to_string(i);
            shard->until_flush = static_cast<i64>(cycle * i / options.shards);
            open(*shard, options);
            shards_.push_back(std::move(shard));
        }
    } catch (...) {
        if (failed()) leave_alone();
        throw;
    }
}

RocksTier::~RocksTier() { close(); }

void RocksTier::open(Shard& shard, const RocksOptions& options) {
    std::unique_ptr<rocksdb::DB> db;
    shard.is_writable = !options.read_only;
    rocksdb::Status status = call([&] { return open_database(*database_, shard.folder, options.read_only, db); });
    if (status.IsNoSpace() && !options.read_only && !options.create) {
        const rocksdb::Status of_read = call([&] { return open_database(*database_, shard.folder, true, db); });
        if (of_read.ok()) {
            status = of_read;
            shard.is_writable = false;
            lacks_room_ = true;
        }
    }
    check(status, shard.folder, "open");
    shard.db = std::move(db);
}

void RocksTier::make_writable() {
    require_open();
    if (!lacks_room_) return;
    for (auto& shard : shards_) {
        if (shard->is_writable) continue;
        std::unique_ptr<rocksdb::DB> opened;
        check(call([&] { return open_database(*database_, shard->folder, false, opened); }), shard->folder, "open");
        std::shared_ptr<rocksdb::DB> db = std::move(opened);
        const std::unique_lock lock(opening_);
        shard->db.swap(db);
        shard->is_writable = true;
    }
    lacks_room_ = false;
}

// A forked child has the databases' memory but not their threads, which closing waits for.
void RocksTier::close() {
    if (process_ != getpid() || failed()) leave_alone();
    readers_.reset();
    shards_.clear();
}

void RocksTier::leave_alone() {
    for (auto& shard : shards_) static_cast<void>(shard.release());
    shards_.clear();
    static_cast<void>(fence_.release());    // whose files they use
    static_cast<void>(readers_.release());  // which may be in a call, or of the process that forked this
}

void RocksTier::fail() const noexcept {
    if (failed_->exchange(true)) return;
    fence_->shut();
    end_early();
}

void RocksTier::require_open() const {
    if (failed())
        throw std::runtime_error("RocksDB in " + folder_ +
                                 " failed in the middle of a call, as where memory runs out, and is used no more: free "
                                 "memory and create the embedding again, which goes back to its last snapshot");
    if (shards_.empty()) throw std::runtime_error("RocksDB in " + folder_ + " was closed");
}

}  // namespace tierbed
