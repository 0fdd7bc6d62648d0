// The RMS norm of one part of a row, for the norm ops and for ops that take their input unnormed.
#pragma once
#include "ops/simd_math.h"

namespace tandem {

// 1 / sqrt(mean(x^2) + eps), summed in an order fixed by n.
inline float inverse_rms(const float* x, int64_t n, float eps) {
    return 1.0f / std::sqrt(simd::dot(x, x, n) / float(n) + eps);
}

inline void rms_normalise(const float* x, const float* weight, int64_t n, float eps, float* out) {
    const simd::F factor = simd::set1(inverse_rms(x, n, eps));
    simd::over(n, [&](int64_t i, int count) {
        simd::store_some(out + i, simd::load_some(x + i, count) * factor * simd::load_some(weight + i, count), count);
    });
}

// out = residual + the normed x
inline void add_rms_normalised(const float* residual, const float* x, const float* weight, int64_t n, float eps,
                               float* out) {
    const simd::F factor = simd::set1(inverse_rms(x, n, eps));
    simd::over(n, [&](int64_t i, int count) {
        const simd::F normed = simd::load_some(x + i, count) * factor * simd::load_some(weight + i, count);
        simd::store_some(out + i, simd::load_some(residual + i, count) + normed, count);
    });
}

}  // namespace tandem
