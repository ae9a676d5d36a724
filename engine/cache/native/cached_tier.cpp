#include "cached_tier.h"

#include <algorithm>
#include <stdexcept>

#include <unistd.h>

namespace tierbed {
namespace {

Wanted wanted_of(Batch& batch, bool own_lines) {
    const u64* own = own_lines && batch.own_lines.size() ? batch.own_lines.data() : nullptr;
    Wanted wanted{batch.tables.data(), batch.hashes.data(), batch.lines.data(), own, {}};
    std::copy_n(batch.bucket_begin, BUCKETS + 1, wanted.begin.begin());
    return wanted;
}

}  // namespace

CachedTier::CachedTier(const Layout& layout, Tier& below, const CacheOptions& options)
    : layout_(layout),
      below_(below),
      overflow_rows_(options.overflow_bytes / Overflow::row_bytes(layout.shape)),
      directory_(layout.shape, options.budget_bytes, options.replacement, overflow_rows_),
      asked_(layout.tables),
      process_(getpid()),
      threads_(std::make_unique<Threads>()) {
    if (below.on_disk())
        threads_->writer.emplace(directory_.overflow, threads_->directory, below, done_, write_latency_,
                                 options.io_threads);
}

CachedTier::~CachedTier() {
    if (process_ == getpid())
        close();
    else
        static_cast<void>(threads_.release());
}

void CachedTier::close() {
    if (threads_->writer) threads_->writer->stop();
    cancel();
}

CachedTier::Announced* CachedTier::announced(u32 number) {
    for (Announced& one : announced_)
        if (one.number == number) return &one;
    return nullptr;
}

void CachedTier::update_done() {
    const u32 done = pinned_ ? pinned_number_ - 1 : announced_.empty() ? number_ : announced_.front().number - 1;
    done_.store(done, std::memory_order_release);
}

void CachedTier::announce(std::shared_ptr<Batch> batch) {
    const std::lock_guard directory(threads_->directory);
    const Wanted wanted = wanted_of(*batch, false);
    u32 number;
    {
        const std::lock_guard queue(threads_->queue);
        if (directory_.window.full()) throw std::runtime_error("too many batches are announced");
        number = ++number_;
        announced_.push_back({std::move(batch), number, Announced::waiting});
    }
    directory_.announce(wanted, number);
}

bool CachedTier::prefetch(const Batch& batch) {
    std::shared_ptr<Batch> kept;
    u32 number;
    {
        std::unique_lock queue(threads_->queue);
        threads_->admitted.wait(queue, [&] {
            return std::none_of(announced_.begin(), announced_.end(),
                                [](const Announced& one) { return one.state == Announced::admitting; });
        });
        const auto is_down = [](const Announced& one) { return one.state != Announced::admitted; };
        const auto first = std::find_if(announced_.begin(), announced_.end(), is_down);
        const auto mine = std::find_if(announced_.begin(), announced_.end(),
                                       [&](const Announced& one) { return one.batch.get() == &batch; });
        if (mine == announced_.end() || !is_down(*mine)) return true;
        if (mine != first) return false;
        mine->state = Announced::admitting;
        kept = mine->batch;
        number = mine->number;
    }
    const auto is_cancelled = [&] {
        const std::lock_guard queue(threads_->queue);
        return announced(number) == nullptr;
    };
    const auto end = [&](bool admitted) {
        const std::lock_guard queue(threads_->queue);
        if (Announced* const mine = announced(number))
            mine->state = admitted ? Announced::admitted : Announced::waiting;
        threads_->admitted.notify_all();
        return admitted;
    };
    try {
        const std::lock_guard admission(threads_->admission);
        if (is_cancelled()) return end(true);
        return end(admit(wanted_of(*kept, false), number, For::ahead));
    } catch (...) {
        end(false);
        throw;
    }
}

void CachedTier::pin(std::shared_ptr<Batch> batch) {
    u32 number;
    bool is_up = false;
    {
        std::unique_lock queue(threads_->queue);
        if (pinned_) throw std::runtime_error("a batch is still pinned; one step at a time");
        if (announced_.empty()) {
            number = ++number_;
        } else {
            Announced& first = announced_.front();
            if (first.batch != batch) throw std::runtime_error("another batch was announced; cancel it");
            threads_->admitted.wait(queue, [&] { return first.state != Announced::admitting; });
            number = first.number;
            is_up = first.state == Announced::admitted;
            first.state = Announced::admitting;
        }
    }
    const auto end = [&](bool pinned) {
        std::shared_ptr<Batch> last;  // ends without the lock
        const std::lock_guard queue(threads_->queue);
        if (!announced_.empty() && announced_.front().number == number) {
            last = std::move(announced_.front().batch);
            announced_.pop_front();
        }
        if (pinned) {
            pinned_ = batch;
            pinned_number_ = number;
        }
        update_done();
        threads_->admitted.notify_all();
    };
    try {
        if (is_up) {
            batch->use_own_lines();
        } else {
            const std::lock_guard admission(threads_->admission);
            admit(wanted_of(*batch, true), number, For::step);
        }
    } catch (...) {
        end(false);
        throw;
    }
    end(true);
}

void CachedTier::unpin(const Batch& batch) {
    std::shared_ptr<Batch> last;
    {
        const std::lock_guard queue(threads_->queue);
        if (pinned_.get() != &batch) throw std::runtime_error("unpin of a batch that is not pinned");
        last.swap(pinned_);
        update_done();
    }
    if (!threads_->writer) return;
    // the next step may be long in coming; a batch that is being admitted wakes the writer itself
    const std::unique_lock directory(threads_->directory, std::try_to_lock);
    if (directory && directory_.overflow.rows() > overflow_rows_) threads_->writer->wake(room_beside());
}

void CachedTier::cancel() {
    std::deque<Announced> last;
    const std::lock_guard admission(threads_->admission);  // rows that are being fetched must not be over
    const std::lock_guard directory(threads_->directory);
    const std::lock_guard queue(threads_->queue);
    last.swap(announced_);
    directory_.window.clear();
    update_done();
}

void CachedTier::peek(Batch& batch) {
    const Wanted wanted = wanted_of(batch, false);
    const std::vector<u64> lines = batch.allocate(batch.unique, layout_.shape);
    RowList missing;
    {
        const std::lock_guard admission(threads_->admission);
        for (const std::size_t row : copy_present(wanted, lines.data(), false))
            missing.add(batch.tables[row], batch.hashes[row], lines[row]);
    }
    std::copy(lines.begin(), lines.end(), batch.lines.data());
    read_below(missing.rows(), false);
}

}  // namespace tierbed
