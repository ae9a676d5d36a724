// Powers in fixed IEEE operations: libm's differ between machines.
#pragma once
#include "lines/kernels/quantile.h"

namespace tierbed {

// base^n by squaring
TIERBED_FN double power(double base, u32 n) {
    double result = 1.0;
    for (; n > 0; n /= 2) {
        if (n % 2 == 1) result = result * base;
        base = base * base;
    }
    return result;
}

// e^x for |x| <= 0.35, by its series up to x^13; the rest is below 2^-56
TIERBED_FN double exponential_near_zero(double x) {
    double series = 1.0;
    for (int i = 13; i >= 1; --i) series = 1.0 + x / static_cast<double>(i) * series;
    return series;
}

// x^exponent for x >= 0, NaN for any other x, as 2^k e^r with ln(x^exponent) = k ln 2 + r. Rounded once from a double
// whose relative error is below 2^-40.
TIERBED_FN float power(float x, float exponent) {
    const float zero = 0.0f, infinity = float_of(0x7F800000u), not_a_number = float_of(0x7FC00000u);
    if (!(x >= 0.0f)) return not_a_number;
    if (exponent == 0.0f || x == 1.0f) return 1.0f;
    if (exponent == 0.5f) return square_root(x);
    if (x == 0.0f || x == infinity) return (x == 0.0f) == (exponent > 0.0f) ? zero : infinity;
    const double logarithm = static_cast<double>(exponent) * natural_log(static_cast<double>(x));
    if (logarithm > 89.0) return infinity;
    if (logarithm < -104.0) return zero;
    const double ln2 = 0.6931471805599453;
    const int k = static_cast<int>(logarithm / ln2 + (logarithm < 0.0 ? -0.5 : 0.5));
    const double scale = double_of(static_cast<u64>(k + 1023) << 52);
    return static_cast<float>(exponential_near_zero(logarithm - static_cast<double>(k) * ln2) * scale);
}

}  // namespace tierbed
