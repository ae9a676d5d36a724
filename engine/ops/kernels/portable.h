// What lets one kernel body compile for a CPU and for a GPU.
//
// A body works on one item (a row, a key, a set) with a *tile*: a warp on a GPU, one thread on a CPU. It strides its
// inner loop by `tile.size` from `tile.lane`; the caller hands each item to exactly one tile. Bodies allocate nothing
// and call no library but sqrt, so that the same sequence of IEEE operations runs everywhere (build with fp contraction
// off).
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define TIERBED_FN __device__ __forceinline__
#else
#define TIERBED_FN inline
#endif

#if defined(__CUDACC_RTC__)
typedef unsigned char uint8_t;
typedef unsigned int uint32_t;
typedef int int32_t;
typedef unsigned long long uint64_t;
typedef long long int64_t;
#else
#include <cmath>
#include <cstdint>
#endif

namespace tierbed {

using u8 = uint8_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i32 = int32_t;

struct Tile {
    u32 lane;
    u32 size;
};

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)

// floats that one lane takes at a time: neighbouring lanes read neighbouring floats
constexpr u32 VEC = 1;

TIERBED_FN void prefetch(const void*) {}
TIERBED_FN u32 multiply_high(u32 a, u32 b) { return __umulhi(a, b); }
TIERBED_FN u32 ballot(Tile, bool predicate) { return __ballot_sync(0xFFFFFFFFu, predicate); }
TIERBED_FN u32 lowest_bit(u32 mask) { return __ffs(mask) - 1; }
TIERBED_FN u64 bits_of(double x) { return static_cast<u64>(__double_as_longlong(x)); }
TIERBED_FN double double_of(u64 bits) { return __longlong_as_double(static_cast<long long>(bits)); }
TIERBED_FN float square_root(float x) { return __fsqrt_rn(x); }
TIERBED_FN double square_root(double x) { return __dsqrt_rn(x); }
TIERBED_FN void synchronise(Tile) { __syncwarp(); }

#else

// a block of floats that the compiler turns into vector registers
constexpr u32 VEC = 16;

TIERBED_FN void prefetch(const void* address) { __builtin_prefetch(address); }
TIERBED_FN u32 multiply_high(u32 a, u32 b) { return static_cast<u32>((static_cast<u64>(a) * b) >> 32); }
TIERBED_FN u32 ballot(Tile, bool predicate) { return predicate ? 1u : 0u; }
TIERBED_FN u32 lowest_bit(u32 mask) { return static_cast<u32>(__builtin_ctz(mask)); }
TIERBED_FN u64 bits_of(double x) {
    u64 bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}
TIERBED_FN double double_of(u64 bits) {
    double x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}
TIERBED_FN float square_root(float x) { return std::sqrt(x); }
TIERBED_FN double square_root(double x) { return std::sqrt(x); }
TIERBED_FN void synchronise(Tile) {}

#endif

}  // namespace tierbed
