// The layout of row files, and the search for a hash. docs/serving.md describes both.
//
// A file may be damaged or hostile. Every number that is read from it here is checked before it becomes an address.
#pragma once
#include "ops/kernels/hash.h"
#include "ops/kernels/portable.h"

namespace tierbed::serving {

enum class Encoding : u32 { float32 = 0, float16 = 1, bfloat16 = 2, int8 = 3 };
constexpr u32 ENCODINGS = 4;
constexpr u32 MAX_DIM = 1u << 16;

// Returns the size of an encoded row: a multiple of 4.
constexpr u64 count_row_bytes(Encoding encoding, u32 dim) {
    const u64 bytes = encoding == Encoding::float32 ? u64{dim} * 4
                      : encoding == Encoding::int8  ? dim + 4
                                                    : u64{dim} * 2;
    return (bytes + 3) / 4 * 4;
}

constexpr u32 LINE_RECORDS = 29;
constexpr u16 CROWDED = 0xFFFF;
constexpr u32 MAX_DEPTH = 64;  // each range has less than half the width of the range above it

// Divides hashes evenly into lines. `shift` moves the highest differing bit of the range's hashes to the top.
struct HashRange {
    u64 low;
    u32 shift, num_lines;
    u64 first_line;
};

// A line of the directory: the fingerprints of up to LINE_RECORDS records in a row. Words 0 and 1 hold the number of
// the first record, word 2 the number of records. A crowded line holds a HashRange instead, from word 4 on.
struct alignas(64) DirectoryLine {
    u16 words[32];

    TIERBED_FN u64 first() const { return words[0] | static_cast<u32>(words[1]) << 16; }
    TIERBED_FN u32 count() const { return words[2]; }
    TIERBED_FN bool is_crowded() const { return words[2] == CROWDED; }
    TIERBED_FN const u16* fingerprints() const { return words + 3; }
    TIERBED_FN HashRange range() const {
        HashRange range;
        __builtin_memcpy(&range, words + 4, sizeof range);
        return range;
    }
};

struct LinePosition {
    const DirectoryLine* line;  // null if no line can contain the hash
    u16 fingerprint;
};

TIERBED_FN u64 load_hash(const u8* record) {
    u64 hash;
    __builtin_memcpy(&hash, record, sizeof hash);
    return hash;
}

// Scales an offset in a range. The upper half of the result is the line, the next 16 bits are the fingerprint.
TIERBED_FN unsigned __int128 scale(u64 offset, u64 num_lines) {
    return static_cast<unsigned __int128>(offset) * num_lines;
}

// The sections of a mapped file.
struct FileView {
    const DirectoryLine* lines;
    const u8* records;
    u64 num_root_lines, num_lines, num_records;
    u32 stride, row_offset;  // a record: its hash, in deltas 4 bytes that are not 0 if the row is deleted, its row

    TIERBED_FN LinePosition find_line(u64 hash) const { return find_line_in(0, scale(hash, num_root_lines)); }
    TIERBED_FN LinePosition find_line_in(u64 first_line, unsigned __int128 position) const {
        return {lines + first_line + static_cast<u64>(position >> 64),
                static_cast<u16>(static_cast<u64>(position) >> 48)};
    }
    // Returns the line below a crowded line.
    TIERBED_FN LinePosition find_line_below(const DirectoryLine& crowded, u64 hash) const {
        const HashRange range = crowded.range();
        const u64 offset = hash - range.low;
        if (hash < range.low || range.shift >= 64 || (range.shift > 0 && offset >> (64 - range.shift)) ||
            range.num_lines == 0 || range.first_line > num_lines || range.num_lines > num_lines - range.first_line)
            return {nullptr, 0};
        return find_line_in(range.first_line, scale(offset << range.shift, range.num_lines));
    }
    // Returns the first record with this fingerprint, or null. `find_line` computes line and fingerprint from a hash.
    TIERBED_FN const u8* find_candidate(const DirectoryLine& line, u16 fingerprint) const {
        u16 below = 0;  // counted in all words, because that is faster than a loop over 29
        for (u32 i = 0; i < 32; ++i) below = static_cast<u16>(below + (line.words[i] < fingerprint));
        for (u32 i = 0; i < 3; ++i) below = static_cast<u16>(below - (line.words[i] < fingerprint));
        const u64 number = line.first() + below;
        const bool is_match = below < LINE_RECORDS && below < line.count() && number < num_records;
        if (!is_match || line.fingerprints()[below] != fingerprint) return nullptr;
        return records + number * stride;
    }
    // Returns the record with this hash, or null.
    const u8* find(u64 hash) const {
        LinePosition position = find_line(hash);
        for (u32 depth = 0; position.line && position.line->is_crowded(); ++depth)
            position = depth < MAX_DEPTH ? find_line_below(*position.line, hash) : LinePosition{nullptr, 0};
        if (!position.line) return nullptr;
        const u8* record = find_candidate(*position.line, position.fingerprint);
        const u8* const end = records + num_records * stride;
        for (; record && record != end; record += stride) {  // several records may share a fingerprint
            if (load_hash(record) >= hash) return load_hash(record) == hash ? record : nullptr;
        }
        return nullptr;
    }
    TIERBED_FN bool is_deleted(const u8* record) const {
        u32 mark = 0;
        if (row_offset > 8) __builtin_memcpy(&mark, record + 8, sizeof mark);
        return mark != 0;
    }
};

struct TableView {
    FileView base, delta;  // a table without delta: `delta.num_records` is 0
};

}  // namespace tierbed::serving
