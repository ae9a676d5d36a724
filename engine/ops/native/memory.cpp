#include "memory.h"

#include <array>
#include <atomic>
#include <cstdlib>

namespace tierbed {
namespace {

constexpr std::size_t SMALLEST = std::size_t{64} << 10;
#ifdef __SANITIZE_ADDRESS__
constexpr std::size_t MAX_KEPT = 0;  // a kept block would hide a use after free
#else
constexpr std::size_t MAX_KEPT = std::size_t{512} << 20;
#endif
constexpr std::size_t BLOCKS = 32;  // of a class

u32 size_class(std::size_t bytes) { return 64 - static_cast<u32>(__builtin_clzll((bytes - 1) / SMALLEST | 1)); }

// Free blocks by powers of two. A thread that cannot lock it at once does without it. No thread waits, so a fork cannot
// leave it locked.
struct Kept {
    std::atomic_flag taken = ATOMIC_FLAG_INIT;
    std::array<std::vector<void*>, 64> blocks;
    std::size_t bytes = 0;
    Kept() {
        for (auto& of_class : blocks) of_class.reserve(BLOCKS);
    }
};

Kept& kept() {
    static Kept* const one = new Kept;  // outlives every buffer
    return *one;
}

}  // namespace

void* take_scratch(std::size_t bytes) {
    void* block = nullptr;
    std::size_t size = bytes;
    if (bytes > SMALLEST) {
        const u32 c = size_class(bytes);
        size = SMALLEST << c;
        Kept& all = kept();
        if (!all.taken.test_and_set(std::memory_order_acquire)) {
            if (!all.blocks[c].empty()) {
                block = all.blocks[c].back();
                all.blocks[c].pop_back();
                all.bytes -= size;
            }
            all.taken.clear(std::memory_order_release);
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

void give_scratch(void* block, std::size_t bytes) {
    if (bytes > SMALLEST) {
        const u32 c = size_class(bytes);
        Kept& all = kept();
        if (!all.taken.test_and_set(std::memory_order_acquire)) {
            if (all.bytes + (SMALLEST << c) <= MAX_KEPT && all.blocks[c].size() < BLOCKS) {
                all.blocks[c].push_back(block);
                all.bytes += SMALLEST << c;
                block = nullptr;
            }
            all.taken.clear(std::memory_order_release);
        }
    }
    std::free(block);
}

}  // namespace tierbed
