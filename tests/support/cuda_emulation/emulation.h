// Enough of CUDA for the kernels of a GPU to run on a CPU: blocks, warps of 32 lanes, collectives, atomics.
//
// A lane runs until it ends or waits in a collective, which completes when every lane of its mask has come. A few warps
// are resident at a time; with a seed, blocks start and lanes run in a random order, and lanes also yield before
// atomics, so that a result that depends on any order shows. A collective that can never complete (a lane of its mask
// has ended, or waits with another mask) is an error. emulation.cpp has what runs the lanes.
//
// Each text of kernels is compiled with all of this: it includes little of the standard library.
#pragma once
#define TIERBED_GPU
#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))

#include <cstdint>
#include <utility>

namespace emulation {

struct Index {
    unsigned x = 0;
};

struct Lane {
    Index grid, block_size, block, thread;
};

extern __thread Lane* lane;  // that runs; a thread is a stream

// Waits for the lanes of the mask, and returns what each of them gave, by lane.
const std::uint64_t* exchange(unsigned mask, std::uint64_t given);

void before_atomic();

// Calls kernel(values) on every lane. Returns whether each ran to its end.
bool run(unsigned blocks, unsigned threads, std::uint64_t seed, void (*kernel)(void*), void* values);

template <class T>
std::uint64_t as_word(T value) {
    std::uint64_t word = 0;
    __builtin_memcpy(&word, &value, sizeof value);
    return word;
}
template <class T>
T from_word(std::uint64_t word) {
    T value;
    __builtin_memcpy(&value, &word, sizeof value);
    return value;
}

template <class... Parameters, std::size_t... I>
int run(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, std::uint64_t seed, void** arguments,
        std::index_sequence<I...>) {
    auto call = [&] { kernel(*static_cast<Parameters*>(arguments[I])...); };
    return run(blocks, threads, seed, [](void* values) { (*static_cast<decltype(call)*>(values))(); }, &call);
}

// Runs a kernel whose parameters are copied from `arguments`, one address each, as cuLaunchKernel takes them.
template <class... Parameters>
int launch(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, std::uint64_t seed, void** arguments) {
    return run(kernel, blocks, threads, seed, arguments, std::index_sequence_for<Parameters...>{});
}

}  // namespace emulation

#define TIERBED_EXPORT(kernel)                                                                                \
    extern "C" int launch_##kernel(unsigned blocks, unsigned threads, std::uint64_t seed, void** arguments) { \
        return emulation::launch(kernel, blocks, threads, seed, arguments);                                   \
    }

#define threadIdx (emulation::lane->thread)
#define blockIdx (emulation::lane->block)
#define blockDim (emulation::lane->block_size)
#define gridDim (emulation::lane->grid)

inline unsigned __ballot_sync(unsigned mask, bool predicate) {
    const std::uint64_t* given = emulation::exchange(mask, predicate);
    unsigned votes = 0;
    for (unsigned lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1u) votes |= static_cast<unsigned>(given[lane]) << lane;
    return votes;
}
inline void __syncwarp(unsigned mask) { emulation::exchange(mask, 0); }
template <class T>
T __shfl_sync(unsigned mask, T value, int lane) {
    return emulation::from_word<T>(emulation::exchange(mask, emulation::as_word(value))[lane & 31]);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned lanes) {
    const unsigned from = (threadIdx.x & 31) + lanes;
    const std::uint64_t* given = emulation::exchange(mask, emulation::as_word(value));
    return from < 32 ? emulation::from_word<T>(given[from]) : value;
}

template <class T>
T atomicCAS(T* address, T expected, T desired) {
    emulation::before_atomic();
    const T old = *address;
    if (old == expected) *address = desired;
    return old;
}
template <class T>
T atomicMin(T* address, T value) {
    emulation::before_atomic();
    const T old = *address;
    *address = value < old ? value : old;
    return old;
}
template <class T>
T atomicAdd(T* address, T value) {
    emulation::before_atomic();
    const T old = *address;
    *address = old + value;
    return old;
}
template <class T>
T atomicOr(T* address, T value) {
    emulation::before_atomic();
    const T old = *address;
    *address = old | value;
    return old;
}

inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((std::uint64_t{a} * b) >> 32); }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
inline unsigned __float_as_uint(float x) { return static_cast<unsigned>(emulation::as_word(x)); }
inline float __uint_as_float(unsigned x) { return emulation::from_word<float>(x); }
inline long long __double_as_longlong(double x) { return static_cast<long long>(emulation::as_word(x)); }
inline double __longlong_as_double(long long x) { return emulation::from_word<double>(static_cast<std::uint64_t>(x)); }
inline float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
inline double __dsqrt_rn(double x) { return __builtin_sqrt(x); }
