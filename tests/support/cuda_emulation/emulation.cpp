// Runs the lanes of a launch. Each is a fiber, made once and used again by later launches of its thread.
//
// Switches are by _setjmp and _longjmp: swapcontext asks the kernel for the signal mask at each.
#include "emulation.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include <setjmp.h>
#include <ucontext.h>

namespace emulation {

__thread Lane* lane = nullptr;

namespace {

constexpr unsigned LANES = 32, RESIDENT_WARPS = 4;
constexpr std::size_t STACK_BYTES = 64 * 1024;

enum class State { ended, ready, waiting };

class Scheduler;

struct Fiber : Lane {
    Scheduler* scheduler = nullptr;
    std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
    jmp_buf place;
    bool made = false;  // it is at the end of a kernel, or in one
    State state = State::ended;
    unsigned mask = 0;
    std::uint64_t given = 0, received[LANES];
};

class Scheduler {
public:
    bool run(unsigned blocks, unsigned threads, std::uint64_t seed, void (*kernel)(void*), void* values) {
        kernel_ = kernel;
        values_ = values;
        random_.seed(seed);
        shuffled_ = seed != 0;
        for (Fiber& fiber : fibers_) {
            if (fiber.state != State::ended) fiber.made = false;  // a launch that could not end left it in its kernel
            fiber.state = State::ended;
            fiber.scheduler = this;
            fiber.grid.x = blocks;
            fiber.block_size.x = threads;
        }
        std::vector<unsigned> waiting_warps(blocks * (threads / LANES));
        std::iota(waiting_warps.rbegin(), waiting_warps.rend(), 0u);
        if (shuffled_) std::shuffle(waiting_warps.begin(), waiting_warps.end(), random_);
        std::vector<Fiber*> ready;
        for (;;) {
            for (unsigned warp = 0; warp < RESIDENT_WARPS; ++warp) {
                if (!ended(warp) || waiting_warps.empty()) continue;
                start(warp, waiting_warps.back());
                waiting_warps.pop_back();
            }
            ready.clear();
            for (Fiber& fiber : fibers_)
                if (fiber.state == State::ready) ready.push_back(&fiber);
            if (ready.empty())
                return std::all_of(fibers_.begin(), fibers_.end(), [](auto& f) { return f.state == State::ended; });
            if (shuffled_) std::shuffle(ready.begin(), ready.end(), random_);
            for (Fiber* fiber : ready) resume(*fiber);
            for (unsigned warp = 0; warp < RESIDENT_WARPS; ++warp) complete(warp);
        }
    }

    // Back to `run`, until it resumes the fiber.
    void leave(Fiber& fiber) {
        if (!_setjmp(fiber.place)) _longjmp(run_, 1);
    }

    bool gives_way() { return shuffled_ && random_() % 2 == 0; }

private:
    Fiber* first(unsigned warp) { return &fibers_[warp * LANES]; }
    bool ended(unsigned warp) {
        return std::all_of(first(warp), first(warp) + LANES, [](const Fiber& f) { return f.state == State::ended; });
    }

    void start(unsigned warp, unsigned number) {
        const unsigned warps_a_block = fibers_[0].block_size.x / LANES;
        for (unsigned i = 0; i < LANES; ++i) {
            Fiber& fiber = first(warp)[i];
            fiber.block.x = number / warps_a_block;
            fiber.thread.x = number % warps_a_block * LANES + i;
            fiber.state = State::ready;
        }
    }

    void resume(Fiber& fiber) {
        lane = &fiber;
        if (_setjmp(run_)) return;
        if (fiber.made) _longjmp(fiber.place, 1);
        fiber.made = true;
        ucontext_t context;
        getcontext(&context);
        context.uc_stack.ss_sp = fiber.stack.get();
        context.uc_stack.ss_size = STACK_BYTES;
        context.uc_link = nullptr;
        makecontext(&context, &Scheduler::enter, 0);
        setcontext(&context);
    }

    static void enter() {
        Fiber& self = static_cast<Fiber&>(*lane);
        for (;;) {
            self.scheduler->kernel_(self.scheduler->values_);
            self.state = State::ended;
            self.scheduler->leave(self);
        }
    }

    // Lets the lanes go whose collective has all of its lanes.
    void complete(unsigned warp) {
        Fiber* lanes = first(warp);
        for (unsigned i = 0; i < LANES; ++i) {
            const unsigned mask = lanes[i].mask;
            // the first lane of a mask stands for all of them
            if (lanes[i].state != State::waiting || (mask & -mask) != 1u << i) continue;
            std::uint64_t given[LANES];
            bool all = true;
            for (unsigned k = 0; k < LANES; ++k) {
                given[k] = mask >> k & 1u ? lanes[k].given : ~0ull;
                all = all && (!(mask >> k & 1u) || (lanes[k].state == State::waiting && lanes[k].mask == mask));
            }
            for (unsigned k = i; all && k < LANES; ++k) {
                if (!(mask >> k & 1u)) continue;
                std::memcpy(lanes[k].received, given, sizeof given);
                lanes[k].state = State::ready;
            }
        }
    }

    void (*kernel_)(void*) = nullptr;
    void* values_ = nullptr;
    jmp_buf run_;
    std::vector<Fiber> fibers_{RESIDENT_WARPS * LANES};
    std::mt19937_64 random_;
    bool shuffled_ = false;
};

}  // namespace

const std::uint64_t* exchange(unsigned mask, std::uint64_t given) {
    Fiber& self = static_cast<Fiber&>(*lane);
    self.mask = mask;
    self.given = given;
    self.state = State::waiting;
    self.scheduler->leave(self);
    return self.received;
}

void before_atomic() {
    Fiber& self = static_cast<Fiber&>(*lane);
    if (self.scheduler->gives_way()) self.scheduler->leave(self);
}

bool run(unsigned blocks, unsigned threads, std::uint64_t seed, void (*kernel)(void*), void* values) {
    thread_local Scheduler scheduler;  // a thread is a stream
    return scheduler.run(blocks, threads, seed, kernel, values);
}

}  // namespace emulation
