// Row files: encoded rows, directories, and mapped files.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "row_file_layout.h"

namespace tierbed::serving {

// The last 4096 bytes of a file.
struct Trailer {
    char magic[8];
    u32 format, encoding, dim, table, is_delta, body_checksum;
    u64 num_records, num_deleted, num_root_lines, num_lines;
    u8 unused[4028];
    u32 checksum;  // of the bytes before
};
static_assert(sizeof(Trailer) == 4096);

// Returns the CRC-32 with zlib's polynomial.
u32 compute_crc32(const void* bytes, std::size_t size);

// An open file. The memory is mapped until the last reference is gone, and other processes share its pages.
class RowFile {
public:
    // Throws std::runtime_error if the file cannot be read, or is no intact row file.
    explicit RowFile(const std::string& path);

    Encoding encoding() const { return static_cast<Encoding>(trailer.encoding); }

    const std::string path;
    Trailer trailer;
    FileView view;

private:
    std::shared_ptr<void> memory_;
};

// Encodes values [n, dim] to out [n, row bytes]; all encodings but float32 round to nearest even. Returns the first row
// with a value that is not finite or overflows the encoding, or n.
std::size_t encode_rows(const float* values, std::size_t n, u32 dim, Encoding encoding, u8* out);

// Makes the directory of sorted records piece by piece, since it may be larger than the memory.
class DirectoryBuilder {
public:
    DirectoryBuilder(const u8* records, u64 num_records, u32 stride);

    // Returns up to `max_lines` lines; fewer only at the end.
    std::vector<DirectoryLine> next(std::size_t max_lines);
    u64 num_root_lines() const { return ranges_.front().range.num_lines; }

private:
    struct Part {  // the records [begin, end) of a range
        HashRange range;
        u64 begin, end;
    };
    DirectoryLine make_line();

    const u8* records_;
    u32 stride_;
    std::vector<Part> ranges_;  // in the order of their lines
    std::size_t range_ = 0;     // the range of the next line
    u32 line_ = 0;              // the next line in the range
    u64 num_lines_;             // of all ranges
};

}  // namespace tierbed::serving
