// Logarithm, powers and the inverse normal distribution function, as fixed sequences of IEEE operations. Unlike in
// libm, results are bit-identical on every machine.
#pragma once
#include "portable.h"

namespace tierbed {

// Returns ln x for a normal number x > 0, by the series for 2 artanh((m - 1) / (m + 1)) around m = 1.
TIERBED_FN double natural_log(double x) {
    const u64 bits = as_bits(x);
    int exponent = static_cast<int>((bits >> 52) & 0x7FF) - 1022;
    double m = as_double((bits & 0x000FFFFFFFFFFFFFull) | 0x3FE0000000000000ull);  // [0.5, 1)
    if (m < 0.7071067811865476) {
        m *= 2.0;
        exponent -= 1;
    }
    const double s = (m - 1.0) / (m + 1.0);
    const double z = s * s;
    double series = 1.0 / 19.0;
    series = series * z + 1.0 / 17.0;
    series = series * z + 1.0 / 15.0;
    series = series * z + 1.0 / 13.0;
    series = series * z + 1.0 / 11.0;
    series = series * z + 1.0 / 9.0;
    series = series * z + 1.0 / 7.0;
    series = series * z + 1.0 / 5.0;
    series = series * z + 1.0 / 3.0;
    series = series * z + 1.0;
    return static_cast<double>(exponent) * 0.6931471805599453 + (2.0 * s) * series;
}

// c[0] + c[1] r + ... + c[7] r^7
TIERBED_FN double evaluate_polynomial(const double (&c)[8], double r) {
    double value = c[7];
    for (int i = 6; i >= 0; --i) value = value * r + c[i];
    return value;
}

// The inverse of the standard normal distribution function at p in (0, 1). Source: Wichura, "Algorithm AS 241: The
// percentage points of the normal distribution", Applied Statistics 37 (1988), routine PPND16.
TIERBED_FN double normal_quantile(double p) {
    const double q = p - 0.5;
    if (q <= 0.425 && q >= -0.425) {
        const double a[8] = {3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3,
                             1.3731693765509461125e4, 4.5921953931549871457e4, 6.7265770927008700853e4,
                             3.3430575583588128105e4, 2.5090809287301226727e3};
        const double b[8] = {1.0000000000000000000e0, 4.2313330701600911252e1, 6.8718700749205790830e2,
                             5.3941960214247511077e3, 2.1213794301586595867e4, 3.9307895800092710610e4,
                             2.8729085735721942674e4, 5.2264952788528545610e3};
        const double r = 0.180625 - q * q;
        return evaluate_polynomial(a, r) * q / evaluate_polynomial(b, r);
    }
    const double tail = q <= 0.0 ? p : 1.0 - p;
    const double r = square_root(-natural_log(tail));
    double x;
    if (r <= 5.0) {
        const double c[8] = {1.42343711074968357734e0,  4.63033784615654529590e0, 5.76949722146069140550e0,
                             3.64784832476320460504e0,  1.27045825245236838258e0, 2.41780725177450611770e-1,
                             2.27238449892691845833e-2, 7.74545014278341407640e-4};
        const double d[8] = {1.0000000000000000000e0,   2.05319162663775882187e0,  1.67638483018380384940e0,
                             6.89767334985100004550e-1, 1.48103976427480074590e-1, 1.51986665636164571966e-2,
                             5.47593808499534494600e-4, 1.05075007164441684324e-9};
        x = evaluate_polynomial(c, r - 1.6) / evaluate_polynomial(d, r - 1.6);
    } else {
        const double e[8] = {6.65790464350110377720e0,  5.46378491116411436990e0,  1.78482653991729133580e0,
                             2.96560571828504891230e-1, 2.65321895265761230930e-2, 1.24266094738807843860e-3,
                             2.71155556874348757815e-5, 2.01033439929228813265e-7};
        const double f[8] = {1.0000000000000000000e0,   5.99832206555887937690e-1, 1.36929880922735805310e-1,
                             1.48753612908506148525e-2, 7.86869131145613259100e-4, 1.84631831751005468180e-5,
                             1.42151175831644588870e-7, 2.04426310338993978564e-15};
        x = evaluate_polynomial(e, r - 5.0) / evaluate_polynomial(f, r - 5.0);
    }
    return q < 0.0 ? -x : x;
}

// Returns base^n by squaring.
TIERBED_FN double power(double base, u32 n) {
    double result = 1.0;
    for (; n > 0; n /= 2) {
        if (n % 2 == 1) result = result * base;
        base = base * base;
    }
    return result;
}

// Returns e^x for |x| <= 0.35, by its series up to x^13. The remainder is below 2^-56.
TIERBED_FN double exponential_near_zero(double x) {
    double series = 1.0;
    for (int i = 13; i >= 1; --i) series = 1.0 + x / static_cast<double>(i) * series;
    return series;
}

// Returns x^exponent for x >= 0, otherwise NaN. Computes 2^k e^r as a double, where k ln 2 + r = exponent ln x. The
// double's relative error is below 2^-40. The double is then rounded to float.
TIERBED_FN float power(float x, float exponent) {
    const float zero = 0.0f, infinity = as_float(0x7F800000u), not_a_number = as_float(0x7FC00000u);
    if (!(x >= 0.0f)) return not_a_number;
    if (exponent == 0.0f || x == 1.0f) return 1.0f;
    if (exponent == 0.5f) return square_root(x);
    if (x == 0.0f || x == infinity) return (x == 0.0f) == (exponent > 0.0f) ? zero : infinity;
    const double logarithm = static_cast<double>(exponent) * natural_log(static_cast<double>(x));
    if (logarithm > 89.0) return infinity;
    if (logarithm < -104.0) return zero;
    const double ln2 = 0.6931471805599453;
    const int k = static_cast<int>(logarithm / ln2 + (logarithm < 0.0 ? -0.5 : 0.5));
    const double scale = as_double(static_cast<u64>(k + 1023) << 52);
    return static_cast<float>(exponential_near_zero(logarithm - static_cast<double>(k) * ln2) * scale);
}

}  // namespace tierbed
