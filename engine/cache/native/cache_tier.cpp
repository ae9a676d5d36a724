#include "cache_tier.h"

#include <algorithm>
#include <stdexcept>
#include <unistd.h>

#include "ops/native/thread_pool.h"

namespace tierbed {
namespace {

// A flush writes so many rows at a time. On a disk, each such write becomes a file for each shard.
constexpr std::size_t CHUNK_ROWS = 1 << 16, DISK_CHUNK_BYTES = 48 << 20, MAX_DISK_CHUNK_ROWS = 1 << 19;
constexpr std::size_t ROWS_PER_TASK = 512, PREFETCH_DISTANCE = 4;

// Presents a batch's rows in bucket order. If the batch stores rows by linear id, this class copies the rows.
class BatchRows {
public:
    BatchRows(Batch& batch, bool with_refused_lines) : batch_(batch) {
        const auto& [order, begin] = batch.buckets();
        const u64* const refused_lines = with_refused_lines ? batch.refused_lines.data() : nullptr;
        rows = {batch.tables.data(), batch.hashes.data(), batch.lines.data(), refused_lines, begin};
        if (order.size() == 0) return;
        tables_ = Buffer<u32>(batch.num_unique);
        hashes_ = Buffer<u64>(batch.num_unique);
        lines_ = Buffer<u64>(batch.num_unique);
        if (refused_lines) refused_lines_ = Buffer<u64>(batch.num_unique);
        for (std::size_t k = 0; k < order.size(); ++k) {
            tables_[k] = batch.tables[order[k]];
            hashes_[k] = batch.hashes[order[k]];
            if (refused_lines) refused_lines_[k] = refused_lines[order[k]];
        }
        rows = {tables_.data(), hashes_.data(), lines_.data(), refused_lines_.data(), begin};
    }

    RequestedRows rows;

    // Writes the copied rows' lines to the batch.
    void set_lines() {
        for (std::size_t k = 0; k < lines_.size(); ++k) batch_.lines[batch_.buckets().row(k)] = lines_[k];
    }

private:
    Batch& batch_;
    Buffer<u32> tables_;
    Buffer<u64> hashes_, lines_, refused_lines_;
};

std::size_t compute_overflow_rows(const CacheOptions& options, const LineShape& shape) {
    const std::size_t rows = options.overflow_bytes / Overflow::row_bytes(shape);
    return options.grows_with_batch ? Overflow::round_up_to_chunks(rows) : rows;
}

}  // namespace

CacheTier::CacheTier(const Layout& layout, Tier& lower_tier, const CacheOptions& options)
    : layout_(layout),
      lower_tier_(lower_tier),
      overflow_rows_(compute_overflow_rows(options, layout.shape)),
      grows_with_batch_(options.grows_with_batch),
      directory_(layout.shape, options.budget_bytes, options.policy, overflow_rows_),
      hit_counts_(layout.num_tables),
      process_id_(getpid()),
      sync_(std::make_unique<Synchronization>()) {
    if (lower_tier.is_on_disk())
        sync_->writer.emplace(directory_.overflow, sync_->directory_mutex, lower_tier, last_completed_, write_latency_,
                              options.io_threads);
}

CacheTier::~CacheTier() { process_id_ == getpid() ? close() : static_cast<void>(sync_.release()); }

void CacheTier::close() {
    if (sync_->writer) sync_->writer->stop();
    cancel_announced();
}

CacheTier::AnnouncedBatch* CacheTier::find_announced(u32 batch_number) {
    for (AnnouncedBatch& entry : announced_)
        if (entry.batch_number == batch_number) return &entry;
    return nullptr;
}

void CacheTier::update_last_completed() {
    const u32 next = announced_.empty() ? latest_number_ + 1 : announced_.front().batch_number;
    last_completed_.store((pinned_ ? pinned_number_ : next) - 1, std::memory_order_release);
}

void CacheTier::announce(std::shared_ptr<Batch> batch) {
    const std::lock_guard directory_lock(sync_->directory_mutex);
    const BatchRows batch_rows(*batch, false);
    u32 batch_number;
    {
        const std::lock_guard queue_lock(sync_->queue_mutex);
        if (directory_.window.is_full()) throw std::runtime_error("too many batches are announced");
        batch_number = ++latest_number_;
        announced_.push_back({std::move(batch), batch_number, AnnouncedBatch::waiting});
    }
    directory_.announce(batch_rows.rows, batch_number);
}

bool CacheTier::prefetch(const Batch& batch) {
    std::shared_ptr<Batch> shared_batch;
    u32 batch_number;
    {
        std::unique_lock queue_lock(sync_->queue_mutex);
        sync_->batch_fetched.wait(queue_lock, [&] {
            return std::none_of(announced_.begin(), announced_.end(),
                                [](const AnnouncedBatch& entry) { return entry.state == AnnouncedBatch::fetching; });
        });
        const auto is_unfetched = [](const AnnouncedBatch& entry) { return entry.state != AnnouncedBatch::fetched; };
        const auto first = std::find_if(announced_.begin(), announced_.end(), is_unfetched);
        const auto position = std::find_if(announced_.begin(), announced_.end(),
                                           [&](const AnnouncedBatch& entry) { return entry.batch.get() == &batch; });
        if (position == announced_.end() || !is_unfetched(*position)) return true;
        if (position != first) return false;
        position->state = AnnouncedBatch::fetching;
        shared_batch = position->batch;
        batch_number = position->batch_number;
    }
    const auto is_cancelled = [&] {
        const std::lock_guard queue_lock(sync_->queue_mutex);
        return find_announced(batch_number) == nullptr;
    };
    const auto finish = [&](bool is_fetched) {
        const std::lock_guard queue_lock(sync_->queue_mutex);
        if (AnnouncedBatch* const entry = find_announced(batch_number))
            entry->state = is_fetched ? AnnouncedBatch::fetched : AnnouncedBatch::waiting;
        sync_->batch_fetched.notify_all();
        return is_fetched;
    };
    try {
        const std::lock_guard placement_lock(sync_->placement_mutex);
        if (is_cancelled()) return finish(true);
        BatchRows batch_rows(*shared_batch, false);
        if (!place_batch(batch_rows.rows, batch_number, Purpose::prefetch)) return finish(false);
        batch_rows.set_lines();
        return finish(true);
    } catch (...) {
        finish(false);
        throw;
    }
}

void CacheTier::pin(std::shared_ptr<Batch> batch) {
    u32 batch_number;
    bool is_fetched = false;
    {
        std::unique_lock queue_lock(sync_->queue_mutex);
        if (pinned_) throw std::runtime_error("a batch is still pinned; one step at a time");
        if (announced_.empty()) {
            batch_number = ++latest_number_;
        } else {
            AnnouncedBatch& first = announced_.front();
            if (first.batch != batch) throw std::runtime_error("another batch was announced; cancel it");
            sync_->batch_fetched.wait(queue_lock, [&] { return first.state != AnnouncedBatch::fetching; });
            batch_number = first.batch_number;
            is_fetched = first.state == AnnouncedBatch::fetched;
            first.state = AnnouncedBatch::fetching;
        }
    }
    const auto finish = [&](bool is_pinned) {
        std::shared_ptr<Batch> ended_batch;  // destroyed after the lock is released
        const std::lock_guard queue_lock(sync_->queue_mutex);
        if (!announced_.empty() && announced_.front().batch_number == batch_number) {
            ended_batch = std::move(announced_.front().batch);
            announced_.pop_front();
        }
        if (is_pinned) {
            pinned_ = batch;
            pinned_number_ = batch_number;
        }
        update_last_completed();
        sync_->batch_fetched.notify_all();
    };
    try {
        if (is_fetched) {
            batch->use_refused_lines();
        } else {
            const std::lock_guard placement_lock(sync_->placement_mutex);
            BatchRows batch_rows(*batch, true);
            place_batch(batch_rows.rows, batch_number, Purpose::step);
            batch_rows.set_lines();
        }
    } catch (...) {
        finish(false);
        throw;
    }
    finish(true);
}

void CacheTier::unpin(const Batch& batch) {
    std::shared_ptr<Batch> ended_batch;
    {
        const std::lock_guard queue_lock(sync_->queue_mutex);
        if (pinned_.get() != &batch) throw std::runtime_error("unpin of a batch that is not pinned");
        ended_batch.swap(pinned_);
        update_last_completed();
    }
    if (!sync_->writer) return;
    // Wake the writer now, since the next step may come late. A placement in progress wakes the writer anyway.
    const std::unique_lock directory_lock(sync_->directory_mutex, std::try_to_lock);
    if (directory_lock && directory_.overflow.num_rows() > overflow_rows_) sync_->writer->wake(overflow_limits());
}

void CacheTier::cancel_announced() {
    std::deque<AnnouncedBatch> ended_batches;
    const std::lock_guard placement_lock(sync_->placement_mutex);  // no batch may end while its rows are being fetched
    const std::lock_guard directory_lock(sync_->directory_mutex);
    const std::lock_guard queue_lock(sync_->queue_mutex);
    ended_batches.swap(announced_);
    directory_.window.clear();
    update_last_completed();
}

std::pair<std::size_t, std::size_t> CacheTier::peek(Batch& batch) {
    BatchRows batch_rows(batch, false);
    const RequestedRows& rows = batch_rows.rows;
    const std::vector<u64> lines = batch.allocate_lines(batch.num_unique, layout_.shape);
    RowList missing;
    {
        const std::lock_guard placement_lock(sync_->placement_mutex);
        for (const std::size_t row : copy_resident(rows, lines.data(), false))
            missing.add(rows.tables[row], rows.hashes[row], lines[row]);
    }
    std::copy(lines.begin(), lines.end(), rows.lines);
    batch_rows.set_lines();
    const std::vector<u32> updates = read_lower_tier(missing.rows(), false);
    return {updates.size(), static_cast<std::size_t>(std::count(updates.begin(), updates.end(), 0u))};
}

bool CacheTier::place_batch(const RequestedRows& requested, u32 batch_number, Purpose purpose) {
    std::unique_lock lock(sync_->directory_mutex);
    auto& writer = sync_->writer;
    Overflow& overflow = directory_.overflow;
    if (writer) writer->rethrow_error();
    overflow.trim();
    if (grows_with_batch_ && overflow.grow(2 * requested.size())) overflow_rows_ = overflow.capacity();
    directory_.probe(requested, batch_number, purpose != Purpose::prefetch);
    const std::size_t demand = directory_.overflow_demand();
    const auto fits = [&] { return overflow.num_rows() + demand <= overflow_rows_; };
    if (purpose == Purpose::prefetch) {
        if (!fits()) {
            ++prefetch_waits_;
            writer ? writer->wake(overflow_limits(demand)) : write_back_overflow();
            return false;
        }
        directory_.pin(requested, batch_number);
    } else if (writer && !fits()) {
        writer->wait_until(lock, overflow_limits(demand), fits);
        writer->rethrow_error();
    }
    if (!writer) write_back_overflow();
    directory_.choose_victims(requested, batch_number, last_completed());
    const CacheCounts& counts = directory_.counts();
    try {
        overflow.reserve(std::min<std::size_t>(counts.evictions_dirty + counts.overflows, demand + 1));
        if (!writer) write_back_victims();
        if (purpose != Purpose::write) directory_.count_hits(requested, hit_counts_);  // writes are not counted as hits
    } catch (...) {
        directory_.undo_victims();
        throw;
    }
    directory_.place_misses(requested, writer.has_value());
    if (writer) writer->wake(overflow_limits());
    counts_ += counts;
    lock.unlock();
    if (purpose != Purpose::write) fetch(requested);
    return true;
}

void CacheTier::fetch(const RequestedRows& requested) {
    RowList missing;
    directory_.for_each_miss([&](const Miss& miss) {
        if (miss.old_entry == NONE)
            missing.add(requested.tables[miss.row], requested.hashes[miss.row], requested.lines[miss.row]);
    });
    if (missing.size() == 0) return;
    try {
        const std::vector<u32> updates = read_lower_tier(missing.rows(), true);
        const std::lock_guard directory_lock(sync_->directory_mutex);
        directory_.set_stored_updates(updates.data());
    } catch (...) {
        const std::lock_guard directory_lock(sync_->directory_mutex);
        directory_.drop_unfetched_rows();
        throw;
    }
}

std::vector<u32> CacheTier::read_lower_tier(const RowSpan& rows, bool should_touch) {
    std::vector<u32> updates(rows.n);
    if (rows.n == 0) return updates;
    const auto is_hit = std::make_unique<bool[]>(rows.n);
    {
        const Timer timer(fetch_latency_);
        lower_tier_.read(rows, is_hit.get(), should_touch);
    }
    std::atomic<std::size_t> rows_found{0};
    parallel_ranges(rows.n, ROWS_PER_TASK, [&](std::size_t begin, std::size_t end) {
        std::size_t count = 0;
        for (std::size_t i = begin; i < end; ++i) {
            if (is_hit[i]) {
                updates[i] = row_counters(rows.lines[i], layout_.shape)->updates;
                ++count;
            } else {
                if (rows.tables[i] >= layout_.num_tables) throw std::invalid_argument("the layout has no such table");
                layout_.initialise(rows.lines[i], rows.tables[i], get_key(rows.tables[i], rows.hashes[i]));
            }
        }
        rows_found += count;
    });
    bytes_in_ += rows_found * compute_stored_bytes(layout_.shape.width);
    return updates;
}

void CacheTier::write_back(const RowSpan& rows, bool will_flush) {
    if (rows.n == 0) return;
    const Timer timer(write_latency_);
    will_flush ? lower_tier_.write_for_flush(rows) : lower_tier_.write(rows);
    bytes_out_ += rows.n * compute_stored_bytes(layout_.shape.width);
}

void CacheTier::write_back_victims() {
    RowList victims;
    directory_.for_each_miss([&](const Miss& miss) {
        const Way& victim = miss.displaced_way;
        if (miss.is_victim_dirty) victims.add(victim.table, victim.hash, directory_.sets.line(miss.slot));
    });
    write_back(victims.rows());
}

void CacheTier::write_back_overflow() {
    Overflow& overflow = directory_.overflow;
    if (overflow.empty()) return;
    overflow.write_back(last_completed_, NONE, {0, overflow_rows_ / 2},
                        [&](const RowSpan& dirty) { write_back(dirty); });
}

std::vector<std::size_t> CacheTier::copy_resident(const RequestedRows& requested, const u64* out, bool should_touch) {
    const u32 batch_number = should_touch ? begin_internal_batch() : 0;
    const std::lock_guard directory_lock(sync_->directory_mutex);
    std::vector<std::size_t> missing;
    directory_.probe(requested, batch_number, false);
    if (should_touch) directory_.pin(requested, batch_number);
    directory_.for_each_miss([&](const Miss& miss) {
        if (miss.old_entry == NONE)
            missing.push_back(miss.row);
        else
            requested.lines[miss.row] = directory_.overflow.line(miss.old_entry);
    });
    parallel_ranges(requested.size(), ROWS_PER_TASK, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) {
            if (const std::size_t k = i + PREFETCH_DISTANCE; k < end)
                prefetch_bytes(requested.lines[k], layout_.shape.line_bytes);
            if (requested.lines[i]) copy_line(THREAD, out[i], requested.lines[i], layout_.shape);
        }
    });
    directory_.count_hits(requested, hit_counts_);
    return missing;
}

u32 CacheTier::begin_internal_batch() {
    const std::lock_guard queue_lock(sync_->queue_mutex);
    if (pinned_ || !announced_.empty())
        throw std::runtime_error("a cache with announced or pinned batches cannot be used as a tier");
    return ++latest_number_;
}

void CacheTier::end_internal_batch() {
    const std::lock_guard queue_lock(sync_->queue_mutex);
    update_last_completed();
}

void CacheTier::read(const RowSpan& rows, bool* is_hit, bool should_touch) {
    Buffer<u64> lines(rows.n);
    const RequestedRows requested{rows.tables, rows.hashes, lines.data(), nullptr, rows.bucket_offsets()};
    RowList lower_rows;
    std::vector<std::size_t> missing;
    {
        const std::lock_guard placement_lock(sync_->placement_mutex);
        missing = copy_resident(requested, rows.lines, should_touch);
        if (should_touch) end_internal_batch();
    }
    for (const std::size_t row : missing) lower_rows.add(rows.tables[row], rows.hashes[row], rows.lines[row]);
    const auto is_in_lower_tier = std::make_unique<bool[]>(missing.size());
    if (!missing.empty()) {
        const Timer timer(fetch_latency_);
        lower_tier_.read(lower_rows.rows(), is_in_lower_tier.get(), should_touch);
    }
    for (std::size_t i = 0; i < rows.n; ++i)
        is_hit[i] = lines[i] != 0 && row_counters(rows.lines[i], layout_.shape)->updates > 0;
    for (std::size_t i = 0; i < missing.size(); ++i) is_hit[missing[i]] = is_in_lower_tier[i];
}

void CacheTier::write(const RowSpan& rows) {
    Buffer<u64> lines(rows.n);
    const RequestedRows requested{rows.tables, rows.hashes, lines.data(), nullptr, rows.bucket_offsets()};
    const std::lock_guard placement_lock(sync_->placement_mutex);
    const u32 batch_number = begin_internal_batch();
    try {
        place_batch(requested, batch_number, Purpose::write);
    } catch (...) {
        end_internal_batch();
        throw;
    }
    parallel_ranges(rows.n, ROWS_PER_TASK, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) copy_line(THREAD, lines[i], rows.lines[i], layout_.shape);
    });
    end_internal_batch();
}

void CacheTier::erase(const RowSpan& rows) {
    const std::lock_guard placement_lock(sync_->placement_mutex);
    {
        std::unique_lock directory_lock(sync_->directory_mutex);
        auto& writer = sync_->writer;
        if (writer) writer->wait_for_write(directory_lock);
        for (std::size_t i = 0; i < rows.n; ++i) {
            const Directory::Location location = directory_.find(rows.hashes[i], rows.tables[i]);
            if (!location.way) continue;
            if (is_after(location.way->last_batch, last_completed())) {
                layout_.initialise(location.line, rows.tables[i], get_key(rows.tables[i], rows.hashes[i]));
                location.way->stored_updates = 0;
            } else {
                directory_.erase(location);
            }
        }
        if (writer) writer->drop_error();
    }
    lower_tier_.erase(rows);
}

void CacheTier::forget_errors() {
    lower_tier_.forget_errors();
    const std::lock_guard placement_lock(sync_->placement_mutex);  // so that no thread waits for the writer meanwhile
    std::unique_lock directory_lock(sync_->directory_mutex);
    auto& writer = sync_->writer;
    if (!writer) return;
    writer->wait_for_write(directory_lock);
    writer->drop_error();
}

void CacheTier::flush(bool will_flush) {
    flush_rows([&](const auto& body) { directory_.for_each_row(body); }, will_flush, false);
}

u32 CacheTier::flush_piece(u32 begin) {
    const u32 num_slots = directory_.sets.num_slots();
    if (begin < num_slots) {
        const auto for_each = [&](const auto& body) { directory_.for_each_in_slots(begin, num_slots, body); };
        return static_cast<u32>(flush_rows(for_each, true, true).value_or(num_slots));
    }
    const auto for_each = [&](const auto& body) { directory_.for_each_in_overflow(body); };
    return flush_rows(for_each, true, true) ? num_slots : 0;
}

template <class ForEach>
std::optional<i64> CacheTier::flush_rows(const ForEach& for_each, bool will_flush, bool is_piece) {
    const std::lock_guard placement_lock(sync_->placement_mutex);
    lower_tier_.forget_errors();  // drop earlier errors; a write that fails from now on throws again
    std::unique_lock directory_lock(sync_->directory_mutex);
    auto& writer = sync_->writer;
    if (writer) {
        writer->wait_for_write(directory_lock);
        writer->drop_error();
    }
    const std::size_t disk_chunk_rows = DISK_CHUNK_BYTES / compute_stored_bytes(layout_.shape.width);
    const std::size_t chunk_rows =
        lower_tier_.is_on_disk() ? std::clamp<std::size_t>(disk_chunk_rows, 1, MAX_DISK_CHUNK_ROWS) : CHUNK_ROWS;
    std::optional<i64> remaining_slot;
    RowList dirty;
    std::vector<std::pair<Way*, u32>> written_ways;  // for each written row: its way, and the `updates` written
    const auto write_chunk = [&] {
        write_back(dirty.rows(), will_flush);
        for (const auto& [way, updates] : written_ways) way->stored_updates = updates;
        dirty.clear();
        written_ways.clear();
    };
    for_each([&](Way& way, u64 line, i64 slot) {
        if (remaining_slot) return;
        const u32 updates = row_counters(line, layout_.shape)->updates;
        if (!is_dirty(updates, way.stored_updates)) return;
        if (dirty.size() == chunk_rows) {
            if (is_piece) {
                remaining_slot = slot;
                return;
            }
            write_chunk();
        }
        dirty.add(way.table, way.hash, line);
        written_ways.push_back({&way, updates});
    });
    write_chunk();
    if (writer) writer->wake(overflow_limits());
    return remaining_slot;
}

RowKeys CacheTier::list_dirty() {
    const std::lock_guard placement_lock(sync_->placement_mutex);
    const std::lock_guard directory_lock(sync_->directory_mutex);
    RowKeys keys;
    directory_.for_each_row([&](const Way& way, u64 line, i64) {
        if (is_dirty(row_counters(line, layout_.shape)->updates, way.stored_updates))
            keys.add(way.table, get_key(way.table, way.hash));
    });
    return keys;
}

Metrics CacheTier::metrics() const {
    const std::lock_guard directory_lock(sync_->directory_mutex);
    const CacheSets& sets = directory_.sets;
    const Overflow& overflow = directory_.overflow;
    const u64 rows_written_behind = sync_->writer ? sync_->writer->num_written : 0;
    const std::size_t num_used = sets.count_used_slots();
    const auto [hits, misses] = hit_counts_.totals();
    Metrics metrics{{{"hits", hits},
                     {"misses", misses},
                     {"insertions", counts_.insertions},
                     {"evictions_clean", counts_.evictions_clean},
                     {"evictions_dirty", counts_.evictions_dirty},
                     {"overflows", counts_.overflows},
                     {"bytes_in", bytes_in_},
                     {"bytes_out", bytes_out_ + rows_written_behind * compute_stored_bytes(layout_.shape.width)},
                     {"capacity", sets.num_slots()},
                     {"resident_rows", num_used},
                     {"bytes", sets.bytes()},
                     {"overflow_rows", overflow.num_rows()},
                     {"overflow_peak_rows", overflow.peak_rows()},
                     {"overflow_capacity", overflow_rows_},
                     {"overflow_bytes", overflow.bytes()},
                     {"window_bytes", directory_.window.bytes()},
                     {"overflow_evictions", overflow.evictions()},
                     {"prefetch_waits", prefetch_waits_}},
                    {{"fill", static_cast<double>(num_used) / sets.num_slots()}}};
    metrics.add("fetch", fetch_latency_);
    metrics.add("write", write_latency_);
    return metrics;
}

std::vector<u64> CacheTier::hit_counts() const {
    const std::lock_guard directory_lock(sync_->directory_mutex);
    return hit_counts_.sums();
}

std::optional<CacheTier::ResidentRow> CacheTier::locate(u32 table, u64 key) {
    const std::lock_guard placement_lock(sync_->placement_mutex);
    const std::lock_guard directory_lock(sync_->directory_mutex);
    const Directory::Location location = directory_.find(slot_hash(table, key), table);
    if (!location.way) return std::nullopt;
    const RowCounters counters = *row_counters(location.line, layout_.shape);
    const bool dirty = is_dirty(counters.updates, location.way->stored_updates);
    const i64 slot = location.slot == NONE ? -1 : static_cast<i64>(location.slot);
    return ResidentRow{slot, dirty, is_after(location.way->last_batch, last_completed()), counters};
}

}  // namespace tierbed
