// The thread of a cache over a disk that writes down what gave way.
#include <algorithm>

#include "admission.h"
#include "pool.h"

namespace tierbed {
namespace {

constexpr std::size_t CHUNK = 4096;  // rows a write: what a step that needs one of them may have to wait for

}  // namespace

bool CachedTier::can_leave() const {
    return !overflow_.leaving.empty() ||
           (!overflow_.touched.empty() && !is_after(overflow_.touched.front().first, done_));
}

std::vector<u32> CachedTier::take_leaving(std::size_t most) {
    while (!overflow_.touched.empty() && !is_after(overflow_.touched.front().first, done_)) {
        overflow_.leaving.push_back(overflow_.touched.front().second);
        overflow_.touched.pop_front();
    }
    std::vector<u32> taken;
    while (!overflow_.leaving.empty() && taken.size() < most) {
        const u32 number = overflow_.leaving.front();
        overflow_.leaving.pop_front();
        Overflow::Entry& entry = overflow_[number];
        if (!entry.found || entry.writing || is_after(entry.last, done_)) continue;
        if (!is_dirty(entry.line, entry.stored)) {
            overflow_.remove(number);
            continue;
        }
        entry.writing = true;
        taken.push_back(number);
    }
    std::sort(taken.begin(), taken.end(), [&](u32 a, u32 b) { return overflow_[a].hash < overflow_[b].hash; });
    return taken;
}

void CachedTier::leave(std::unique_lock<std::mutex>& directory, const std::vector<u32>& entries) {
    if (entries.empty()) return;
    std::exception_ptr failure;
    writing_ = true;
    try {
        RowList rows(entries.size());
        for (const u32 number : entries) {
            const Overflow::Entry& entry = overflow_[number];
            rows.add(entry.table, entry.hash, entry.line);
        }
        directory.unlock();
        const Relock relock(directory);
        write_below(rows.rows());
    } catch (...) {
        failure = std::current_exception();
    }
    writing_ = false;
    for (const u32 number : entries) {
        overflow_[number].writing = false;
        if (failure && overflow_[number].found)
            overflow_.leaving.push_back(number);
        else
            overflow_.remove(number);
    }
    if (failure) std::rethrow_exception(failure);
}

void CachedTier::write_loop() {
    use_own_pool(options_.io_threads);
    std::unique_lock directory(directory_);
    for (;;) {
        wake_.wait(directory, [&] { return stopping_ || (!paused_ && !failure_ && can_leave()); });
        if (stopping_) return;
        try {
            leave(directory, take_leaving(CHUNK));
        } catch (...) {
            failure_ = std::current_exception();
        }
        wrote_.notify_all();
    }
}

void CachedTier::wait_for_room(std::unique_lock<std::mutex>& directory) {
    while (overflow_.used() >= overflow_rows_ && (can_leave() || writing_)) {
        raise_failure();
        wake_.notify_one();
        wrote_.wait(directory);
    }
}

void CachedTier::raise_failure() {
    if (!failure_) return;
    const std::exception_ptr failure = std::exchange(failure_, nullptr);
    wake_.notify_one();
    std::rethrow_exception(failure);
}

CachedTier::Paused::Paused(CachedTier& tier, std::unique_lock<std::mutex>& directory) : tier_(tier) {
    tier.paused_ = true;
    tier.wrote_.wait(directory, [&] { return !tier.writing_; });
}

CachedTier::Paused::~Paused() {
    tier_.paused_ = false;
    tier_.wake_.notify_one();
}

}  // namespace tierbed
