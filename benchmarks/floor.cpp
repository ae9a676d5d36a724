// The memory floor: a lower bound for the time of a step that has to move this much memory.
//
// A step gathers rows (or sums bags of rows), sums each row's gradients and updates the row in place. It does not hash
// or deduplicate: the caller passes slots, unique rows and their occurrences. Rows have the engine's line layout:
// D floats, optimizer state, two u32 counters, padded to 16 bytes.
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

// floor.py has these structs with the same fields.
struct Rows {                     // a batch's unique rows, in any order
    const uint32_t* slots;        // [count]
    const uint32_t* starts;       // [count + 1]: row i occurs at occurrences[starts[i] .. starts[i + 1])
    const uint32_t* occurrences;  // [positions]: bag numbers
    int64_t count;
};

struct Step {
    char* lines;
    int64_t stride;         // bytes between lines
    const uint32_t* slots;  // [bags * length], by position
    int64_t bags;
    int64_t length;      // ids in a bag
    const float* grads;  // [bags, dim]
    float* out;          // [bags, dim]
    Rows forward;        // in gather order; count = 0 gathers bag by bag
    Rows backward;       // in update order
    int32_t dim;
    int32_t rule;
    int32_t distance;  // how many rows ahead to prefetch
    int32_t threads;
    uint32_t step;
    float lr, eps;
    float beta1, beta2, correction1, correction2;  // Adam: 1 - beta1^step and sqrt(1 - beta2^step)
};

namespace {

constexpr int64_t CACHE_LINE = 64;

template <bool write>
void prefetch(const void* at, int64_t bytes) {
    const auto first = reinterpret_cast<uintptr_t>(at) & ~uintptr_t(CACHE_LINE - 1);
    const auto end = reinterpret_cast<uintptr_t>(at) + bytes;
    for (auto line = first; line < end; line += CACHE_LINE) {
        __builtin_prefetch(reinterpret_cast<const void*>(line), write);
    }
}

inline float* line_of(const Step& s, uint32_t slot) { return reinterpret_cast<float*>(s.lines + slot * s.stride); }

// Called by each thread: runs body(begin, end) on chunks of [0, count) until none is left. A slow thread gets fewer.
template <class Body>
void for_chunks(std::atomic<int64_t>& next, int64_t count, int64_t chunk, Body body) {
    for (int64_t begin; (begin = next.fetch_add(chunk)) < count;) {
        body(begin, begin + chunk < count ? begin + chunk : count);
    }
}

template <int D>
void gather_bags(const Step& s, int64_t begin, int64_t end) {
    const int64_t last = end * s.length;
    int64_t ahead = begin * s.length;
    for (int64_t bag = begin; bag < end; bag++) {
        const int64_t first = bag * s.length;
        float sum[D] = {};
        for (int64_t p = first; p < first + s.length; p++) {
            for (; ahead <= p + s.distance && ahead < last; ahead++) {
                prefetch<false>(line_of(s, s.slots[ahead]), D * sizeof(float));
            }
            const float* row = line_of(s, s.slots[p]);
            for (int d = 0; d < D; d++) sum[d] += row[d];
        }
        std::memcpy(s.out + bag * D, sum, sizeof sum);
    }
}

template <int D>
void gather_rows(const Step& s, int64_t begin, int64_t end) {
    const Rows& rows = s.forward;
    int64_t ahead = begin;
    for (int64_t i = begin; i < end; i++) {
        for (; ahead <= i + s.distance && ahead < end; ahead++) {
            prefetch<false>(line_of(s, rows.slots[ahead]), D * sizeof(float));
            prefetch<true>(s.out + int64_t(rows.occurrences[rows.starts[ahead]]) * D, D * sizeof(float));
        }
        const float* row = line_of(s, rows.slots[i]);
        for (uint32_t k = rows.starts[i]; k < rows.starts[i + 1]; k++) {
            std::memcpy(s.out + int64_t(rows.occurrences[k]) * D, row, D * sizeof(float));
        }
    }
}

template <int D>
float mean_square(const float* g) {
    float lanes[16] = {};  // one sum for each vector lane
    for (int d = 0; d < D; d += 16) {
        for (int j = 0; j < 16; j++) lanes[j] += g[d + j] * g[d + j];
    }
    float sum = 0;
    for (float lane : lanes) sum += lane;
    return sum / D;
}

// A rule applies the summed gradient g to the row and returns the end of its state.
struct Adagrad {
    template <int D>
    static float* apply(const Step& s, float* row, const float* g) {
        float* h = row + D;
        for (int d = 0; d < D; d++) {
            h[d] += g[d] * g[d];
            row[d] -= s.lr * (g[d] / (std::sqrt(h[d]) + s.eps));
        }
        return h + D;
    }
};

struct RowWiseAdagrad {
    template <int D>
    static float* apply(const Step& s, float* row, const float* g) {
        float* h = row + D;
        h[0] += mean_square<D>(g);
        const float scale = s.lr / (std::sqrt(h[0]) + s.eps);
        for (int d = 0; d < D; d++) row[d] -= scale * g[d];
        return h + 1;
    }
};

struct Adam {
    template <int D>
    static float* apply(const Step& s, float* row, const float* g) {
        float *m = row + D, *v = row + 2 * D;
        for (int d = 0; d < D; d++) {
            m[d] += (g[d] - m[d]) * (1 - s.beta1);
            v[d] = s.beta2 * v[d] + (1 - s.beta2) * g[d] * g[d];
            row[d] -= s.lr / s.correction1 * (m[d] / (std::sqrt(v[d]) / s.correction2 + s.eps));
        }
        return v + D;
    }
};

template <int D, class Rule>
void update_rows(const Step& s, int64_t begin, int64_t end) {
    const Rows& rows = s.backward;
    int64_t ahead = begin;
    uint32_t ahead_grad = rows.starts[begin];
    for (int64_t i = begin; i < end; i++) {
        for (; ahead <= i + s.distance && ahead < end; ahead++) {
            prefetch<true>(line_of(s, rows.slots[ahead]), s.stride);
        }
        float g[D] = {};
        for (uint32_t k = rows.starts[i]; k < rows.starts[i + 1]; k++) {
            for (; ahead_grad <= k + s.distance && ahead_grad < rows.starts[end]; ahead_grad++) {
                prefetch<false>(s.grads + int64_t(rows.occurrences[ahead_grad]) * D, D * sizeof(float));
            }
            const float* grad = s.grads + int64_t(rows.occurrences[k]) * D;
            for (int d = 0; d < D; d++) g[d] += grad[d];
        }
        float* row = line_of(s, rows.slots[i]);
        float* record = Rule::template apply<D>(s, row, g);
        uint32_t counters[2];
        std::memcpy(counters, record, sizeof counters);
        counters[0] += 1;
        counters[1] = s.step;
        std::memcpy(record, counters, sizeof counters);
    }
}

struct Team {
    std::atomic<int64_t> forward{0}, backward{0};
    std::atomic<int> gathered{0};
};

template <int D, class Rule>
void run(const Step& s, Team& team) {
    if (s.forward.count > 0) {
        for_chunks(team.forward, s.forward.count, 1024, [&](int64_t b, int64_t e) { gather_rows<D>(s, b, e); });
    } else {
        for_chunks(team.forward, s.bags, (1024 + s.length - 1) / s.length,
              [&](int64_t b, int64_t e) { gather_bags<D>(s, b, e); });
    }
    team.gathered.fetch_add(1);
    while (team.gathered.load() < s.threads) std::this_thread::yield();
    for_chunks(team.backward, s.backward.count, 512, [&](int64_t b, int64_t e) { update_rows<D, Rule>(s, b, e); });
}

using Body = void (*)(const Step&, Team&);

template <class Rule>
Body body_for(int32_t dim) {
    return dim == 16 ? run<16, Rule> : dim == 32 ? run<32, Rule> : dim == 128 ? run<128, Rule> : nullptr;
}

}  // namespace

// Returns 0, or -1 for an unknown rule or dim.
extern "C" int floor_step(const Step* s) {
    const Body bodies[] = {body_for<Adagrad>(s->dim), body_for<RowWiseAdagrad>(s->dim), body_for<Adam>(s->dim)};
    const Body body = s->rule >= 0 && s->rule < 3 ? bodies[s->rule] : nullptr;
    if (body == nullptr) return -1;
    Team team;
    std::vector<std::thread> others;
    for (int t = 1; t < s->threads; t++) others.emplace_back([&] { body(*s, team); });
    body(*s, team);
    for (auto& other : others) other.join();
    return 0;
}
