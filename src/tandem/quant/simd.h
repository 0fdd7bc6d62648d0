// The vector of floats of the instruction set that this translation unit is compiled for, and number conversions.
// Vec has 16, 8 or 4 lanes (AVX-512, AVX2, else). Nothing here reads past the counts it is given.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
// GCC 12 warns about the undefined operands inside its own intrinsics.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__) && defined(__AVX512BW__) && defined(__AVX512VL__) && \
    defined(__GFNI__)
#define TANDEM_AVX512 1
#define TANDEM_AVX2 0
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define TANDEM_AVX512 0
#define TANDEM_AVX2 1
#else
#define TANDEM_AVX512 0
#define TANDEM_AVX2 0
#endif

namespace tandem {

inline float bits_to_float(uint32_t bits) {
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

template <class T>
inline T read_as(const uint8_t* p) {
    T v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline float half_to_float(uint16_t h) {
#if TANDEM_AVX512 || TANDEM_AVX2
    return _cvtsh_ss(h);
#else
    const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    if (rest >= 0x0400) return bits_to_float(sign | ((rest << 13) + (112u << 23)));
    const float small = float(rest) * 0x1p-24f;  // zero and subnormals
    return sign ? -small : small;
#endif
}

inline float read_half(const uint8_t* p) { return half_to_float(read_as<uint16_t>(p)); }
inline float bf16_to_float(uint16_t b) { return bits_to_float(uint32_t(b) << 16); }

#if TANDEM_AVX512
struct Vec {
    static constexpr int lanes = 16;
    __m512 v;
    static Vec set(float x) { return {_mm512_set1_ps(x)}; }
    static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
    static Vec load(const float* p, int n) { return {_mm512_maskz_loadu_ps(mask(n), p)}; }
    static Vec load_half(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
    static Vec load_half(const uint16_t* p, int n) { return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask(n), p))}; }
    static Vec load_bf16(const uint16_t* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
    static Vec load_bf16(const uint16_t* p, int n) { return widen(_mm256_maskz_loadu_epi16(mask(n), p)); }
    void store(float* p) const { _mm512_storeu_ps(p, v); }
    void store(float* p, int n) const { _mm512_mask_storeu_ps(p, mask(n), v); }
    float sum() const { return _mm512_reduce_add_ps(v); }
    float max() const { return _mm512_reduce_max_ps(v); }

private:
    static __mmask16 mask(int n) { return __mmask16((1u << n) - 1); }
    static Vec widen(__m256i b) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16))}; }
};
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Of two operands, NaN in the second one passes through min and max.
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec abs(Vec a) { return {_mm512_abs_ps(a.v)}; }
inline Vec round(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// 2^n for whole n in -126..127.
inline Vec exp2_whole(Vec n) {
    return {
        _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))};
}
#elif TANDEM_AVX2
struct Vec {
    static constexpr int lanes = 8;
    __m256 v;
    static Vec set(float x) { return {_mm256_set1_ps(x)}; }
    static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
    static Vec load(const float* p, int n) { return {_mm256_maskload_ps(p, mask(n))}; }
    static Vec load_half(const uint16_t* p) { return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p))}; }
    static Vec load_half(const uint16_t* p, int n) {
        uint16_t copy[8] = {};
        std::memcpy(copy, p, 2 * size_t(n));
        return load_half(copy);
    }
    static Vec load_bf16(const uint16_t* p) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
        return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
    }
    static Vec load_bf16(const uint16_t* p, int n) {
        uint16_t copy[8] = {};
        std::memcpy(copy, p, 2 * size_t(n));
        return load_bf16(copy);
    }
    void store(float* p) const { _mm256_storeu_ps(p, v); }
    void store(float* p, int n) const { _mm256_maskstore_ps(p, mask(n), v); }
    float sum() const {
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        s = _mm_add_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
    }
    float max() const {
        __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        s = _mm_max_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
    }

private:
    static __m256i mask(int n) {
        return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    }
};
inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec abs(Vec a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline Vec round(Vec a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec exp2_whole(Vec n) {
    return {
        _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23))};
}
#else
struct Vec {
    static constexpr int lanes = 4;
    typedef float Lanes __attribute__((vector_size(16)));
    Lanes v;
    static Vec set(float x) { return {Lanes{x, x, x, x}}; }
    static Vec load(const float* p) {
        Vec r;
        std::memcpy(&r.v, p, 16);
        return r;
    }
    static Vec load(const float* p, int n) {
        Vec r = set(0);
        std::memcpy(&r.v, p, 4 * size_t(n));
        return r;
    }
    static Vec load_half(const uint16_t* p, int n = 4) {
        Vec r = set(0);
        for (int i = 0; i < n; i++) r.v[i] = half_to_float(p[i]);
        return r;
    }
    static Vec load_bf16(const uint16_t* p, int n = 4) {
        Vec r = set(0);
        for (int i = 0; i < n; i++) r.v[i] = bf16_to_float(p[i]);
        return r;
    }
    void store(float* p) const { std::memcpy(p, &v, 16); }
    void store(float* p, int n) const { std::memcpy(p, &v, 4 * size_t(n)); }
    float sum() const { return (v[0] + v[2]) + (v[1] + v[3]); }
    float max() const {
        float m = v[0];
        for (int i = 1; i < 4; i++) m = v[i] > m ? v[i] : m;
        return m;
    }
};
inline Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
inline Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
inline Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
inline Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
inline Vec min(Vec a, Vec b) { return {a.v < b.v ? a.v : b.v}; }
inline Vec max(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }
inline Vec abs(Vec a) { return {a.v < 0 ? -a.v : a.v}; }
// To nearest even, exact for |a| < 2^22.
inline Vec round(Vec a) {
    const Vec shift = Vec::set(12582912.0f);
    return a + shift - shift;
}
inline Vec exp2_whole(Vec n) {
    Vec r = n;
    for (int i = 0; i < 4; i++)
        r.v[i] = n.v[i] == n.v[i] ? bits_to_float(uint32_t(int32_t(n.v[i]) + 127) << 23) : n.v[i];
    return r;
}
#endif

// e^x, relative error below 3e-7; saturates instead of overflowing (about 2e38) and underflowing (about 1e-38).
inline Vec exp(Vec x) {
    x = min(Vec::set(88.0f), max(Vec::set(-87.3f), x));
    const Vec n = round(x * Vec::set(1.44269504f));
    Vec r = fma(n, Vec::set(-0.693359375f), x);
    r = fma(n, Vec::set(2.12194440e-4f), r);
    Vec p = Vec::set(1.0f / 5040);
    const float factors[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    for (float factor : factors) p = fma(p, r, Vec::set(factor));
    return p * exp2_whole(n);
}

inline Vec sigmoid(Vec x) { return Vec::set(1) / (Vec::set(1) + exp(Vec::set(0) - x)); }
inline Vec silu(Vec x) { return x / (Vec::set(1) + exp(Vec::set(0) - x)); }
inline Vec tanh(Vec x) { return Vec::set(1) - Vec::set(2) / (Vec::set(1) + exp(x + x)); }
// 0.5 x (1 + tanh(u)) = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
inline Vec gelu_tanh(Vec x) {
    const Vec u = x * fma(x * x, Vec::set(0.044715f), Vec::set(1));
    return x / (Vec::set(1) + exp(u * Vec::set(-1.5957691216f)));
}

}  // namespace tandem
