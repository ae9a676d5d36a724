#include "row_file.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace tierbed::serving {
namespace {

constexpr char MAGIC[] = "TBROWS\r\n";
constexpr u32 FORMAT = 1;
constexpr u64 LINE_LOAD = 16, CHILD_LINE_LOAD = 8;  // records a line, on average
constexpr u64 MAX_RECORDS = 0xFFFFFFFF;
#ifndef MADV_POPULATE_READ
constexpr int MADV_POPULATE_READ = 22;  // since Linux 5.14; older kernels return an error, which is ignored
#endif

constexpr std::array<u32, 256> CRC_TABLE = [] {
    std::array<u32, 256> table{};
    for (u32 i = 0; i < 256; ++i) {
        table[i] = i;
        for (int bit = 0; bit < 8; ++bit) table[i] = table[i] >> 1 ^ (table[i] & 1 ? 0xEDB88320u : 0);
    }
    return table;
}();

u64 align(u64 bytes) { return (bytes + sizeof(DirectoryLine) - 1) / sizeof(DirectoryLine) * sizeof(DirectoryLine); }

}  // namespace

u32 compute_crc32(const void* bytes, std::size_t size) {
    u32 checksum = ~0u;
    for (std::size_t i = 0; i < size; ++i)
        checksum = CRC_TABLE[(checksum ^ static_cast<const u8*>(bytes)[i]) & 0xFF] ^ checksum >> 8;
    return ~checksum;
}

RowFile::RowFile(const std::string& file_path) : path(file_path) {
    const auto require = [&](bool condition, const char* problem) {
        if (!condition) throw std::runtime_error(path + ": " + problem);
    };
    const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0) throw std::runtime_error("cannot open " + path + ": " + std::strerror(errno));
    struct stat status = {};
    const bool is_file = fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode);
    const std::size_t size = is_file ? static_cast<std::size_t>(status.st_size) : 0;
    void* memory = size >= sizeof(Trailer) ? mmap(nullptr, size, PROT_READ, MAP_SHARED, descriptor, 0) : MAP_FAILED;
    const std::string problem = size < sizeof(Trailer) ? "it is no row file, or it was truncated" : std::strerror(errno);
    close(descriptor);
    if (memory == MAP_FAILED) throw std::runtime_error("cannot map " + path + ": " + problem);
    memory_ = std::shared_ptr<void>(memory, [size](void* mapped) { munmap(mapped, size); });
    u8* const bytes = static_cast<u8*>(memory);
    std::memcpy(&trailer, bytes + size - sizeof(Trailer), sizeof(Trailer));
    require(std::memcmp(trailer.magic, MAGIC, sizeof trailer.magic) == 0, "it is no row file, or it was truncated");
    require(compute_crc32(&trailer, offsetof(Trailer, checksum)) == trailer.checksum,
            "it is damaged: the checksum of its trailer does not match");
    require(trailer.format == FORMAT, "its format is of a later tierbed: upgrade tierbed");
    require(trailer.encoding < ENCODINGS && trailer.dim > 0 && trailer.dim <= MAX_DIM && trailer.is_delta <= 1,
            "its trailer has invalid fields");
    require(trailer.num_records <= MAX_RECORDS && trailer.num_root_lines > 0 &&
                trailer.num_root_lines <= trailer.num_lines && trailer.num_lines <= MAX_RECORDS,
            "its trailer has invalid counts");
    const u32 row_offset = trailer.is_delta ? 12 : 8;
    const u32 stride = row_offset + static_cast<u32>(count_row_bytes(encoding(), trailer.dim));
    const u64 directory = align(trailer.num_records * stride);
    require(directory + trailer.num_lines * sizeof(DirectoryLine) + sizeof(Trailer) == size,
            "its size does not match its trailer");
    view = {reinterpret_cast<const DirectoryLine*>(bytes + directory),
            bytes,
            trailer.num_root_lines,
            trailer.num_lines,
            trailer.num_records,
            stride,
            row_offset};
    // Lookups should not wait for page faults in the directory, nor in a delta, which is new after each refresh.
    madvise(memory, size, MADV_RANDOM);
    const u64 begin = trailer.is_delta ? 0 : directory / 4096 * 4096;
    madvise(bytes + begin, size - begin, MADV_POPULATE_READ);
}

DirectoryBuilder::DirectoryBuilder(const u8* records, u64 num_records, u32 stride)
    : records_(records), stride_(stride) {
    num_lines_ = num_records < LINE_LOAD ? 1 : (num_records + LINE_LOAD - 1) / LINE_LOAD;
    ranges_.push_back({{0, 0, static_cast<u32>(num_lines_), 0}, 0, num_records});
}

std::vector<DirectoryLine> DirectoryBuilder::next(std::size_t max_lines) {
    std::vector<DirectoryLine> lines;
    while (lines.size() < max_lines && range_ < ranges_.size()) {
        lines.push_back(make_line());
        if (++line_ < ranges_[range_].range.num_lines) continue;
        line_ = 0;
        ++range_;
    }
    return lines;
}

DirectoryLine DirectoryBuilder::make_line() {
    Part& part = ranges_[range_];
    const HashRange range = part.range;
    const u64 first = part.begin;
    const auto hash_of = [&](u64 number) { return load_hash(records_ + number * stride_); };
    const auto locate = [&](u64 number) {
        return scale((hash_of(number) - range.low) << range.shift, range.num_lines);
    };
    DirectoryLine line;
    std::memset(&line, 0xFF, sizeof line);
    line.words[0] = static_cast<u16>(first);
    line.words[1] = static_cast<u16>(first >> 16);
    u64& next = part.begin;
    for (; next < part.end && static_cast<u64>(locate(next) >> 64) == line_; ++next)
        if (next - first < LINE_RECORDS)
            line.words[3 + next - first] = static_cast<u16>(static_cast<u64>(locate(next)) >> 48);
    const u64 count = next - first, end = next;
    line.words[2] = count <= LINE_RECORDS ? static_cast<u16>(count) : CROWDED;
    if (count > LINE_RECORDS) {
        const u64 low = hash_of(first), width = hash_of(end - 1) - low;
        const HashRange below{low, static_cast<u32>(__builtin_clzll(width)),
                              static_cast<u32>((count + CHILD_LINE_LOAD - 1) / CHILD_LINE_LOAD), num_lines_};
        std::memset(line.words + 3, 0, sizeof line - 6);
        std::memcpy(line.words + 4, &below, sizeof below);
        num_lines_ += below.num_lines;
        ranges_.push_back({below, first, end});
    }
    return line;
}

}  // namespace tierbed::serving
