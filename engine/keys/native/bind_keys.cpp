// The binding of what makes ids of strings.
#include <atomic>

#include "ops/native/bind.h"
#include "workers/native/thread_pool.h"
#include "xxh64.h"

namespace tierbed {
namespace {

constexpr std::size_t STRINGS = 4096;  // a task
constexpr u32 LAST_OF_UNICODE = 0x10FFFF;

// Appends the UTF-8 bytes of a code point to out, at most 4; returns how many, 0 for what is no code point.
u32 put_utf8(u32 point, u8* out) {
    if (point < 0x80) {
        out[0] = static_cast<u8>(point);
        return 1;
    }
    if (point > LAST_OF_UNICODE || (point >= 0xD800 && point < 0xE000)) return 0;
    const u32 more = point < 0x800 ? 1 : point < 0x10000 ? 2 : 3;
    out[0] = static_cast<u8>((0xFF00u >> (more + 1) & 0xFFu) | point >> 6 * more);
    for (u32 i = 1; i <= more; ++i) out[i] = static_cast<u8>(0x80u | (point >> 6 * (more - i) & 0x3Fu));
    return more + 1;
}

void hash_parts(InVector<u8> bytes, InVector<i64> offsets, u64 seed, OutVector<i64> out) {
    const std::size_t n = out.size();
    require(offsets.size() == n + 1, "offsets must be [n + 1]");
    const i64* const ends = offsets.data();
    require(ends[0] >= 0 && static_cast<std::size_t>(ends[n]) <= bytes.size(), "offsets reach beyond the bytes");
    for (std::size_t i = 0; i < n; ++i) require(ends[i] <= ends[i + 1], "offsets must ascend");
    nb::gil_scoped_release unlocked;
    parallel_ranges(n, STRINGS, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i)
            out.data()[i] = static_cast<i64>(xxh64(bytes.data() + ends[i], static_cast<u64>(ends[i + 1] - ends[i]), seed));
    });
}

// Returns the first of the strings that is no Unicode, `n` for none.
std::size_t hash_rows(InVector<u8> bytes, std::size_t width, bool is_text, u64 seed, OutVector<i64> out) {
    const std::size_t n = out.size();
    require(bytes.size() == n * width, "bytes must be [n * width]");
    require(!is_text || width % 4 == 0, "text has 4 bytes a character");
    std::atomic<std::size_t> wrong{n};
    nb::gil_scoped_release unlocked;
    parallel_ranges(n, STRINGS, [&](std::size_t begin, std::size_t end) {
        std::vector<u8> text(is_text ? width : 0);
        for (std::size_t i = begin; i < end; ++i) {
            const u8* row = bytes.data() + i * width;
            u64 length = width;
            if (is_text) {
                length = 0;
                std::size_t points = width / 4;
                while (points > 0 && word_at<u32>(row + 4 * (points - 1)) == 0) --points;
                for (std::size_t at = 0; at < points; ++at) {
                    const u32 put = put_utf8(static_cast<u32>(word_at<u32>(row + 4 * at)), text.data() + length);
                    length += put;
                    if (put == 0) {
                        std::size_t first = wrong;
                        while (i < first && !wrong.compare_exchange_weak(first, i)) {
                        }
                        break;
                    }
                }
                row = text.data();
            } else {
                while (length > 0 && row[length - 1] == 0) --length;
            }
            out.data()[i] = static_cast<i64>(xxh64(row, length, seed));
        }
    });
    return wrong;
}

}  // namespace

void bind_keys(nb::module_& m) {
    m.def("hash_parts", hash_parts);
    m.def("hash_rows", hash_rows);
}

}  // namespace tierbed
