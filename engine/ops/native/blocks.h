// Pieces of one size out of large pages, taken again when they are given back.
#pragma once
#include <mutex>
#include <vector>

#include "memory.h"

namespace tierbed {

// May be used by several threads.
class Blocks {
public:
    explicit Blocks(std::size_t block_bytes) : block_bytes_(block_bytes) {}

    u64 take() {
        const std::lock_guard lock(mutex_);
        ++taken_;
        if (free_.empty()) return arena_.allocate(block_bytes_);
        const u64 block = free_.back();
        free_.pop_back();
        return block;
    }
    void give(u64 block) {
        const std::lock_guard lock(mutex_);
        free_.push_back(block);
        --taken_;
    }
    std::size_t bytes_taken() const { return taken_ * block_bytes_; }

private:
    std::mutex mutex_;
    Arena arena_;
    std::vector<u64> free_;
    std::size_t block_bytes_, taken_ = 0;
};

}  // namespace tierbed
