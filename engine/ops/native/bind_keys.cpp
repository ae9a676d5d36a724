// Python binding of `hash_keys`. The hash is Y. Collet's XXH64, implemented here from its specification
// (https://github.com/Cyan4973/xxHash, version 0.8).
#include <atomic>

#include "bind.h"
#include "ops/kernels/portable.h"
#include "thread_pool.h"

namespace tierbed {

constexpr u64 XXH_1 = 0x9E3779B185EBCA87ull, XXH_2 = 0xC2B2AE3D27D4EB4Full, XXH_3 = 0x165667B19E3779F9ull,
              XXH_4 = 0x85EBCA77C2B2AE63ull, XXH_5 = 0x27D4EB2F165667C5ull;

inline u64 rotate(u64 x, u32 bits) { return x << bits | x >> (64 - bits); }

// Reads a little-endian word; every processor that the core is built for is little-endian.
template <class Word>
inline u64 read_word(const u8* bytes) {
    Word word;
    __builtin_memcpy(&word, bytes, sizeof word);
    return word;
}

inline u64 xxh_round(u64 sum, u64 word) { return rotate(sum + word * XXH_2, 31) * XXH_1; }

inline u64 xxh64(const u8* bytes, u64 length, u64 seed) {
    const u8* const end = bytes + length;
    u64 hash = seed + XXH_5;
    if (length >= 32) {
        u64 sums[4] = {seed + XXH_1 + XXH_2, seed + XXH_2, seed, seed - XXH_1};
        for (; end - bytes >= 32; bytes += 32)
            for (u32 i = 0; i < 4; ++i) sums[i] = xxh_round(sums[i], read_word<u64>(bytes + 8 * i));
        hash = rotate(sums[0], 1) + rotate(sums[1], 7) + rotate(sums[2], 12) + rotate(sums[3], 18);
        for (const u64 sum : sums) hash = (hash ^ xxh_round(0, sum)) * XXH_1 + XXH_4;
    }
    hash += length;
    for (; end - bytes >= 8; bytes += 8) hash = rotate(hash ^ xxh_round(0, read_word<u64>(bytes)), 27) * XXH_1 + XXH_4;
    if (end - bytes >= 4) {
        hash = rotate(hash ^ read_word<u32>(bytes) * XXH_1, 23) * XXH_2 + XXH_3;
        bytes += 4;
    }
    for (; bytes < end; ++bytes) hash = rotate(hash ^ *bytes * XXH_5, 11) * XXH_1;
    hash = (hash ^ hash >> 33) * XXH_2;
    hash = (hash ^ hash >> 29) * XXH_3;
    return hash ^ hash >> 32;
}

namespace {

constexpr std::size_t STRINGS_PER_TASK = 4096;
constexpr u32 MAX_CODE_POINT = 0x10FFFF;

// Writes a code point's UTF-8 bytes, at most 4, to `out`. Returns the number of bytes, or 0 for an invalid code point.
u32 encode_utf8(u32 point, u8* out) {
    if (point < 0x80) {
        out[0] = static_cast<u8>(point);
        return 1;
    }
    if (point > MAX_CODE_POINT || (point >= 0xD800 && point < 0xE000)) return 0;
    const u32 tail = point < 0x800 ? 1 : point < 0x10000 ? 2 : 3;
    out[0] = static_cast<u8>((0xFF00u >> (tail + 1) & 0xFFu) | point >> 6 * tail);
    for (u32 i = 1; i <= tail; ++i) out[i] = static_cast<u8>(0x80u | (point >> 6 * (tail - i) & 0x3Fu));
    return tail + 1;
}

void hash_strings(InVector<u8> bytes, InVector<i64> offsets, u64 seed, OutVector<i64> out) {
    const std::size_t n = out.size();
    require(offsets.size() == n + 1, "offsets must be [n + 1]");
    const i64* const ends = offsets.data();
    require(ends[0] >= 0 && static_cast<std::size_t>(ends[n]) <= bytes.size(), "offsets reach beyond the bytes");
    for (std::size_t i = 0; i < n; ++i) require(ends[i] <= ends[i + 1], "offsets must ascend");
    nb::gil_scoped_release unlocked;
    parallel_ranges(n, STRINGS_PER_TASK, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i)
            out.data()[i] =
                static_cast<i64>(xxh64(bytes.data() + ends[i], static_cast<u64>(ends[i + 1] - ends[i]), seed));
    });
}

// Returns the position of the first string that is not valid Unicode, or `n`.
std::size_t hash_padded_strings(InVector<u8> bytes, std::size_t width, bool is_text, u64 seed, OutVector<i64> out) {
    const std::size_t n = out.size();
    require(bytes.size() == n * width, "bytes must be [n * width]");
    require(!is_text || width % 4 == 0, "text has 4 bytes a character");
    std::atomic<std::size_t> first_invalid{n};
    nb::gil_scoped_release unlocked;
    parallel_ranges(n, STRINGS_PER_TASK, [&](std::size_t begin, std::size_t end) {
        std::vector<u8> text(is_text ? width : 0);
        for (std::size_t i = begin; i < end; ++i) {
            const u8* row = bytes.data() + i * width;
            u64 length = width;
            if (is_text) {
                length = 0;
                std::size_t num_points = width / 4;
                while (num_points > 0 && read_word<u32>(row + 4 * (num_points - 1)) == 0) --num_points;
                for (std::size_t at = 0; at < num_points; ++at) {
                    const u32 count = encode_utf8(static_cast<u32>(read_word<u32>(row + 4 * at)), text.data() + length);
                    length += count;
                    if (count == 0) {
                        std::size_t first = first_invalid;
                        while (i < first && !first_invalid.compare_exchange_weak(first, i)) {
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
    return first_invalid;
}

}  // namespace

void bind_keys(nb::module_& m) {
    m.def("hash_strings", hash_strings);
    m.def("hash_padded_strings", hash_padded_strings);
}

}  // namespace tierbed
