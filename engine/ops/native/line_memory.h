// Memory for lines: on huge pages where it is large, since lines are reached at random.
#pragma once
#include <cstdlib>
#include <memory>
#include <new>

#include <sys/mman.h>

namespace tierbed {

using LineMemory = std::unique_ptr<char, decltype(&std::free)>;

inline LineMemory allocate_lines(std::size_t bytes) {
    constexpr std::size_t huge_page = std::size_t{2} << 20;
    const std::size_t alignment = bytes >= 4 * huge_page ? huge_page : 64;
    const std::size_t size = (bytes + alignment - 1) / alignment * alignment;
    LineMemory memory(static_cast<char*>(std::aligned_alloc(alignment, size)), &std::free);
    if (!memory) throw std::bad_alloc();
    if (alignment == huge_page) madvise(memory.get(), size, MADV_HUGEPAGE);
    return memory;
}

}  // namespace tierbed
