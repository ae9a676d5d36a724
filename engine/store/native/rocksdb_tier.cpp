#include "rocksdb_tier.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <pthread.h>
#include <random>
#include <stdexcept>
#include <thread>
#include <tuple>
#include <unistd.h>

#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/env.h>
#include <rocksdb/statistics.h>
#include <rocksdb/table.h>
#include <rocksdb/write_batch.h>

#include "ops/kernels/hash.h"
#include "ops/native/thread_pool.h"
#include "rocksdb_open.h"
#include "rocksdb_sorted_files.h"
#include "rocksdb_status.h"
#include "rows.h"

namespace tierbed {

namespace {

// RocksDB's global destructors wait for RocksDB's threads. If a thread might hang, exit before the destructors run.
void exit_before_destructors() {
    on_exit(
        [](int status, void*) {
            std::fflush(nullptr);
            _exit(status);
        },
        nullptr);
}

// A forked child lacks RocksDB's threads, so its destructors would wait forever.
void make_forked_children_exit_early() {
    static const int once = pthread_atfork(nullptr, nullptr, exit_before_destructors);
    static_cast<void>(once);
}

rocksdb::Status open_database(const rocksdb::Options& options, const std::string& folder, bool read_only,
                              std::unique_ptr<rocksdb::DB>& db) {
    return open_into(db, [&](auto* where) -> decltype(rocksdb::DB::Open(options, folder, where)) {
        return read_only ? rocksdb::DB::OpenForReadOnly(options, folder, where)
                         : rocksdb::DB::Open(options, folder, where);
    });
}

}  // namespace

RocksTier::RocksTier(const std::string& folder, u32 width, const RocksOptions& options)
    : shape_{width, width, compute_line_bytes(width)},
      folder_(folder),
      process_id_(getpid()),
      block_bytes_(options.block_bytes),
      caches_data_(!options.index_bytes || options.read_mode == "direct"),
      options_(std::make_unique<rocksdb::Options>(make_shard_options(options, compute_stored_bytes(width)))),
      read_threads_(std::make_unique<ReadThreadPool>(options.max_read_threads)) {
    make_forked_children_exit_early();
    rocksdb::Options& database = *options_;
    database.env = fence_->env();
    if (database.file_checksum_gen_factory)  // files carry checksums, so a checkpoint need not read them
        database.file_checksum_gen_factory = fence_->make_checksum_factory();
    database.env->IncBackgroundThreadsIfNeeded(count_background_threads(database).flushes, rocksdb::Env::HIGH);
    auto* table = database.table_factory->GetOptions<rocksdb::BlockBasedTableOptions>();
    table->block_cache = cache_ = make_block_cache(options);
    database.statistics = statistics_ = rocksdb::CreateDBStatistics();
    statistics_->set_stats_level(rocksdb::kExceptHistogramOrTimers);
    info_ = {count_background_threads(database),
             database.write_buffer_size * static_cast<u64>(database.max_write_buffer_number) * options.num_shards,
             options.async_io && has_async_io()};
    // Shards fill evenly. Each shard's first flush is early, at its own fill level. So shards never all flush together.
    const u64 cycle = database.write_buffer_size * static_cast<u64>(database.min_write_buffer_number_to_merge);
    try {
        for (u32 i = 0; i < options.num_shards; ++i) {
            auto shard = std::make_unique<Shard>();
            shard->folder = folder + "/shard-" + std::to_string(i);
            shard->bytes_to_flush = static_cast<i64>(cycle * i / options.num_shards);
            open(*shard, options.read_only, options.create_if_missing);
            shards_.push_back(std::move(shard));
        }
    } catch (...) {
        if (has_failed()) abandon();
        throw;
    }
}

RocksTier::~RocksTier() { close(); }

void RocksTier::open(Shard& shard, bool read_only, bool create) {
    std::unique_ptr<rocksdb::DB> db;
    shard.is_writable = !read_only;
    rocksdb::Status status = call([&] { return open_database(*options_, shard.folder, read_only, db); });
    if (status.IsNoSpace() && !read_only && !create) {
        const rocksdb::Status read_status = call([&] { return open_database(*options_, shard.folder, true, db); });
        if (read_status.ok()) {
            status = read_status;
            shard.is_writable = false;
            is_disk_full_ = true;
        }
    }
    check(status, shard.folder, "open");
    shard.db = std::move(db);
}

void RocksTier::make_writable() {
    require_open();
    if (!is_disk_full_) return;
    for (auto& shard : shards_) {
        if (shard->is_writable) continue;
        std::unique_ptr<rocksdb::DB> opened;
        check(call([&] { return open_database(*options_, shard->folder, false, opened); }), shard->folder, "open");
        std::shared_ptr<rocksdb::DB> db = std::move(opened);
        const std::unique_lock lock(open_mutex_);
        shard->db.swap(db);
        shard->is_writable = true;
    }
    is_disk_full_ = false;
}

// Closing waits for the databases' threads, and a forked child does not have these threads.
void RocksTier::close() {
    if (process_id_ != getpid() || has_failed()) abandon();
    read_threads_.reset();
    try {
        rewrite_manifests();
    } catch (...) {  // harmless: all rows are as durable as before
    }
    shards_.clear();
}

void RocksTier::abandon() {
    for (auto& shard : shards_) static_cast<void>(shard.release());
    shards_.clear();
    static_cast<void>(fence_.release());         // the databases still use the fence's file system
    static_cast<void>(read_threads_.release());  // reader threads may be in a call, or belong to the parent process
}

void RocksTier::mark_failed() const noexcept {
    if (has_failed_.exchange(true)) return;
    fence_->close();
    exit_before_destructors();
}

void RocksTier::require_open() const {
    if (has_failed())
        throw std::runtime_error("RocksDB in " + folder_ +
                                 " failed inside a call, for example because memory ran out, and cannot be used again: "
                                 "free memory and create the embedding again, which recovers from its last snapshot");
    if (shards_.empty()) throw std::runtime_error("RocksDB in " + folder_ + " was closed");
}

namespace {

constexpr std::size_t KEY_BYTES = 13;
constexpr std::size_t MIN_READS = 8, MAX_READS = 256;  // keys per MultiGet
constexpr u32 FILL_INTERVAL = 8;                       // of so many MultiGets, one fills a cache for indexes
constexpr std::size_t BATCH_BYTES = 256u << 10;        // bytes per WriteBatch
constexpr std::chrono::milliseconds POLL_INTERVAL(2);
constexpr char RELOAD_REMEDY[] = "load the last snapshot";

struct Key {
    char bytes[KEY_BYTES];
    Key(u32 bucket, u32 table, u64 key) {
        bytes[0] = static_cast<char>(bucket);
        const u32 t = __builtin_bswap32(table);
        const u64 k = __builtin_bswap64(key);
        std::memcpy(bytes + 1, &t, sizeof t);
        std::memcpy(bytes + 5, &k, sizeof k);
    }
    rocksdb::Slice slice() const { return {bytes, KEY_BYTES}; }
};

void check_size(const char* what, std::size_t bytes, std::size_t expected, const std::string& folder) {
    if (bytes != expected)
        throw std::runtime_error("RocksDB in " + folder + ": a stored " + what + " has " + std::to_string(bytes) +
                                 " bytes, and " + std::to_string(expected) + " are expected; " + RELOAD_REMEDY);
}

u64 read_property(rocksdb::DB& db, const std::string& name) {
    u64 value = 0;
    db.GetIntProperty(name, &value);
    return value;
}

}  // namespace

struct RocksTier::SortedRow {
    u64 key;
    u32 bucket, table;
    std::size_t index;  // the row's index in the call's RowSpan
    Key encode() const { return {bucket, table, key}; }
    bool operator<(const SortedRow& other) const {
        return std::tie(bucket, table, key) < std::tie(other.bucket, other.table, other.key);
    }
};

std::vector<std::vector<RocksTier::SortedRow>> RocksTier::sort_rows(const RowSpan& rows) const {
    const auto begin = rows.bucket_offsets();
    std::vector<std::vector<SortedRow>> all(shards_.size());
    parallel_for(shards_.size(), rows.n, [&](std::size_t shard) {
        std::vector<SortedRow>& sorted = all[shard];
        for (u32 bucket = static_cast<u32>(shard); bucket < BUCKETS; bucket += static_cast<u32>(shards_.size()))
            for (std::size_t row = begin[bucket]; row < begin[bucket + 1]; ++row)
                sorted.push_back({get_key(rows.tables[row], rows.hashes[row]), bucket, rows.tables[row], row});
        std::sort(sorted.begin(), sorted.end());
    });
    return all;
}

void RocksTier::read(const RowSpan& rows, bool* is_hit, bool) {
    require_open();
    const std::shared_lock lock(open_mutex_);
    const Timer timer(counts_.fetch);
    struct Range {
        std::size_t shard, begin, end;
    };
    std::vector<Range> ranges;
    const std::vector<std::vector<SortedRow>> sorted = sort_rows(rows);
    // With more threads, use smaller ranges, so that all threads end at about the same time.
    const std::size_t range_rows = std::clamp(rows.n / (4 * read_threads_->thread_target()), MIN_READS, MAX_READS);
    for (std::size_t shard = 0; shard < sorted.size(); ++shard)
        for (std::size_t begin = 0; begin < sorted[shard].size(); begin += range_rows)
            ranges.push_back({shard, begin, std::min(begin + range_rows, sorted[shard].size())});
    const std::size_t held = std::min(rows.n, range_rows * read_threads_->thread_target()) * block_bytes_;
    u64 max_held = counts_.read_buffer_bytes;
    while (held > max_held && !counts_.read_buffer_bytes.compare_exchange_weak(max_held, held)) continue;
    std::atomic<u64> hits{0};
    read_threads_->run(ranges.size(), [&](std::size_t i) {
        const auto& [shard, begin, end] = ranges[i];
        hits += read_sorted(*shards_[shard]->db, rows, &sorted[shard][begin], end - begin, is_hit);
    });
    counts_.hits += hits;
    counts_.misses += rows.n - hits;
}

std::size_t RocksTier::read_sorted(rocksdb::DB& db, const RowSpan& rows, const SortedRow* sorted, std::size_t n,
                                   bool* is_hit) const {
    rocksdb::ReadOptions options;
    options.async_io = info_.async_io;
    // RocksDB cannot cache an index without the data block that it leads to. So few reads fill a cache for indexes.
    thread_local std::minstd_rand random;
    options.fill_cache = caches_data_ || random() % FILL_INTERVAL == 0;
    std::vector<Key> keys;
    std::vector<rocksdb::Slice> slices;
    keys.reserve(n);
    slices.reserve(n);
    for (std::size_t i = 0; i < n; ++i) {
        keys.push_back(sorted[i].encode());
        slices.push_back(keys.back().slice());
    }
    std::vector<rocksdb::PinnableSlice> values(n);
    std::vector<rocksdb::Status> statuses(n);
    call([&] {
        db.MultiGet(options, db.DefaultColumnFamily(), n, slices.data(), values.data(), statuses.data(), true);
    });
    std::size_t hits = 0;
    for (std::size_t i = 0; i < n; ++i) {
        const std::size_t row = sorted[i].index;
        is_hit[row] = !statuses[i].IsNotFound();
        if (!is_hit[row]) continue;
        check(statuses[i], folder_, "read");
        check_size("row", values[i].size(), compute_stored_bytes(shape_.width), folder_);
        std::memcpy(floats(rows.lines[row]), values[i].data(), values[i].size());
        ++hits;
    }
    return hits;
}

std::optional<RowCounters> RocksTier::locate(u32 table, u64 key) const {
    require_open();
    const std::shared_lock lock(open_mutex_);
    const u32 bucket = get_bucket(hash_row(table, key));
    rocksdb::DB& db = *find_shard(bucket).db;
    rocksdb::ReadOptions options;
    options.fill_cache = false;
    rocksdb::PinnableSlice value;
    const rocksdb::Status status =
        call([&] { return db.Get(options, db.DefaultColumnFamily(), Key(bucket, table, key).slice(), &value); });
    if (status.IsNotFound()) return std::nullopt;
    check(status, folder_, "read");
    check_size("row", value.size(), compute_stored_bytes(shape_.width), folder_);
    RowCounters counters;
    std::memcpy(&counters, value.data() + shape_.width * sizeof(float), sizeof counters);
    return counters;
}

void RocksTier::write(const RowSpan& rows) {
    const Timer timer(counts_.write);
    for_each_shard(rows, [&](Shard& shard, const auto& sorted) { write_or_erase(shard, rows, sorted, false); });
    counts_.rows_written += rows.n;
}

void RocksTier::write_for_flush(const RowSpan& rows) {
    const Timer timer(counts_.write);
    for_each_shard(rows, [&](Shard& shard, const auto& sorted) {
        if (!write_file(shard, rows, sorted)) write_or_erase(shard, rows, sorted, false);
    });
    counts_.rows_written += rows.n;
}

void RocksTier::erase(const RowSpan& rows) {
    for_each_shard(rows, [&](Shard& shard, const auto& sorted) { write_or_erase(shard, rows, sorted, true); });
    counts_.rows_erased += rows.n;
}

template <class Body>
void RocksTier::for_each_shard(const RowSpan& rows, const Body& body) {
    require_open();
    const std::shared_lock lock(open_mutex_);
    const std::vector<std::vector<SortedRow>> all = sort_rows(rows);
    parallel_for(shards_.size(), [&](std::size_t i) {
        if (!all[i].empty()) body(*shards_[i], all[i]);
    });
}

rocksdb::Slice RocksTier::get_value(const RowSpan& rows, const SortedRow& row) const {
    return {reinterpret_cast<const char*>(rows.lines[row.index]), compute_stored_bytes(shape_.width)};
}

void RocksTier::write_or_erase(Shard& shard, const RowSpan& rows, const std::vector<SortedRow>& sorted, bool is_erase) {
    const std::size_t row_bytes =
        compute_stored_bytes(shape_.width) + KEY_BYTES + 16;  // upper bound per row; covers the batch's header too
    // Reserve all memory first: RocksDB may end the process if a batch cannot grow.
    rocksdb::WriteBatch batch(std::min(sorted.size() * row_bytes, BATCH_BYTES) + row_bytes);
    for (const SortedRow& row : sorted) {
        const Key key = row.encode();
        if (!is_erase && shard.load && shard.load->accepts(key.slice())) {
            check(call([&] { return shard.load->add(key.slice(), get_value(rows, row)); }), folder_, "load");
            continue;
        }
        check(is_erase ? batch.Delete(key.slice()) : batch.Put(key.slice(), get_value(rows, row)), folder_, "write");
        if (batch.GetDataSize() >= BATCH_BYTES) apply_batch(shard, batch);
    }
    if (batch.Count()) apply_batch(shard, batch);
}

bool RocksTier::write_file(Shard& shard, const RowSpan& rows, const std::vector<SortedRow>& sorted) {
    rocksdb::DB& db = *shard.db;
    // If RocksDB 7.8 has recovered from an error, it may end the process instead of adopting a file.
    const auto had_error = [&] { return statistics_->getTickerCount(rocksdb::ERROR_HANDLER_BG_ERROR_COUNT) > 0; };
    const std::size_t min_bytes = options_->write_buffer_size / 16;  // fewer rows are worth no file of their own
    // If RocksDB wants writes to wait for compactions, memtables wait, and adopting a file does not.
    if (shard.load || sorted.size() * compute_stored_bytes(shape_.width) < min_bytes || had_error() ||
        read_property(db, rocksdb::DB::Properties::kIsWriteStopped))
        return false;
    rocksdb::Options options = *options_;
    options.bottommost_compression = rocksdb::kDisableCompressionOption;  // these rows go to the topmost level
    SortedFiles file(options, shard.folder, std::numeric_limits<std::size_t>::max());
    static_cast<void>(flush_shard(shard, false));  // flushes older rows meanwhile; an error is thrown below
    for (const SortedRow& row : sorted)
        check(file.add(row.encode().slice(), get_value(rows, row)), folder_, "write a file");
    check(file.finish(), folder_, "write a file");
    check(flush_shard(shard, true), folder_, "flush");
    if (had_error()) return false;
    check(call([&] { return file.write_to(db); }), folder_, "adopt a file");
    counts_.file_bytes += file.bytes();
    return true;
}

void RocksTier::begin_load() {
    for (auto& shard : shards_)
        shard->load = std::make_shared<SortedFiles>(*options_, shard->folder, options_->target_file_size_base);
}

void RocksTier::finish_load() {
    require_open();
    const std::shared_lock lock(open_mutex_);
    parallel_for(shards_.size(), [&](std::size_t i) {
        const std::shared_ptr<SortedFiles> load = std::move(shards_[i]->load);
        check(load->finish(), folder_, "load");
        check(call([&] { return load->load_into(*shards_[i]->db); }), folder_, "load");
    });
}

// Retries a failed flush; RocksDB stops all writes until a flush succeeds. RocksDB 7 hangs in Resume if other work of
// the database fails at the same time. So `resume` first waits about one second, until that work has ended.
bool RocksTier::resume(Shard& shard, const rocksdb::Status& failed) {
    if (failed.severity() < rocksdb::Status::kHardError) return false;  // RocksDB has not stopped writes
    rocksdb::DB& db = *shard.db;
    while (read_property(db, rocksdb::DB::Properties::kNumRunningFlushes) ||
           read_property(db, rocksdb::DB::Properties::kNumRunningCompactions))
        std::this_thread::sleep_for(POLL_INTERVAL);
    return db.Resume().ok();
}

// Retries a write that RocksDB refuses after a failed compaction, until the write succeeds or a compaction fails again.
rocksdb::Status RocksTier::write_batch(Shard& shard, rocksdb::WriteBatch& batch) const {
    rocksdb::DB& db = *shard.db;
    rocksdb::WriteOptions options;
    options.disableWAL = true;
    return call([&] {
        const u64 failures = read_property(db, rocksdb::DB::Properties::kBackgroundErrors);
        rocksdb::Status status = db.Write(options, &batch);
        while (status.IsIncomplete() && read_property(db, rocksdb::DB::Properties::kBackgroundErrors) == failures) {
            std::this_thread::sleep_for(POLL_INTERVAL);
            status = db.Write(options, &batch);
        }
        return status;
    });
}

// Writes a batch, and retries a failed write if the cause of the failure is gone.
void RocksTier::apply_batch(Shard& shard, rocksdb::WriteBatch& batch) const {
    rocksdb::Status status = write_batch(shard, batch);
    if (!status.ok()) {
        const std::lock_guard lock(shard.flush_mutex);
        if (call([&] { return resume(shard, status); })) status = write_batch(shard, batch);
    }
    check(status, folder_, "write");
    const i64 size = static_cast<i64>(batch.GetDataSize());
    const i64 remaining = shard.bytes_to_flush.fetch_sub(size);
    if (remaining > 0 && remaining <= size) static_cast<void>(flush_shard(shard, false));  // the next write throws
    batch.Clear();
}

// After a failed flush, RocksDB 7.8's Flush may return OK before the rows are in files. This function waits for that.
rocksdb::Status RocksTier::flush_rows(rocksdb::DB& db, const rocksdb::FlushOptions& options) {
    const u64 failures = read_property(db, rocksdb::DB::Properties::kBackgroundErrors);
    rocksdb::Status status = db.Flush(options);
    while (status.ok() && read_property(db, rocksdb::DB::Properties::kNumImmutableMemTable)) {
        if (read_property(db, rocksdb::DB::Properties::kBackgroundErrors) != failures)
            return rocksdb::Status::IOError("rows could not be written to files, for example because the disk is full");
        std::this_thread::sleep_for(POLL_INTERVAL);
        status = db.Flush(options);
    }
    return status;
}

rocksdb::Status RocksTier::flush_shard(Shard& shard, bool wait) const {
    if (!shard.is_writable) return rocksdb::Status::OK();
    const std::lock_guard lock(shard.flush_mutex);
    rocksdb::FlushOptions options;
    options.wait = wait;
    options.allow_write_stall = true;  // otherwise a flush waits for compactions, and these fail on a full disk
    return call([&] {
        if (!wait) return shard.db->Flush(options);
        const rocksdb::Status status = flush_rows(*shard.db, options);
        return !status.ok() && resume(shard, status) ? flush_rows(*shard.db, options) : status;
    });
}

void RocksTier::flush() {
    require_open();
    const std::shared_lock lock(open_mutex_);
    parallel_for(shards_.size(), [&](std::size_t i) { check(flush_shard(*shards_[i], true), folder_, "flush"); });
}

void RocksTier::compact() {
    make_writable();
    flush();
    rocksdb::CompactRangeOptions options;
    options.bottommost_level_compaction = rocksdb::BottommostLevelCompaction::kForceOptimized;
    for (auto& shard : shards_) {
        shard->manifest_is_stale = true;
        check(call([&] { return shard->db->CompactRange(options, nullptr, nullptr); }), folder_, "compact");
    }
    rewrite_manifests();
}

// Reopens databases after a compaction. RocksDB's list of files (MANIFEST) keeps the first and last keys of merged
// files. Opening a database writes a new list without these keys. Skips a database that is being scanned or whose
// files are held; `close` handles it later.
void RocksTier::rewrite_manifests() {
    const std::unique_lock lock(open_mutex_);
    for (auto& shard : shards_) {
        if (!shard->manifest_is_stale || has_held_files_ || shard->db.use_count() > 1) continue;
        check(flush_shard(*shard, true), folder_, "flush");
        shard->db.reset();
        try {
            open(*shard, false, false);
        } catch (...) {
            mark_failed();
            throw;
        }
        shard->manifest_is_stale = false;
    }
}

std::vector<std::pair<std::string, u64>> RocksTier::read_versions() const {
    require_open();
    const std::shared_lock lock(open_mutex_);
    std::vector<std::pair<std::string, u64>> all;
    for (const auto& shard : shards_) {
        std::string identity;
        check(call([&] { return shard->db->GetDbIdentity(identity); }), shard->folder, "identify");
        all.emplace_back(identity, shard->db->GetLatestSequenceNumber());
    }
    return all;
}

RocksTier::Scan::Scan(const RocksTier& tier, u32 part, u32 num_parts)
    : tier_(tier), views_(std::make_unique<std::vector<View>>()), bucket_(part), num_parts_(num_parts) {
    tier.require_open();
    const std::shared_lock lock(tier.open_mutex_);
    rocksdb::ReadOptions options;
    options.fill_cache = false;
    options.total_order_seek = true;
    options.readahead_size = std::size_t{2} << 20;
    views_->resize(tier.shards_.size());
    for (std::size_t i = part; i < views_->size(); i += num_parts) {
        View& view = (*views_)[i];
        view.db = tier.shards_[i]->db;
        view.iterator.reset(tier.call([&] { return view.db->NewIterator(options); }));
    }
}

RocksTier::Scan::~Scan() { close(); }

void RocksTier::Scan::close() {
    if (tier_.process_id_ != getpid() || tier_.has_failed()) static_cast<void>(views_.release());
    views_.reset();
}

std::size_t RocksTier::Scan::next(u8* out, std::size_t max_rows, u32& bucket) {
    const LineShape& shape = tier_.shape_;
    const std::string& folder = tier_.folder_;
    if (!views_) throw std::runtime_error("RocksDB in " + folder + " was closed during a scan");
    for (; bucket_ < BUCKETS; bucket_ += num_parts_) {
        View& view = (*views_)[bucket_ % views_->size()];
        rocksdb::Iterator& it = *view.iterator;
        if (!std::exchange(view.is_started, true)) it.SeekToFirst();  // reads blocks, so not while the scan is opened
        std::size_t rows = 0;
        for (; rows < max_rows && it.Valid() && (it.key().empty() || static_cast<u8>(it.key()[0]) == bucket_);
             it.Next(), ++rows) {
            check_size("key", it.key().size(), KEY_BYTES, folder);
            check_size("row", it.value().size(), compute_stored_bytes(shape.width), folder);
            u32 table;
            u64 key;
            std::memcpy(&table, it.key().data() + 1, sizeof table);
            std::memcpy(&key, it.key().data() + 5, sizeof key);
            out = pack_row(out, __builtin_bswap32(table), __builtin_bswap64(key), it.value().data(), shape);
        }
        check(it.status(), folder, "scan");
        bucket = bucket_;
        if (rows) return rows;
    }
    for (const auto& view : *views_)
        if (view.iterator && view.iterator->Valid())
            throw std::runtime_error("RocksDB in " + folder + ": a shard has rows of another; " + RELOAD_REMEDY);
    return 0;
}

}  // namespace tierbed
