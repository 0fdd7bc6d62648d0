// The rotation of one head by a row of the table that `rope_table` computes; out may be x.
//
// A table row has, for interleaved pairs, cosines (c0 c0 c1 c1 ..) then signed sines (-s0 s0 -s1 s1 ..), 2 * pairs
// values each; else `pairs` cosines then `pairs` sines.
#pragma once
#include "ops/simd_math.h"

namespace tandem {

inline int64_t turn_width(int64_t pairs, bool interleaved) { return (interleaved ? 4 : 2) * pairs; }

inline void rotate_interleaved(const float* x, const float* turns, int64_t pairs, float* out) {
    const float *cosines = turns, *sines = turns + 2 * pairs;
    simd::over(2 * pairs, [&](int64_t i, int count) {
        const simd::F value = simd::load_some(x + i, count);
        const simd::F turned = simd::swap_pairs(value) * simd::load_some(sines + i, count);
        simd::store_some(out + i, simd::fma(value, simd::load_some(cosines + i, count), turned), count);
    });
}

inline void rotate_halves(const float* x, const float* turns, int64_t pairs, float* out) {
    const float *cosines = turns, *sines = turns + pairs;
    simd::over(pairs, [&](int64_t i, int count) {
        const simd::F a = simd::load_some(x + i, count), b = simd::load_some(x + pairs + i, count);
        const simd::F c = simd::load_some(cosines + i, count), s = simd::load_some(sines + i, count);
        simd::store_some(out + i, simd::neg_fma(b, s, a * c), count);
        simd::store_some(out + pairs + i, simd::fma(a, s, b * c), count);
    });
}

inline void rotate_head(const float* x, const float* turns, int64_t head_dim, int64_t pairs, bool interleaved,
                        float* out) {
    if (interleaved) rotate_interleaved(x, turns, pairs, out);
    else rotate_halves(x, turns, pairs, out);
    if (out != x) std::memcpy(out + 2 * pairs, x + 2 * pairs, (head_dim - 2 * pairs) * sizeof(float));
}

}  // namespace tandem
