#include "row_file.h"

#include <cmath>
#include <cstring>

#include "ops/kernels/float_types.h"

namespace tierbed::serving {
namespace {

constexpr u16 FLOAT16_INFINITY = 0x7C00, FLOAT16_ONE = 0x3C00;

template <class Type>
bool encode_floats(const float* values, u32 dim, u8* out) {
    bool is_finite = true;
    for (u32 j = 0; j < dim; ++j) {
        const typename Type::Stored number = Type::store(values[j]);
        is_finite &= std::isfinite(Type::load(number));
        std::memcpy(out + j * sizeof number, &number, sizeof number);
    }
    return is_finite;
}

// The arithmetic of FBGEMM's FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf with 8 bits, in the layout of its inference
// tables: scale and offset as float16, then the numbers.
bool encode_int8(const float* values, u32 dim, u8* out) {
    float low = values[0], high = values[0];
    bool is_finite = true;
    for (u32 j = 0; j < dim; ++j) {
        is_finite &= std::isfinite(values[j]);
        low = values[j] < low ? values[j] : low;
        high = values[j] > high ? values[j] : high;
    }
    u16 header[2] = {0, Float16::store(low)};
    const float offset = Float16::load(header[1]), range = high - offset;
    header[0] = Float16::store(range == 0.0f ? 1.0f : range / 255.0f);
    if (!is_finite || (header[0] & 0x7FFF) >= FLOAT16_INFINITY || (header[1] & 0x7FFF) >= FLOAT16_INFINITY)
        return false;
    if ((header[0] & 0x7FFF) == 0) header[0] = FLOAT16_ONE;  // the range is below float16's smallest number
    const float inverse = 1.0f / Float16::load(header[0]);
    std::memcpy(out, header, sizeof header);
    for (u32 j = 0; j < dim; ++j) {
        float number = (values[j] - offset) * inverse;
        number = number < 0.0f ? 0.0f : number > 255.0f ? 255.0f : number;
        out[4 + j] = static_cast<u8>(static_cast<u32>((number + 8388608.0f) - 8388608.0f));  // rounds to nearest even
    }
    return true;
}

}  // namespace

std::size_t encode_rows(const float* values, std::size_t n, u32 dim, Encoding encoding, u8* out) {
    const u64 row_bytes = count_row_bytes(encoding, dim);
    for (std::size_t i = 0; i < n; ++i, values += dim, out += row_bytes) {
        std::memset(out + row_bytes - 4, 0, 4);  // padding
        const bool is_valid = encoding == Encoding::int8       ? encode_int8(values, dim, out)
                              : encoding == Encoding::float16  ? encode_floats<Float16>(values, dim, out)
                              : encoding == Encoding::bfloat16 ? encode_floats<BFloat16>(values, dim, out)
                                                               : encode_floats<Float32>(values, dim, out);
        if (!is_valid) return i;
    }
    return n;
}

}  // namespace tierbed::serving
