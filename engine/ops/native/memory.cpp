#include "memory.h"

#include <array>
#include <atomic>
#include <cstdlib>

namespace tierbed {
namespace {

constexpr std::size_t MIN_KEPT_BYTES = std::size_t{64} << 10;
#ifdef __SANITIZE_ADDRESS__
constexpr std::size_t MAX_KEPT_BYTES = 0;  // a reused block would hide a use after free
#else
constexpr std::size_t MAX_KEPT_BYTES = std::size_t{512} << 20;
#endif
constexpr std::size_t MAX_KEPT_BLOCKS = 32;  // per size class

u32 size_class(std::size_t bytes) { return 64 - static_cast<u32>(__builtin_clzll((bytes - 1) / MIN_KEPT_BYTES | 1)); }

// Free blocks, by power of two. A thread that finds the lock taken does not wait, but allocates from the system. In a
// child process that was forked while the lock was taken, the lock stays taken.
struct FreeBlocks {
    std::atomic_flag is_locked = ATOMIC_FLAG_INIT;
    std::array<std::vector<void*>, 64> blocks;
    std::size_t bytes = 0;
    FreeBlocks() {
        for (auto& class_blocks : blocks) class_blocks.reserve(MAX_KEPT_BLOCKS);
    }
};

FreeBlocks& get_free_blocks() {
    static FreeBlocks* const instance = new FreeBlocks;  // outlives every buffer
    return *instance;
}

}  // namespace

void* allocate_scratch(std::size_t bytes) {
    void* block = nullptr;
    std::size_t size = bytes;
    if (bytes > MIN_KEPT_BYTES) {
        const u32 c = size_class(bytes);
        size = MIN_KEPT_BYTES << c;
        FreeBlocks& pool = get_free_blocks();
        if (!pool.is_locked.test_and_set(std::memory_order_acquire)) {
            if (!pool.blocks[c].empty()) {
                block = pool.blocks[c].back();
                pool.blocks[c].pop_back();
                pool.bytes -= size;
            }
            pool.is_locked.clear(std::memory_order_release);
        }
    }
    if (!block) {
        const bool huge = size >= 2 * HUGE_PAGE;
        block = std::aligned_alloc(huge ? HUGE_PAGE : 64, (size + 63) / 64 * 64);
        if (block && huge) madvise(block, size, MADV_HUGEPAGE);
    }
    if (!block) throw std::bad_alloc();
    return block;
}

void free_scratch(void* block, std::size_t bytes) {
    if (bytes > MIN_KEPT_BYTES) {
        const u32 c = size_class(bytes);
        FreeBlocks& pool = get_free_blocks();
        if (!pool.is_locked.test_and_set(std::memory_order_acquire)) {
            if (pool.bytes + (MIN_KEPT_BYTES << c) <= MAX_KEPT_BYTES && pool.blocks[c].size() < MAX_KEPT_BLOCKS) {
                pool.blocks[c].push_back(block);
                pool.bytes += MIN_KEPT_BYTES << c;
                block = nullptr;
            }
            pool.is_locked.clear(std::memory_order_release);
        }
    }
    std::free(block);
}

}  // namespace tierbed
