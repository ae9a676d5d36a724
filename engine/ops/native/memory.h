// Scratch memory for batches, and pages for rows and indexes. Large blocks use huge pages, since access is random.
#pragma once
#include <algorithm>
#include <cstddef>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include <sys/mman.h>

#include "ops/kernels/portable.h"

namespace tierbed {

constexpr std::size_t HUGE_PAGE = std::size_t{2} << 20;

// Allocate and free uninitialised scratch memory, aligned for vector instructions. Large blocks are kept for the next
// batch, because new blocks are slow: the system clears each new page.
void* allocate_scratch(std::size_t bytes);
void free_scratch(void* block, std::size_t bytes);

// An array whose elements are not initialised.
template <class T>
class Buffer {
public:
    Buffer() = default;
    explicit Buffer(std::size_t size)
        : data_(static_cast<T*>(allocate_scratch((size + 1) * sizeof(T)))), size_(size) {}  // data() is never null
    ~Buffer() {
        if (data_) free_scratch(data_, (size_ + 1) * sizeof(T));
    }
    Buffer(Buffer&& other) noexcept { *this = std::move(other); }
    Buffer& operator=(Buffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }

    T* data() { return data_; }
    const T* data() const { return data_; }
    T& operator[](std::size_t i) { return data_[i]; }
    const T& operator[](std::size_t i) const { return data_[i]; }
    std::size_t size() const { return size_; }

private:
    T* data_ = nullptr;
    std::size_t size_ = 0;
};

// Zeroed pages; huge pages for large sizes. may_be_huge: false for sparse data, which would leave most pages unused.
class Pages {
public:
    Pages() = default;
    explicit Pages(std::size_t bytes, bool may_be_huge = true) : size_(bytes) {
        const bool huge = may_be_huge && bytes >= 2 * HUGE_PAGE;
        const std::size_t mapped_bytes = bytes + (huge ? HUGE_PAGE : 0);
        void* const base = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (base == MAP_FAILED) throw std::bad_alloc();
        memory_ = {base, Unmap{mapped_bytes}};
        start_ = reinterpret_cast<u64>(base);
        if (huge) {
            start_ = (start_ + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
            madvise(reinterpret_cast<void*>(start_), size_, MADV_HUGEPAGE);
        }
    }

    u64 start() const { return start_; }
    std::size_t size() const { return size_; }

private:
    struct Unmap {
        std::size_t bytes;
        void operator()(void* memory) const { munmap(memory, bytes); }
    };

    std::unique_ptr<void, Unmap> memory_;
    std::size_t size_ = 0;
    u64 start_ = 0;
};

// Allocates from growing chunks that are freed together. Thread-safe.
class Arena {
public:
    u64 allocate(std::size_t bytes) {
        constexpr std::size_t page = 4096, max_chunk = std::size_t{64} << 20;
        std::lock_guard lock(mutex_);
        bytes = (bytes + 63) / 64 * 64;
        if (chunks_.empty() || used_bytes_ + bytes > chunks_.back().size()) {
            const std::size_t size = std::max(bytes, std::min(max_chunk, total_bytes_));
            chunks_.emplace_back((size + page - 1) / page * page);
            total_bytes_ += chunks_.back().size();
            used_bytes_ = 0;
        }
        const u64 start = chunks_.back().start() + used_bytes_;
        used_bytes_ += bytes;
        return start;
    }
    std::size_t bytes() const { return total_bytes_; }

private:
    std::mutex mutex_;
    std::vector<Pages> chunks_;
    std::size_t used_bytes_ = 0, total_bytes_ = 0;
};

}  // namespace tierbed
