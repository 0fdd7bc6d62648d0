// Dot products of a few rows with a few rows, in registers.
#pragma once
#include "ops/simd_math.h"

namespace tandem {

// out[h * out_stride + p] = <x_h, y_p> for H rows of x and P of y, n values each, rows `n` apart; each product is one
// chain of vector sums, whatever H and P are.
template <class T, int H, int P>
void dot_tile(const float* x, const T* y, int64_t n, float* out, int64_t out_stride) {
    using simd::F;
    using simd::repeat;
    constexpr int kSums = (H * P + 3) / 4 * 4;
    F acc[kSums];
    repeat<kSums>([&](auto i) { acc[i] = simd::set1(0); });
    int64_t at = 0;
    for (; at + simd::kLanes <= n; at += simd::kLanes) {
        F ys[P];
        repeat<P>([&](auto p) { ys[p] = simd::load(y + p * n + at); });
        repeat<H>([&](auto h) {
            const F xh = simd::load(x + h * n + at);
            repeat<P>([&](auto p) { acc[h * P + p] = simd::fma(xh, ys[p], acc[h * P + p]); });
        });
    }
    if (at < n) {
        repeat<H>([&](auto h) {
            const F xh = simd::load_first(x + h * n + at, int(n - at));
            repeat<P>([&](auto p) {
                acc[h * P + p] = simd::fma(xh, simd::load_first(y + p * n + at, int(n - at)), acc[h * P + p]);
            });
        });
    }
    float sums[kSums];
    repeat<kSums / 4>(
        [&](auto i) { simd::sum4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3], sums + 4 * i); });
    repeat<H>([&](auto h) { std::memcpy(out + h * out_stride, sums + h * P, P * sizeof(float)); });
}

}  // namespace tandem
