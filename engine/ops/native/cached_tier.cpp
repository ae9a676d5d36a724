#include "cached_tier.h"

#include <algorithm>

#include <unistd.h>

#include "admission.h"
#include "pool.h"

namespace tierbed {
namespace {

constexpr std::size_t FLUSH_ROWS = 1 << 18;  // rows a write of `flush`

struct Buckets {
    explicit Buckets(const Rows& rows) {
        for (u32 bucket = 0; bucket <= BUCKETS; ++bucket)
            begin[bucket] = static_cast<std::size_t>(
                std::partition_point(rows.hashes, rows.hashes + rows.n,
                                     [&](u64 hash) { return bucket_of(hash) < bucket; }) -
                rows.hashes);
    }
    std::size_t begin[BUCKETS + 1];
};

}  // namespace

CachedTier::CachedTier(const Layout& layout, Tier& below, const CacheOptions& options)
    : layout_(layout),
      below_(below),
      options_(options),
      process_(getpid()),
      cache_(layout.shape, options.budget_bytes),
      overflow_(layout.shape.line_bytes),
      overflow_rows_(std::max<std::size_t>(options.overflow_bytes / layout.shape.line_bytes, 1)) {
    if (below.on_disk()) writer_ = std::make_unique<std::thread>([this] { write_loop(); });
}

CachedTier::~CachedTier() {
    close();
    if (process_ != getpid()) return;
    delete &wake_;
    delete &wrote_;
}

void CachedTier::close() {
    if (!writer_) return;
    if (process_ != getpid()) {  // a forked child has no such thread
        static_cast<void>(writer_.release());
        return;
    }
    {
        std::lock_guard directory(directory_);
        stopping_ = true;
    }
    wake_.notify_all();
    writer_->join();
    writer_.reset();
}

void CachedTier::announce(Batch& batch) {
    bool known;
    {
        std::lock_guard directory(directory_);
        batch.number = ++issued_;
        batch.up = false;
        known = issued_ - done_ < Window::SPAN;
    }
    if (!known) return;
    parallel_for(BUCKETS, [&](std::size_t b) {
        const u32 bucket = static_cast<u32>(b);
        const std::size_t begin = batch.bucket_begin[b], end = batch.bucket_begin[b + 1];
        std::lock_guard directory(directory_);
        window_.reserve(bucket, end - begin);
        for (std::size_t i = begin; i < end; ++i) {
            window_.add(bucket, batch.hashes[i], batch.tables[i], batch.number);
            const u32 slot = cache_.find(batch.hashes[i], batch.tables[i]);
            if (slot == NONE) continue;
            Way& way = cache_.way(slot);
            if (batches_until(way.next, done_) == NEVER) way.next = batch.number;
        }
    });
}

bool CachedTier::prefetch(Batch& batch) {
    std::lock_guard operation(operations_);
    std::unique_lock directory(directory_);
    raise_failure();
    if (!is_announced(batch) || batch.up) return true;
    // each missing row may displace a dirty one, and find no slot itself
    if (overflow_.used() + 2 * missing(batch) > overflow_rows_) {
        ++counts_.prefetch_waits;
        return false;
    }
    admit(batch, nullptr, directory);  // which rows it refuses is only known, and written, when it is pinned
    return true;
}

void CachedTier::pin(Batch& batch) {
    std::lock_guard operation(operations_);
    std::unique_lock directory(directory_);
    raise_failure();
    if (!is_announced(batch)) {
        batch.number = ++issued_;
        batch.up = false;
    }
    try {
        if (!batch.up) {
            wait_for_room(directory);
            admit(batch, batch.own_lines.size() ? batch.own_lines.data() : nullptr, directory);
        }
    } catch (...) {
        done_ = batch.number;
        batch.number = 0;
        throw;
    }
    batch.use_own_lines();
}

void CachedTier::admit(Batch& batch, const u64* own, std::unique_lock<std::mutex>& directory) {
    const Asked asked{batch.tables.data(), batch.hashes.data(), batch.bucket_begin, own, batch.number};
    if (!below_.on_disk()) leave(directory, take_leaving(overflow_.used()));
    Admission(*this, asked, batch.lines.data()).run(true, directory);
    batch.up = true;
}

void CachedTier::unpin(Batch& batch) {
    {
        std::lock_guard directory(directory_);
        done_ = batch.number;
        if (!can_leave()) return;
    }
    wake_.notify_one();
}

void CachedTier::cancel() {
    std::lock_guard operation(operations_);
    {
        std::lock_guard directory(directory_);
        window_.clear();
        cancelled_ = done_ = issued_;
    }
    wake_.notify_one();
}

void CachedTier::peek(Batch& batch) {
    std::lock_guard operation(operations_);
    std::unique_lock directory(directory_);
    const bool alone = issued_ == done_;  // nothing comes up or leaves before the next operation
    const LineShape& shape = layout_.shape;
    std::vector<u32> copied, absent;
    Buffer<u64> from(batch.unique);
    for (std::size_t i = 0; i < batch.unique; ++i) {
        if (i + 16 < batch.unique) cache_.fetch_tags(batch.hashes[i + 16]);
        if (i + 8 < batch.unique) cache_.fetch_ways(batch.hashes[i + 8]);
        const u32 row = static_cast<u32>(i), slot = cache_.find(batch.hashes[i], batch.tables[i]);
        if (slot != NONE) {
            batch.lines[i] = from[i] = cache_.line(slot);
            if (!alone) copied.push_back(row);
        } else if (const u32 entry = overflow_.find(batch.hashes[i], batch.tables[i])) {
            from[i] = overflow_[entry - 1].line;
            copied.push_back(row);
        } else {
            absent.push_back(row);
        }
    }
    counts_.hits += batch.unique - absent.size();
    counts_.misses += absent.size();
    const std::vector<u64> lines = batch.allocate(copied.size() + absent.size(), shape);
    parallel_ranges(copied.size(), 256, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) {
            batch.lines[copied[i]] = lines[i];
            copy_line(THREAD, lines[i], from[copied[i]], shape);
        }
    });
    directory.unlock();
    RowList rows(absent.size());
    for (std::size_t i = 0; i < absent.size(); ++i) {
        batch.lines[absent[i]] = lines[copied.size() + i];
        rows.add(batch.tables[absent[i]], batch.hashes[absent[i]], lines[copied.size() + i]);
    }
    const std::unique_ptr<bool[]> found(new bool[absent.size() + 1]());
    read_below(rows.rows(), found.get(), false);
}

void CachedTier::read(const Rows& rows, bool* found, bool touch) {
    std::lock_guard operation(operations_);
    std::unique_lock directory(directory_);
    const u32 number = touch ? done_ = ++issued_ : done_;
    RowList absent(rows.n);
    std::vector<std::size_t> at;
    for (std::size_t i = 0; i < rows.n; ++i) {
        const u32 slot = cache_.find(rows.hashes[i], rows.tables[i]);
        const u32 entry = slot == NONE ? overflow_.find(rows.hashes[i], rows.tables[i]) : 0;
        found[i] = slot != NONE || entry;
        if (!found[i]) {
            absent.add(rows.tables[i], rows.hashes[i], rows.lines[i]);
            at.push_back(i);
            continue;
        }
        const u64 line = entry ? overflow_[entry - 1].line : cache_.line(slot);
        copy_line(THREAD, rows.lines[i], line, layout_.shape);
        found[i] = record(line, layout_.shape)->updates > 0;
        if (entry || !touch) continue;
        cache_.way(slot).last = number;
        ++cache_.way(slot).uses;
    }
    counts_.hits += rows.n - at.size();
    counts_.misses += at.size();
    directory.unlock();
    if (at.empty()) return;
    const std::unique_ptr<bool[]> here(new bool[at.size()]());
    {
        const Timer timer(fetch_times);
        below_.read(absent.rows(), here.get(), touch);
    }
    for (std::size_t i = 0; i < at.size(); ++i) fetched_ += found[at[i]] = here[i];
}

void CachedTier::write(const Rows& rows) {
    std::lock_guard operation(operations_);
    std::unique_lock directory(directory_);
    raise_failure();
    wait_for_room(directory);
    if (!below_.on_disk()) leave(directory, take_leaving(overflow_.used()));
    const Buckets buckets(rows);
    const u32 number = ++issued_;
    Buffer<u64> lines(rows.n);
    try {
        Admission(*this, {rows.tables, rows.hashes, buckets.begin, nullptr, number}, lines.data())
            .run(false, directory);
    } catch (...) {
        done_ = number;
        throw;
    }
    parallel_ranges(rows.n, 256, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) copy_line(THREAD, lines[i], rows.lines[i], layout_.shape);
    });
    done_ = number;
    wake_.notify_one();
}

void CachedTier::erase(const Rows& rows) {
    std::lock_guard operation(operations_);
    {
        std::unique_lock directory(directory_);
        const Paused paused(*this, directory);
        for (std::size_t i = 0; i < rows.n; ++i) {
            const u32 slot = cache_.find(rows.hashes[i], rows.tables[i]);
            const u32 entry = slot == NONE ? overflow_.find(rows.hashes[i], rows.tables[i]) : 0;
            if (slot == NONE && !entry) continue;
            const bool pinned = is_after(entry ? overflow_[entry - 1].last : cache_.way(slot).last, done_);
            if (pinned) {  // a batch that is to come has its address
                const u64 line = entry ? overflow_[entry - 1].line : cache_.line(slot);
                layout_.initialise(line, rows.tables[i], key_of(rows.tables[i], rows.hashes[i]));
                (entry ? overflow_[entry - 1].stored : cache_.way(slot).stored) = 0;
            } else if (entry) {
                overflow_.remove(entry - 1);
            } else {
                cache_.tag(slot) = 0;
            }
        }
    }
    below_.erase(rows);
}

void CachedTier::flush() {
    std::lock_guard operation(operations_);
    std::unique_lock directory(directory_);
    const Paused paused(*this, directory);
    failure_ = nullptr;  // whatever it was, here is another try
    struct Dirty {
        u64 hash, line;
        u32 table;
        u32* stored;
    };
    std::vector<Dirty> dirty;
    for (u32 slot = 0; slot < cache_.capacity(); ++slot)
        if (cache_.tag(slot) && is_dirty(cache_.line(slot), cache_.way(slot).stored)) {
            Way& way = cache_.way(slot);
            dirty.push_back({way.hash, cache_.line(slot), way.table, &way.stored});
        }
    overflow_.for_each([&](u32, Overflow::Entry& entry) {
        if (is_dirty(entry.line, entry.stored)) dirty.push_back({entry.hash, entry.line, entry.table, &entry.stored});
    });
    std::stable_sort(dirty.begin(), dirty.end(),
                     [](const Dirty& a, const Dirty& b) { return bucket_of(a.hash) < bucket_of(b.hash); });
    for (std::size_t begin = 0; begin < dirty.size(); begin += FLUSH_ROWS) {
        const std::size_t end = std::min(dirty.size(), begin + FLUSH_ROWS);
        RowList rows(end - begin);
        for (std::size_t i = begin; i < end; ++i) rows.add(dirty[i].table, dirty[i].hash, dirty[i].line);
        write_below(rows.rows());
        for (std::size_t i = begin; i < end; ++i) *dirty[i].stored = record(dirty[i].line, layout_.shape)->updates;
    }
}

CachedTier::Place CachedTier::where(u64 hash, u32 table) {
    std::lock_guard operation(operations_);
    std::lock_guard directory(directory_);
    const u32 slot = cache_.find(hash, table);
    const u32 entry = slot == NONE ? overflow_.find(hash, table) : 0;
    if (slot == NONE && !entry) return {};
    const u64 line = entry ? overflow_[entry - 1].line : cache_.line(slot);
    const u32 stored = entry ? overflow_[entry - 1].stored : cache_.way(slot).stored;
    const u32 last = entry ? overflow_[entry - 1].last : cache_.way(slot).last;
    return {true, entry != 0, is_after(last, done_), is_dirty(line, stored), entry ? entry - 1 : slot,
            *record(line, layout_.shape)};
}

std::size_t CachedTier::missing(const Batch& batch) {
    std::size_t total = 0;
    for (std::size_t i = 0; i < batch.unique; ++i) {
        if (i + 16 < batch.unique) cache_.fetch_tags(batch.hashes[i + 16]);
        total += cache_.find(batch.hashes[i], batch.tables[i]) == NONE;
    }
    return total;
}

void CachedTier::read_below(const Rows& rows, bool* found, bool touch) {
    if (rows.n == 0) return;
    {
        const Timer timer(fetch_times);
        below_.read(rows, found, touch);
    }
    parallel_ranges(rows.n, 256, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i)
            if (!found[i]) layout_.initialise(rows.lines[i], rows.tables[i], key_of(rows.tables[i], rows.hashes[i]));
    });
    fetched_ += static_cast<u64>(std::count(found, found + rows.n, true));
}

void CachedTier::write_below(const Rows& rows) {
    const Timer timer(write_times);
    below_.write(rows);
    written_ += rows.n;
}

void CachedTier::count(const CacheCounts& counts) {
    counts_.hits += counts.hits;
    counts_.misses += counts.misses;
    counts_.insertions += counts.insertions;
    counts_.evictions_clean += counts.evictions_clean;
    counts_.evictions_dirty += counts.evictions_dirty;
    counts_.overflows += counts.overflows;
}

CacheCounts CachedTier::counts() {
    std::lock_guard directory(directory_);
    CacheCounts all = counts_;
    all.fetched = fetched_;
    all.written = written_;
    return all;
}

std::size_t CachedTier::used() {
    std::lock_guard directory(directory_);
    return cache_.used();
}

OverflowSize CachedTier::overflow() {
    std::lock_guard directory(directory_);
    return {overflow_.used(), overflow_.peak(), overflow_.bytes(), overflow_rows_};
}

}  // namespace tierbed
