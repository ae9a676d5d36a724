// Encodes rows for row files. Every encoding but float32 rounds to nearest even.
#pragma once
#include "row_file_layout.h"

namespace tierbed::serving {

// Encodes values [n, dim] to out [n, row bytes]. Returns the first row with a value that is not finite or overflows the
// encoding, or n.
std::size_t encode_rows(const float* values, std::size_t n, u32 dim, Encoding encoding, u8* out);

}  // namespace tierbed::serving
