// Vectors of floats for the three instruction sets, and exp, sigmoid, tanh on them (relative error below 2e-7).
// Every function works lane by lane, and reductions use a fixed tree: a value does not depend on where in a
// row, or in which row, it stands. F has kLanes floats: 16 with AVX-512, 8 with AVX2, 4 otherwise.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
// GCC's header starts unused lanes from an undefined value, and warns about that wherever it is inlined.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#endif

namespace tandem::simd {

#if defined(__F16C__)

inline float half_to_float(uint16_t h) { return _cvtsh_ss(h); }
inline uint16_t float_to_half(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }

#else

inline float half_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
    uint32_t bits;
    if (exponent == 31) {
        bits = sign | 0x7f800000 | (fraction << 13);
    } else if (exponent) {
        bits = sign | ((exponent + 112) << 23) | (fraction << 13);
    } else {
        const float small = float(fraction) * 0x1p-24f;
        std::memcpy(&bits, &small, 4);
        bits |= sign;
    }
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Rounds to nearest even; beyond the range gives infinity.
inline uint16_t float_to_half(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint16_t sign = uint16_t((bits >> 16) & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (bits >= 0x47800000) return uint16_t(sign | 0x7c00);
    if (bits < 0x38800000) {  // subnormal half: the addition rounds it
        float magnitude;
        std::memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;
        std::memcpy(&bits, &magnitude, 4);
        return uint16_t(sign | (bits - 0x3f000000));
    }
    return uint16_t(sign | ((bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13));
}

#endif

#if defined(__AVX512F__)

constexpr int kLanes = 16;
using F = __m512;

inline F set1(float x) { return _mm512_set1_ps(x); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline __mmask16 first(int n) { return __mmask16((1u << n) - 1); }
inline F load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
inline void store_first(float* p, F x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
inline F load(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline F load_first(const uint16_t* p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p)); }
inline void store(uint16_t* p, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline F load(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F neg_fma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
// The second operand if either is NaN.
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F abs(F x) { return _mm512_abs_ps(x); }
inline F round(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F times_power_of_two(F x, F n) { return _mm512_scalef_ps(x, n); }
inline F select_less(F a, F b, F yes, F no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
inline F with_sign_of(F magnitude, F sign) {
    const __m512i mask = _mm512_set1_epi32(int(0x80000000));
    return _mm512_castsi512_ps(
        _mm512_ternarylogic_epi32(mask, _mm512_castps_si512(sign), _mm512_castps_si512(magnitude), 0xca));
}
inline F swap_pairs(F x) { return _mm512_permute_ps(x, 0xb1); }
inline __m128 fold(F x) {
    const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    return _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
}
inline F interleave_low(F a, F b) { return _mm512_unpacklo_ps(a, b); }
inline F interleave_high(F a, F b) { return _mm512_unpackhi_ps(a, b); }
inline F pair_low(F a, F b) { return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b))); }
inline F pair_high(F a, F b) { return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b))); }
inline float maximum(F x) { return _mm512_reduce_max_ps(x); }

#elif defined(__AVX2__)

constexpr int kLanes = 8;
using F = __m256;

inline F set1(float x) { return _mm256_set1_ps(x); }
inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, F x) { _mm256_storeu_ps(p, x); }
inline __m256i first(int n) {
    alignas(32) static constexpr int32_t lanes[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lanes + 8 - n));
}
inline F load_first(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
inline void store_first(float* p, F x, int n) { _mm256_maskstore_ps(p, first(n), x); }
inline F load(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline F load_first(const uint16_t* p, int n) {
    uint16_t lanes[8] = {};
    std::memcpy(lanes, p, 2 * n);
    return load(lanes);
}
inline void store(uint16_t* p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline F load(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F neg_fma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
inline F max(F a, F b) { return _mm256_max_ps(a, b); }
inline F min(F a, F b) { return _mm256_min_ps(a, b); }
inline F abs(F x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
inline F round(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F times_power_of_two(F x, F n) {
    // In two halves: one alone would leave the range of exponents near overflow and for subnormal results.
    const __m256i all = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(all, 1), bias = _mm256_set1_epi32(127);
    const __m256i one = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
    const __m256i two = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(all, half), bias), 23);
    return _mm256_mul_ps(_mm256_mul_ps(x, _mm256_castsi256_ps(one)), _mm256_castsi256_ps(two));
}
inline F select_less(F a, F b, F yes, F no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
inline F with_sign_of(F magnitude, F sign) {
    const F mask = _mm256_set1_ps(-0.0f);
    return _mm256_or_ps(_mm256_and_ps(mask, sign), _mm256_andnot_ps(mask, magnitude));
}
inline F swap_pairs(F x) { return _mm256_permute_ps(x, 0xb1); }
inline __m128 fold(F x) { return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)); }
inline F interleave_low(F a, F b) { return _mm256_unpacklo_ps(a, b); }
inline F interleave_high(F a, F b) { return _mm256_unpackhi_ps(a, b); }
inline F pair_low(F a, F b) { return _mm256_castpd_ps(_mm256_unpacklo_pd(_mm256_castps_pd(a), _mm256_castps_pd(b))); }
inline F pair_high(F a, F b) { return _mm256_castpd_ps(_mm256_unpackhi_pd(_mm256_castps_pd(a), _mm256_castps_pd(b))); }
inline float maximum(F x) {
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}

#else  // the compiler's own vectors: SSE2, NEON or plain code

constexpr int kLanes = 4;
typedef float F __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));

inline F set1(float x) { return F{x, x, x, x}; }
inline F load(const float* p) {
    F x;
    std::memcpy(&x, p, 16);
    return x;
}
inline void store(float* p, F x) { std::memcpy(p, &x, 16); }
inline F load_first(const float* p, int n) {
    F x = {};
    std::memcpy(&x, p, 4 * n);
    return x;
}
inline void store_first(float* p, F x, int n) { std::memcpy(p, &x, 4 * n); }
inline F load(const uint16_t* p) {
    return F{half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
}
inline F load_first(const uint16_t* p, int n) {
    F x = {};
    for (int i = 0; i < n; i++) x[i] = half_to_float(p[i]);
    return x;
}
inline void store(uint16_t* p, F x) {
    for (int i = 0; i < kLanes; i++) p[i] = float_to_half(x[i]);
}
inline F load(const int8_t* p) { return F{float(p[0]), float(p[1]), float(p[2]), float(p[3])}; }
inline F fma(F a, F b, F c) { return a * b + c; }
inline F neg_fma(F a, F b, F c) { return c - a * b; }
inline F max(F a, F b) { return a > b ? a : b; }
inline F min(F a, F b) { return a < b ? a : b; }
inline F abs(F x) { return (F)((I)x & 0x7fffffff); }
inline F round(F x) {
    const F magic = set1(12582912.0f);  // 1.5 * 2^23: the sum has no bits below 1
    return (x + magic) - magic;
}
inline F times_power_of_two(F x, F n) {
    const I all = __builtin_convertvector(n, I), half = all >> 1;
    return x * (F)((half + 127) << 23) * (F)((all - half + 127) << 23);
}
inline F select_less(F a, F b, F yes, F no) { return a < b ? yes : no; }
inline F with_sign_of(F magnitude, F sign) {
    return (F)(((I)magnitude & 0x7fffffff) | ((I)sign & int32_t(0x80000000)));
}
inline F swap_pairs(F x) { return F{x[1], x[0], x[3], x[2]}; }
inline float sum(F x) { return (x[0] + x[2]) + (x[1] + x[3]); }
inline float maximum(F x) { return std::fmax(std::fmax(x[0], x[2]), std::fmax(x[1], x[3])); }

#endif

// The sums of the lanes of four vectors; each is what `sum` gives.
#if defined(__AVX2__)
inline void sum4(F a, F b, F c, F d, float* out) {
    const F ab = interleave_low(a, b) + interleave_high(a, b), cd = interleave_low(c, d) + interleave_high(c, d);
    _mm_storeu_ps(out, fold(pair_low(ab, cd) + pair_high(ab, cd)));
}
inline float sum(F x) {
    const F pairs = interleave_low(x, x) + interleave_high(x, x);
    return _mm_cvtss_f32(fold(pairs + pair_high(pairs, pairs)));
}
#else
inline void sum4(F a, F b, F c, F d, float* out) {
    out[0] = sum(a);
    out[1] = sum(b);
    out[2] = sum(c);
    out[3] = sum(d);
}
#endif

// e^x: 0 below -104, infinity above 88.8; NaN stays NaN.
inline F exp(F x) {
    x = min(set1(89.0f), max(set1(-104.0f), x));
    const F n = round(x * set1(1.44269504088896341f));
    const F r = neg_fma(n, set1(-2.12194440e-4f), neg_fma(n, set1(0.693359375f), x));
    F p = fma(set1(1.9875691500e-4f), r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    return times_power_of_two(fma(p, r * r, r + set1(1.0f)), n);
}

inline F sigmoid(F x) { return set1(1.0f) / (set1(1.0f) + exp(set1(0.0f) - x)); }

inline F silu(F x) { return x / (set1(1.0f) + exp(set1(0.0f) - x)); }

inline F tanh(F x) {
    const F size = abs(x), z = x * x;
    const F large = with_sign_of(set1(1.0f) - set1(2.0f) / (exp(size + size) + set1(1.0f)), x);
    F p = fma(set1(-5.70498872745e-3f), z, set1(2.06390887954e-2f));
    p = fma(p, z, set1(-5.37397155531e-2f));
    p = fma(p, z, set1(1.33314422036e-1f));
    p = fma(p, z, set1(-3.33332819422e-1f));
    return select_less(size, set1(0.625f), fma(p * z, x, x), large);
}

// The tanh form of GELU.
inline F gelu_tanh(F x) {
    const F inner = set1(0.7978845608028654f) * fma(set1(0.044715f) * x * x, x, x);
    return set1(0.5f) * x * (set1(1.0f) + tanh(inner));
}

template <int... I, class Body>
__attribute__((always_inline)) inline void repeat(std::integer_sequence<int, I...>, Body&& body) {
    (body(std::integral_constant<int, I>()), ...);
}
// body(0) .. body(N - 1) with constant arguments: arrays of vectors indexed by them stay in registers, which loops that
// the compiler unrolls late do not achieve.
template <int N, class Body>
__attribute__((always_inline)) inline void repeat(Body&& body) {
    repeat(std::make_integer_sequence<int, N>(), body);
}

// Calls body(offset, values) over n values; the last call covers what is left.
template <class Body>
inline void over(int64_t n, Body&& body) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) body(i, kLanes);
    if (i < n) body(i, int(n - i));
}

template <class T>
inline F load_some(const T* p, int n) {
    return n == kLanes ? load(p) : load_first(p, n);
}
inline void store_some(float* p, F x, int n) {
    if (n == kLanes) store(p, x);
    else store_first(p, x, n);
}
inline void store_some(uint16_t* p, F x, int n) {
    if (n == kLanes) return store(p, x);
    uint16_t lanes[kLanes];
    store(lanes, x);
    std::memcpy(p, lanes, 2 * n);
}

// <x, y> over n values, in an order that depends on n alone.
template <class T>
inline float dot(const float* x, const T* y, int64_t n) {
    F acc[4] = {set1(0), set1(0), set1(0), set1(0)};
    int64_t i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes)
        for (int j = 0; j < 4; j++) acc[j] = fma(load(x + i + j * kLanes), load(y + i + j * kLanes), acc[j]);
    over(n - i, [&](int64_t at, int count) {
        acc[0] = fma(load_some(x + i + at, count), load_some(y + i + at, count), acc[0]);
    });
    return sum((acc[0] + acc[1]) + (acc[2] + acc[3]));
}

}  // namespace tandem::simd
