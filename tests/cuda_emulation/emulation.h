// Enough of CUDA for the kernels of a GPU to run on a CPU: blocks, warps of 32 lanes, collectives, atomics.
//
// Each lane is a fiber. It runs until it ends or waits in a collective, which completes when every lane of its mask has
// come. A few warps are resident at a time; with a seed, blocks start and lanes run in a random order, and lanes also
// give way before atomics, so that a result that depends on any order shows. A collective that can never complete (a
// lane of its mask has ended, or waits with another mask) is an error.
#pragma once
#define TIERBED_GPU
#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include <ucontext.h>

namespace emulation {

constexpr unsigned LANES = 32, RESIDENT_WARPS = 4;
constexpr std::size_t STACK_BYTES = 64 * 1024;

struct Index {
    unsigned x = 0;
};

enum class State { ended, ready, waiting };

struct Lane {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
    State state = State::ended;
    Index block, thread;
    unsigned mask = 0;
    std::uint64_t given = 0, received[LANES];
};

class Scheduler {
public:
    Index grid, block_size;
    Lane* current = nullptr;

    // Returns whether every lane of every block ran to its end.
    bool run(unsigned blocks, unsigned threads, std::uint64_t seed, const std::function<void()>& kernel) {
        grid.x = blocks;
        block_size.x = threads;
        kernel_ = &kernel;
        random_.seed(seed);
        shuffled_ = seed != 0;
        for (Lane& lane : lanes_) lane.state = State::ended;
        std::vector<unsigned> waiting_warps(blocks * (threads / LANES));
        for (unsigned i = 0; i < waiting_warps.size(); ++i) waiting_warps[i] = i;
        if (shuffled_) std::shuffle(waiting_warps.begin(), waiting_warps.end(), random_);
        std::reverse(waiting_warps.begin(), waiting_warps.end());
        for (;;) {
            std::vector<Lane*> ready;
            bool any = false;
            for (unsigned warp = 0; warp < RESIDENT_WARPS; ++warp) {
                if (ended(warp) && !waiting_warps.empty()) {
                    start(warp, waiting_warps.back());
                    waiting_warps.pop_back();
                }
                any = any || !ended(warp);
                for (Lane* lane = first(warp); lane != first(warp) + LANES; ++lane)
                    if (lane->state == State::ready) ready.push_back(lane);
            }
            if (!any) return true;
            if (ready.empty()) return false;
            if (shuffled_) std::shuffle(ready.begin(), ready.end(), random_);
            for (Lane* lane : ready) {
                current = lane;
                swapcontext(&main_, &lane->context);
            }
            for (unsigned warp = 0; warp < RESIDENT_WARPS; ++warp) complete(warp);
        }
    }

    // What each lane of the mask gave, by lane.
    const std::uint64_t* exchange(unsigned mask, std::uint64_t given) {
        current->mask = mask;
        current->given = given;
        current->state = State::waiting;
        Lane* self = current;
        swapcontext(&self->context, &main_);
        return self->received;
    }

    void before_atomic() {
        if (!shuffled_ || random_() % 2) return;
        Lane* self = current;
        swapcontext(&self->context, &main_);
    }

private:
    Lane* first(unsigned warp) { return &lanes_[warp * LANES]; }
    bool ended(unsigned warp) {
        return std::all_of(first(warp), first(warp) + LANES, [](const Lane& l) { return l.state == State::ended; });
    }

    void start(unsigned warp, unsigned number) {
        const unsigned warps_a_block = block_size.x / LANES;
        for (unsigned i = 0; i < LANES; ++i) {
            Lane& lane = first(warp)[i];
            lane.block.x = number / warps_a_block;
            lane.thread.x = number % warps_a_block * LANES + i;
            lane.state = State::ready;
            getcontext(&lane.context);
            lane.context.uc_stack.ss_sp = lane.stack.get();
            lane.context.uc_stack.ss_size = STACK_BYTES;
            lane.context.uc_link = &main_;
            makecontext(&lane.context, &Scheduler::enter, 0);
        }
    }
    static void enter();

    // Lets the lanes go whose collective has all of its lanes.
    void complete(unsigned warp) {
        Lane* lanes = first(warp);
        for (unsigned i = 0; i < LANES; ++i) {
            if (lanes[i].state != State::waiting) continue;
            const unsigned mask = lanes[i].mask;
            bool all = mask >> i & 1u;
            for (unsigned j = 0; j < LANES; ++j)
                if (mask >> j & 1u) all = all && lanes[j].state == State::waiting && lanes[j].mask == mask;
            if (!all) continue;
            for (unsigned j = 0; j < LANES; ++j) {
                if (!(mask >> j & 1u)) continue;
                for (unsigned k = 0; k < LANES; ++k) lanes[j].received[k] = mask >> k & 1u ? lanes[k].given : ~0ull;
            }
            for (unsigned j = 0; j < LANES; ++j)
                if (mask >> j & 1u) lanes[j].state = State::ready;
        }
    }

    const std::function<void()>* kernel_ = nullptr;
    ucontext_t main_;
    std::vector<Lane> lanes_{RESIDENT_WARPS * LANES};
    std::mt19937_64 random_;
    bool shuffled_ = false;
};

inline thread_local Scheduler scheduler;  // a thread is a stream

inline void Scheduler::enter() {
    Lane* self = scheduler.current;
    (*scheduler.kernel_)();
    self->state = State::ended;
}

template <class T>
std::uint64_t as_word(T value) {
    std::uint64_t word = 0;
    std::memcpy(&word, &value, sizeof value);
    return word;
}
template <class T>
T from_word(std::uint64_t word) {
    T value;
    std::memcpy(&value, &word, sizeof value);
    return value;
}

template <class... Parameters, std::size_t... I>
int run(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, std::uint64_t seed, void** arguments,
        std::index_sequence<I...>) {
    const std::tuple<Parameters...> values{*static_cast<Parameters*>(arguments[I])...};
    return scheduler.run(blocks, threads, seed, [&] { std::apply(kernel, values); });
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

#define threadIdx (emulation::scheduler.current->thread)
#define blockIdx (emulation::scheduler.current->block)
#define blockDim (emulation::scheduler.block_size)
#define gridDim (emulation::scheduler.grid)

inline unsigned __ballot_sync(unsigned mask, bool predicate) {
    const std::uint64_t* given = emulation::scheduler.exchange(mask, predicate);
    unsigned votes = 0;
    for (unsigned lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1u) votes |= static_cast<unsigned>(given[lane]) << lane;
    return votes;
}
inline void __syncwarp(unsigned mask) { emulation::scheduler.exchange(mask, 0); }
template <class T>
T __shfl_sync(unsigned mask, T value, int lane) {
    return emulation::from_word<T>(emulation::scheduler.exchange(mask, emulation::as_word(value))[lane & 31]);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned lanes) {
    const unsigned from = (threadIdx.x & 31) + lanes;
    const std::uint64_t* given = emulation::scheduler.exchange(mask, emulation::as_word(value));
    return from < 32 ? emulation::from_word<T>(given[from]) : value;
}

template <class T>
T atomicCAS(T* address, T expected, T desired) {
    emulation::scheduler.before_atomic();
    const T old = *address;
    if (old == expected) *address = desired;
    return old;
}
template <class T>
T atomicMin(T* address, T value) {
    emulation::scheduler.before_atomic();
    const T old = *address;
    *address = std::min(old, value);
    return old;
}
template <class T>
T atomicAdd(T* address, T value) {
    emulation::scheduler.before_atomic();
    const T old = *address;
    *address = old + value;
    return old;
}
template <class T>
T atomicOr(T* address, T value) {
    emulation::scheduler.before_atomic();
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
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline double __dsqrt_rn(double x) { return std::sqrt(x); }
