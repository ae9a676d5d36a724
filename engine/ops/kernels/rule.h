// The base of the optimizer rules in engine/optim: functions that a rule's body may call, limits that every rule has,
// and a type that lists all rules. engine/optim/kernel.py generates a struct for each rule.
#pragma once
#include "math.h"

namespace tierbed {

// Returns the gradient g, negated if `maximize`, plus L2 weight decay.
TIERBED_FN float add_decay(float g, float w, float weight_decay, float maximize) {
    const float signed_g = maximize != 0.0f ? -g : g;
    return weight_decay != 0.0f ? signed_g + weight_decay * w : signed_g;
}

// Returns a / b, or 0 if b is 0. If b is 0, a must be 0, or so small that a * a is 0. A branch would be slower.
TIERBED_FN float quotient(float a, float b) { return a / (b == 0.0f ? 0x1p127f : b); }

TIERBED_FN float square(float x) { return x * x; }
TIERBED_FN float absolute(float x) { return x < 0.0f ? -x : x; }

// A row's limits; 0 means no limit. Before weight decay, gradient elements are limited to [-clip_value, clip_value].
// Then clip_norm limits the gradient's L2 norm. After the rule, row_norm limits the row's L2 norm. NaN stays NaN.
struct Limits {
    static constexpr u32 LIMITS = 3;
    float clip_value, clip_norm, row_norm;
    TIERBED_FN explicit Limits(const double* limits)
        : clip_value(static_cast<float>(limits[0])),
          clip_norm(static_cast<float>(limits[1])),
          row_norm(static_cast<float>(limits[2])) {}

    TIERBED_FN float clip(float g) const { return g > clip_value ? clip_value : g < -clip_value ? -clip_value : g; }
};

// The learning rates of past steps. Rates are linear between knots. `past` holds the number of knots, then a step and a
// rate for each knot (engine/optim/past_rates.py). `now` is the rate after the last knot.
class Rates {
public:
    TIERBED_FN Rates(const double* past, double now) : knots_(past + 1), count_(static_cast<u32>(past[0])), now_(now) {}

    // Returns the rate of `step`. Steps must ascend from call to call.
    TIERBED_FN double at(u32 step) {
        const double x = static_cast<double>(step);
        while (index_ < count_ && knots_[2 * index_] < x) ++index_;
        if (index_ == count_) return now_;
        const double* const b = knots_ + 2 * index_;
        if (index_ == 0) return b[1];
        return b[-1] + (b[1] - b[-1]) * ((x - b[-2]) / (b[0] - b[-2]));
    }
    // Call after at(step). Returns the last step of the linear section of rates that contains `step`.
    TIERBED_FN u32 segment_end() const { return index_ < count_ ? static_cast<u32>(knots_[2 * index_]) : 0xFFFFFFFFu; }

private:
    const double* knots_;
    u32 count_, index_ = 0;
    double now_;
};

// Returns the factor that limits a row's L2 norm to `limit`. squares: the squared norm.
TIERBED_FN float compute_norm_scale(float squares, float limit) {
    const float norm = square_root(squares);
    return norm > limit ? limit / norm : 1.0f;
}

template <class... Rule>
struct Rules {
    static constexpr u32 COUNT = sizeof...(Rule);
};

}  // namespace tierbed
