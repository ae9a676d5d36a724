// Base of the optimizer rules in engine/optim: the functions that a rule's body may call, the limits that every rule
// has, and the list type of all rules. engine/optim/kernel.py generates a struct for each rule, which follows this
// header.
#pragma once
#include "math.h"

namespace tierbed {

// g, negated for `maximize`, with L2 weight decay added
TIERBED_FN float decayed(float g, float w, float weight_decay, float maximize) {
    const float signed_g = maximize != 0.0f ? -g : g;
    return weight_decay != 0.0f ? signed_g + weight_decay * w : signed_g;
}

// a / b, or 0 if b is 0, where a is 0 or so small that its square is 0. A branch would be slower.
TIERBED_FN float quotient(float a, float b) { return a / (b == 0.0f ? 0x1p127f : b); }

TIERBED_FN float square(float x) { return x * x; }
TIERBED_FN float absolute(float x) { return x < 0.0f ? -x : x; }

// Clipping of a row's summed gradient, before weight decay: each element to [-value, value], then the row to an L2 norm
// of at most `clip_norm`. After the rule, the row is scaled to one of at most `row_norm`. 0 is none. NaN stays NaN.
struct Limits {
    static constexpr u32 LIMITS = 3;
    float clip_value, clip_norm, row_norm;
    TIERBED_FN explicit Limits(const double* limits)
        : clip_value(static_cast<float>(limits[0])),
          clip_norm(static_cast<float>(limits[1])),
          row_norm(static_cast<float>(limits[2])) {}

    TIERBED_FN float clipped(float g) const { return g > clip_value ? clip_value : g < -clip_value ? -clip_value : g; }
};

// The learning rates of past steps. past: the number of knots, then the step and the rate of each
// (engine/optim/past_rates.py). now: the rate of the steps after them.
class Rates {
public:
    TIERBED_FN Rates(const double* past, double now) : knots_(past + 1), count_(static_cast<u32>(past[0])), now_(now) {}

    // The rate of `step`. Steps must ascend from call to call.
    TIERBED_FN double at(u32 step) {
        const double x = static_cast<double>(step);
        while (index_ < count_ && knots_[2 * index_] < x) ++index_;
        if (index_ == count_) return now_;
        const double* const b = knots_ + 2 * index_;
        if (index_ == 0) return b[1];
        return b[-1] + (b[1] - b[-1]) * ((x - b[-2]) / (b[0] - b[-2]));
    }
    // The last step whose rate is on one line with that of the last call.
    TIERBED_FN u32 last() const { return index_ < count_ ? static_cast<u32>(knots_[2 * index_]) : 0xFFFFFFFFu; }

private:
    const double* knots_;
    u32 count_, index_ = 0;
    double now_;
};

// The factor that limits a row's L2 norm to `limit`, given the sum of its squares.
TIERBED_FN float norm_scale(float squares, float limit) {
    const float norm = square_root(squares);
    return norm > limit ? limit / norm : 1.0f;
}

template <class... Rule>
struct Rules {
    static constexpr u32 COUNT = sizeof...(Rule);
};

}  // namespace tierbed
