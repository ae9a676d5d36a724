// The files that a database consists of at one moment.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "lines/kernels/portable.h"

namespace tierbed {

struct LiveFile {
    std::string name;                    // shard-N/<file>
    u64 bytes;                           // from its beginning: the live file may grow
    std::optional<u32> crc32c;           // as RocksDB kept it when it wrote the file
    std::optional<std::string> content;  // what it is to hold where the live file may be replaced
};

}  // namespace tierbed
