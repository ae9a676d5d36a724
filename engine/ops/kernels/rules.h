// Optimizer rules: how one element of a row moves, given the gradient summed over its occurrences.
//
// A rule holds its hyper-parameters (float32, computed in double by engine/optimizers.py, in the order of its
// constructor) and names how many state columns each element has. `apply` updates the state in place and returns the
// new weight. `first` says that the row was never written. Formulas are torch.optim's, applied to touched rows alone.
#pragma once
#include "portable.h"

namespace tierbed {

// g, negated for `maximize`, with L2 weight decay added
TIERBED_FN float decayed(float g, float w, float weight_decay, float sign) {
    const float signed_g = sign * g;
    return weight_decay != 0.0f ? signed_g + weight_decay * w : signed_g;
}

struct Sgd {
    static constexpr u32 STATES = 0;
    static constexpr u32 HYPERS = 3;
    float lr, weight_decay, sign;
    TIERBED_FN explicit Sgd(const float* h) : lr(h[0]), weight_decay(h[1]), sign(h[2] != 0.0f ? -1.0f : 1.0f) {}
    TIERBED_FN float apply(float w, float g, float*, bool) const { return w - lr * decayed(g, w, weight_decay, sign); }
};

struct SgdMomentum {
    static constexpr u32 STATES = 1;
    static constexpr u32 HYPERS = 6;
    float lr, weight_decay, sign, momentum, one_minus_dampening;
    bool nesterov;
    TIERBED_FN explicit SgdMomentum(const float* h)
        : lr(h[0]),
          weight_decay(h[1]),
          sign(h[2] != 0.0f ? -1.0f : 1.0f),
          momentum(h[3]),
          one_minus_dampening(h[4]),
          nesterov(h[5] != 0.0f) {}
    TIERBED_FN float apply(float w, float g, float* s, bool first) const {
        g = decayed(g, w, weight_decay, sign);
        const float buffer = first ? g : momentum * s[0] + one_minus_dampening * g;
        s[0] = buffer;
        return w - lr * (nesterov ? g + momentum * buffer : buffer);
    }
};

struct Adagrad {
    static constexpr u32 STATES = 1;
    static constexpr u32 HYPERS = 4;
    float lr, weight_decay, sign, eps;
    TIERBED_FN explicit Adagrad(const float* h)
        : lr(h[0]), weight_decay(h[1]), sign(h[2] != 0.0f ? -1.0f : 1.0f), eps(h[3]) {}
    TIERBED_FN float apply(float w, float g, float* s, bool) const {
        g = decayed(g, w, weight_decay, sign);
        const float sum = s[0] + g * g;
        s[0] = sum;
        return w - lr * (g / (square_root(sum) + eps));
    }
};

// Adam and AdamW: `weight_decay` is L2 in the gradient, `decay` the factor that AdamW puts on the weight first.
struct Adam {
    static constexpr u32 STATES = 2;
    static constexpr u32 HYPERS = 9;
    float step_size, weight_decay, sign, one_minus_beta1, beta2, one_minus_beta2, sqrt_correction2, eps, decay;
    TIERBED_FN explicit Adam(const float* h)
        : step_size(h[0]),
          weight_decay(h[1]),
          sign(h[2] != 0.0f ? -1.0f : 1.0f),
          one_minus_beta1(h[3]),
          beta2(h[4]),
          one_minus_beta2(h[5]),
          sqrt_correction2(h[6]),
          eps(h[7]),
          decay(h[8]) {}
    TIERBED_FN float apply(float w, float g, float* s, bool) const {
        g = decayed(g, w, weight_decay, sign);
        w = w * decay;
        const float m = s[0] + (g - s[0]) * one_minus_beta1;
        const float v = beta2 * s[1] + (one_minus_beta2 * g) * g;
        s[0] = m;
        s[1] = v;
        return w - step_size * (m / (square_root(v) / sqrt_correction2 + eps));
    }
};

}  // namespace tierbed
