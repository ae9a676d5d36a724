// Macros and functions with which the same kernel body compiles for CPU and GPU.
//
// A body processes one item (a row, a key, a set) with a *tile*: on a GPU a warp or part of it, on a CPU one thread.
// A tile's lanes share inner loops: each lane starts at `tile.lane` and advances by `tile.size`. Bodies allocate
// nothing. They call one library function, sqrt. So all builds run the same IEEE operations, if FP contraction is off.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define TIERBED_GPU
#endif

#if defined(TIERBED_GPU)
#define TIERBED_FN __device__ __forceinline__
#define TIERBED_INLINE
#else
#define TIERBED_FN inline __attribute__((always_inline))
#define TIERBED_INLINE __attribute__((always_inline))  // put this after a lambda's parameters
#endif
// Put this before a loop to promise the compiler that iterations access different floats, so it may vectorise.
#if defined(TIERBED_GPU)
#define TIERBED_NO_OVERLAP
#elif defined(__clang__)
#define TIERBED_NO_OVERLAP _Pragma("clang loop vectorize(assume_safety)")
#else
#define TIERBED_NO_OVERLAP _Pragma("GCC ivdep")
#endif

#if defined(__CUDACC_RTC__)
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef int int32_t;
typedef unsigned long long uint64_t;
typedef long long int64_t;
#else
#include <cstdint>
#endif

namespace tierbed {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i32 = int32_t;
using i64 = int64_t;

struct Tile {
    u32 lane;
    u32 size;
};

#if defined(TIERBED_GPU)

// How many adjacent columns a lane loads together: up to 16 bytes, as long as no lane in a warp is idle.
#if defined(TIERBED_DIM) && TIERBED_DIM >= 128 && TIERBED_DIM % 4 == 0
constexpr u32 VEC = 4;
#elif defined(TIERBED_DIM) && TIERBED_DIM >= 64 && TIERBED_DIM % 2 == 0
constexpr u32 VEC = 2;
#else
constexpr u32 VEC = 1;
#endif

// VEC numbers that a lane reads or writes with one instruction.
template <class T>
struct alignas(sizeof(T) * VEC) Vector {
    T x[VEC];
};
template <class T>
TIERBED_FN Vector<T> load_vector(const T* from) {
    return *reinterpret_cast<const Vector<T>*>(from);
}

TIERBED_FN float* hide_origin(float* address) { return address; }
TIERBED_FN void prefetch(const void*) {}
TIERBED_FN void prefetch_bytes(u64, u32) {}
// On a GPU, n is always VEC.
TIERBED_FN void load_floats(float* registers, const float* from, u32) {
    const Vector<float> numbers = load_vector(from);
    for (u32 j = 0; j < VEC; ++j) registers[j] = numbers.x[j];
}
TIERBED_FN const float* load_block(float* registers, const float* from, u32 n) {
    load_floats(registers, from, n);
    return registers;
}
TIERBED_FN void store_floats(float* to, const float* registers, u32) {
    Vector<float> numbers;
    for (u32 j = 0; j < VEC; ++j) numbers.x[j] = registers[j];
    *reinterpret_cast<Vector<float>*>(to) = numbers;
}
TIERBED_FN u32 multiply_high(u32 a, u32 b) { return __umulhi(a, b); }
// A tile is a warp, or an aligned part of a warp. The tile's size is a power of two.
TIERBED_FN u32 first_lane(Tile tile) { return (threadIdx.x & 31) - tile.lane; }
TIERBED_FN u32 lane_mask(Tile tile) { return 0xFFFFFFFFu >> (32 - tile.size) << first_lane(tile); }
TIERBED_FN u32 ballot(Tile tile, bool predicate) {
    return __ballot_sync(lane_mask(tile), predicate) >> first_lane(tile);
}
TIERBED_FN u32 lowest_bit(u32 mask) { return __ffs(mask) - 1; }
TIERBED_FN u32 as_bits(float x) { return __float_as_uint(x); }
TIERBED_FN float as_float(u32 bits) { return __uint_as_float(bits); }
TIERBED_FN u64 as_bits(double x) { return static_cast<u64>(__double_as_longlong(x)); }
TIERBED_FN double as_double(u64 bits) { return __longlong_as_double(static_cast<long long>(bits)); }
TIERBED_FN float square_root(float x) { return __fsqrt_rn(x); }
TIERBED_FN double square_root(double x) { return __dsqrt_rn(x); }
TIERBED_FN void synchronise(Tile tile) { __syncwarp(lane_mask(tile)); }
// Returns the value of x in another lane of the tile.
template <class T>
TIERBED_FN T shuffle(Tile tile, T x, u32 lane) {
    return __shfl_sync(lane_mask(tile), x, static_cast<int>(first_lane(tile) + lane));
}
// Returns the value of x in another lane of the warp.
TIERBED_FN float shuffle(float x, u32 lane) { return __shfl_sync(0xFFFFFFFFu, x, static_cast<int>(lane)); }
TIERBED_FN float shuffle_down(float x, u32 lanes) { return __shfl_down_sync(0xFFFFFFFFu, x, lanes); }

#else

// The compiler keeps blocks of VEC floats in vector registers.
constexpr u32 VEC = 16;

// Hides an address's origin from the compiler. Otherwise each iteration would set up the stack array anew.
TIERBED_FN float* hide_origin(float* address) {
    asm("" : "+r"(address));
    return address;
}
TIERBED_FN void prefetch(const void* address) { __builtin_prefetch(address); }
TIERBED_FN void load_floats(float* registers, const float* from, u32 n) { __builtin_memcpy(registers, from, n * 4); }
// Leaves the floats in memory, because a CPU thread has too few registers.
TIERBED_FN const float* load_block(float*, const float* from, u32) { return from; }
TIERBED_FN void store_floats(float* to, const float* registers, u32 n) { __builtin_memcpy(to, registers, n * 4); }
// Prefetches every cache line in [address, address + bytes).
TIERBED_FN void prefetch_bytes(u64 address, u32 bytes) {
    for (u64 line = address / 64 * 64; line < address + bytes; line += 64)
        prefetch(reinterpret_cast<const void*>(line));
}
// Prefetches cache lines that will be written.
TIERBED_FN void prefetch_to_write(u64 address, u32 bytes) {
    for (u64 line = address / 64 * 64; line < address + bytes; line += 64)
        __builtin_prefetch(reinterpret_cast<const void*>(line), 1);
}
TIERBED_FN u32 multiply_high(u32 a, u32 b) { return static_cast<u32>((static_cast<u64>(a) * b) >> 32); }
TIERBED_FN u32 ballot(Tile, bool predicate) { return predicate ? 1u : 0u; }
TIERBED_FN u32 lowest_bit(u32 mask) { return static_cast<u32>(__builtin_ctz(mask)); }
TIERBED_FN u32 as_bits(float x) { return __builtin_bit_cast(u32, x); }
TIERBED_FN float as_float(u32 bits) { return __builtin_bit_cast(float, bits); }
TIERBED_FN u64 as_bits(double x) { return __builtin_bit_cast(u64, x); }
TIERBED_FN double as_double(u64 bits) { return __builtin_bit_cast(double, bits); }
TIERBED_FN float square_root(float x) { return __builtin_sqrtf(x); }
TIERBED_FN double square_root(double x) { return __builtin_sqrt(x); }
TIERBED_FN void synchronise(Tile) {}

#endif

// Calls body(begin, n) for the tile's blocks, n <= VEC columns each.
template <class Body>
TIERBED_FN void for_blocks(Tile tile, u32 dim, const Body& body) {
    u32 begin = tile.lane * VEC;
    for (; begin + VEC <= dim; begin += tile.size * VEC) body(begin, VEC);
#ifndef TIERBED_GPU  // on a GPU, VEC divides dim
    if (begin < dim) body(begin, dim - begin);
#endif
}

}  // namespace tierbed
