// What a quantized type states about itself, so that one dot product and one matrix product serve all of them.
//
// A format is a struct:
//   static constexpr int type;        GGUF type id
//   static constexpr int block;       values per block: 32, 64 or 256
//   static constexpr int bytes;       bytes per block
//   static constexpr int group;       values per scale: 16 or 32
//   static constexpr int q_max;       upper bound of |q|, at most 128 (AVX2 sums products of it in 16 bits)
//   static constexpr int offset;      subtracted from every q, so that q can be stored unsigned; 0 for signed q
//   static constexpr bool is_signed;  whether q may be negative; if not, q <= 127
//   static constexpr bool has_min;    whether there is a bias besides the offset (then offset is 0)
//   static void unpack(const uint8_t* b, int8_t* q, float* scale, float* bias);   plain C++, mandatory
// meaning: value[i] = scale[i / group] * (q[i] - offset) + bias[i / group]; bias is not written without has_min.
//
// Faster ways to say the same, used where present:
//   static void unpack_avx2(same arguments)         under TANDEM_AVX2; q is 32-byte aligned
//   static void lanes_avx2(const uint8_t*, int part, __m256i* q) and factors_avx2(const uint8_t*, float*, float*), for
//     blocks of 256: half of the values in the lanes of ops/matmul.h, and scale and bias alone
//   static Span<Units, Groups> load(const uint8_t*)  under TANDEM_AVX512: the next span of max(block, 64) values in
//     registers, Units = span / 64, Groups = span / group. Must not touch bytes after the span (masked loads do).
//   static __m256i or __m512i codes(const uint8_t*)  instead of either, for blocks of 32 values that begin with a half
//     scale and, with has_min, a half bias: the q of one block (AVX2) or of two (AVX-512)
//   static __m256 scales(const uint32_t* firsts)     beside codes, if the scale is something else: the scales of eight
//     blocks, given the first four bytes of each
#pragma once
#include <type_traits>

#include "quant/simd.h"

namespace tandem::quant {

template <class F, class = void> struct HasLoad : std::false_type {};
template <class F> struct HasLoad<F, std::void_t<decltype(&F::load)>> : std::true_type {};
template <class F, class = void> struct HasCodes : std::false_type {};
template <class F> struct HasCodes<F, std::void_t<decltype(sizeof(F::codes(nullptr)))>> : std::true_type {};
template <class F, class = void> struct HasAvx2 : std::false_type {};
template <class F> struct HasAvx2<F, std::void_t<decltype(&F::unpack_avx2)>> : std::true_type {};
template <class F, class = void> struct HasLanesAvx2 : std::false_type {};
template <class F>
struct HasLanesAvx2<F, std::void_t<decltype(F::lanes_avx2(nullptr, 0, nullptr))>> : std::true_type {};
template <class F, class = void> struct HasScales : std::false_type {};
template <class F> struct HasScales<F, std::void_t<decltype(sizeof(F::scales(nullptr)))>> : std::true_type {};

template <class F>
constexpr int kSpan = HasCodes<F>::value ? 256 : F::block < 64 ? 64 : F::block;  // values per step of the drivers
template <class F>
constexpr int kSpanBytes = kSpan<F> / F::block * F::bytes;

#if TANDEM_AVX512
// N floats in the smallest register that holds them; lanes past N are zero and stay so.
template <int N> struct Lanes;
template <> struct Lanes<2> {
    using V = __m128;
    static V load(const float* p) { return _mm_castsi128_ps(_mm_loadl_epi64((const __m128i*)p)); }
    static void store(float* p, V a) { _mm_storel_epi64((__m128i*)p, _mm_castps_si128(a)); }
};
template <> struct Lanes<4> {
    using V = __m128;
    static V load(const float* p) { return _mm_loadu_ps(p); }
    static void store(float* p, V a) { _mm_storeu_ps(p, a); }
};
template <> struct Lanes<8> {
    using V = __m256;
    static V load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, V a) { _mm256_storeu_ps(p, a); }
};
template <> struct Lanes<16> {
    using V = __m512;
    static V load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, V a) { _mm512_storeu_ps(p, a); }
};

inline __m128 mul(__m128 a, __m128 b) { return _mm_mul_ps(a, b); }
inline __m256 mul(__m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
inline __m512 mul(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }
inline __m128 mul_add(__m128 a, __m128 b, __m128 c) { return _mm_fmadd_ps(a, b, c); }
inline __m256 mul_add(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
inline __m512 mul_add(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
inline __m128 times(__m128 a, float f) { return _mm_mul_ps(a, _mm_set1_ps(f)); }
inline __m256 times(__m256 a, float f) { return _mm256_mul_ps(a, _mm256_set1_ps(f)); }
inline __m512 times(__m512 a, float f) { return _mm512_mul_ps(a, _mm512_set1_ps(f)); }
inline __m512 widen(__m128 a) { return _mm512_castps128_ps512(a); }
inline __m512 widen(__m256 a) { return _mm512_castps256_ps512(a); }
inline __m512 widen(__m512 a) { return a; }

// The first N bytes at p; bytes past them are not touched and read as zero.
template <int N>
inline __m512i load_bytes(const uint8_t* p) {
    if constexpr (N == 64) return _mm512_loadu_si512(p);
    else return _mm512_maskz_loadu_epi8((1ull << N) - 1, p);
}
// The 32 bytes at p, twice.
inline __m512i load_twice(const uint8_t* p) { return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)p)); }
// Per 16-bit word: shifts of the lower and of the upper 32 bytes. Bits cross bytes: mask afterwards.
inline __m512i half_shifts(int lower, int upper) {
    return _mm512_inserti64x4(_mm512_set1_epi16(short(lower)), _mm256_set1_epi16(short(upper)), 1);
}
inline __m512i shift_right(__m512i v, int lower, int upper) { return _mm512_srlv_epi16(v, half_shifts(lower, upper)); }
inline __m512i shift_left(__m512i v, int lower, int upper) { return _mm512_sllv_epi16(v, half_shifts(lower, upper)); }
// a | (b & mask)
inline __m512i merge(__m512i a, __m512i b, int mask) {
    return _mm512_ternarylogic_epi32(a, b, _mm512_set1_epi8(char(mask)), 0xf8);
}
inline __m512i keep(__m512i a, int mask) { return _mm512_and_si512(a, _mm512_set1_epi8(char(mask))); }
// Two bit patterns of halves as floats, then zeros.
inline __m128 two_halves(uint32_t bits) { return _mm_cvtph_ps(_mm_cvtsi32_si128(int(bits))); }
inline __m256 half_times_8(const uint8_t* p) { return _mm256_cvtph_ps(_mm_set1_epi16(read_as<short>(p))); }
inline __m512 half_times_16(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_set1_epi16(read_as<short>(p))); }
inline __m256 bytes_to_float8(uint64_t bytes) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)bytes)));
}

// Nibbles of two 32-value blocks, 16 bytes at First and First + Stride, into 64 values (low nibbles first in each
// block).
template <int First, int Stride>
inline __m512i two_blocks_of_nibbles(const uint8_t* p) {
    alignas(64) static constexpr auto index = [] {
        struct { uint8_t at[64]; } made{};
        for (int i = 0; i < 64; i++) made.at[i] = uint8_t(First + i / 32 * Stride + i % 16);
        return made;
    }();
    alignas(64) static constexpr auto shift = [] {
        struct { uint16_t by[32]; } made{};
        for (int i = 0; i < 32; i++) made.by[i] = i / 8 % 2 ? 4 : 0;
        return made;
    }();
    const __m512i bytes = _mm512_permutexvar_epi8(_mm512_load_si512(index.at), load_bytes<First + Stride + 16>(p));
    return keep(_mm512_srlv_epi16(bytes, _mm512_load_si512(shift.by)), 15);
}

inline __m512i look_up(const int8_t* table16, __m512i codes) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table16)), codes);
}

// 64 * Units values: q[u] holds 64 of them in order; lane g of scale and bias belongs to values g*group .. .
// bias need not be set without has_min.
template <int Units, int Groups>
struct Span {
    __m512i q[Units];
    typename Lanes<Groups>::V scale, bias;
};
#endif

#if TANDEM_AVX2
inline __m256i load32(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline void store32(int8_t* q, __m256i v) { _mm256_store_si256((__m256i*)q, v); }
inline __m256i keep(__m256i a, int mask) { return _mm256_and_si256(a, _mm256_set1_epi8(char(mask))); }
// 16 bytes of nibbles -> 32 values, low nibbles first.
inline __m256i split_nibbles(const uint8_t* p) {
    const __m128i packed = _mm_loadu_si128((const __m128i*)p);
    return keep(_mm256_set_m128i(_mm_srli_epi16(packed, 4), packed), 15);
}
inline __m256i look_up(const int8_t* table16, __m256i codes) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table16)), codes);
}
inline __m256 bytes_to_float8(uint64_t bytes) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)bytes)));
}
#endif

// One block in memory, by the fastest way the format has.
template <class F>
inline void unpack_block(const uint8_t* b, int8_t* q, float* scale, float* bias) {
    if constexpr (HasAvx2<F>::value) {
        F::unpack_avx2(b, q, scale, bias);
#if TANDEM_AVX2
    } else if constexpr (HasCodes<F>::value) {
        store32(q, F::codes(b));
        scale[0] = read_half(b);
        if constexpr (F::has_min) bias[0] = read_half(b + 2);
#endif
    } else {
        F::unpack(b, q, scale, bias);
    }
}

// Consecutive blocks in memory.
template <class F, int N>
inline void unpack_blocks(const uint8_t* b, int8_t* q, float* scale, float* bias) {
#if TANDEM_AVX2
    if constexpr (HasCodes<F>::value && N == 8) {
        // The halves of all blocks are widened together.
        uint32_t first[8];
        for (int i = 0; i < 8; i++) {
            store32(q + 32 * i, F::codes(b + i * F::bytes));
            first[i] = read_as<uint32_t>(b + i * F::bytes);
        }
        const __m256i both = load32((const uint8_t*)first);
        auto widen = [](__m256i v) {
            const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(v, v), 0x08);
            return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
        };
        _mm256_storeu_ps(scale, widen(_mm256_and_si256(both, _mm256_set1_epi32(0xffff))));
        if constexpr (F::has_min) _mm256_storeu_ps(bias, widen(_mm256_srli_epi32(both, 16)));
        return;
    }
#endif
    constexpr int groups = F::block / F::group;
    for (int i = 0; i < N; i++)
        unpack_block<F>(b + i * F::bytes, q + i * F::block, scale + i * groups, bias + i * groups);
}

#if TANDEM_AVX512
template <class F>
using SpanOf = Span<kSpan<F> / 64, kSpan<F> / F::group>;

// Two blocks of a format with `codes`.
template <class F>
inline Span<1, 2> load_pair(const uint8_t* p) {
    const uint32_t first[8] = {read_as<uint32_t>(p), read_as<uint32_t>(p + F::bytes)};
    Span<1, 2> s;
    s.q[0] = F::codes(p);
    if constexpr (HasScales<F>::value) s.scale = _mm256_castps256_ps128(F::scales(first));
    else s.scale = two_halves((first[0] & 0xffff) | first[1] << 16);
    if constexpr (F::has_min) s.bias = two_halves(first[0] >> 16 | (first[1] & 0xffff0000));
    return s;
}

// Eight blocks of a format with `codes`: the halves of all of them are widened together.
template <class F>
inline Span<4, 8> load_eight(const uint8_t* p) {
    Span<4, 8> s;
    for (int u = 0; u < 4; u++) s.q[u] = F::codes(p + 2 * u * F::bytes);
    uint32_t first[8];
    for (int i = 0; i < 8; i++) first[i] = read_as<uint32_t>(p + i * F::bytes);
    const __m256i both = _mm256_loadu_si256((const __m256i*)first);
    if constexpr (HasScales<F>::value) s.scale = F::scales(first);
    else s.scale = _mm256_cvtph_ps(_mm256_cvtepi32_epi16(both));
    if constexpr (F::has_min) s.bias = _mm256_cvtph_ps(_mm256_cvtepi32_epi16(_mm256_srli_epi32(both, 16)));
    return s;
}

template <class F>
inline SpanOf<F> load_span(const uint8_t* p) {
    if constexpr (HasCodes<F>::value) {
        return load_eight<F>(p);
    } else if constexpr (HasLoad<F>::value) {
        return F::load(p);
    } else {
        constexpr int span = kSpan<F>, groups = span / F::group;
        alignas(64) int8_t q[span];
        alignas(64) float scale[groups], bias[groups];
        for (int i = 0; i < span / F::block; i++) {
            constexpr int per_block = F::block / F::group;
            F::unpack(p + i * F::bytes, q + i * F::block, scale + i * per_block, bias + i * per_block);
        }
        SpanOf<F> s;
        for (int u = 0; u < span / 64; u++) s.q[u] = _mm512_load_si512(q + 64 * u);
        s.scale = Lanes<groups>::load(scale);
        if constexpr (F::has_min) s.bias = Lanes<groups>::load(bias);
        return s;
    }
}
#endif

// Codebooks of the IQ and FP4 types, handed over once by `tandem_set_grid`; see quant/iquant_grids.py for meanings.
struct Grids {
    alignas(64) uint8_t iq2xxs[256][8];
    alignas(64) uint8_t iq2xs[512][8];
    alignas(64) uint8_t iq2s[1024][8];
    alignas(64) uint8_t iq3xxs[256][4];
    alignas(64) uint8_t iq3s[512][4];
    alignas(64) uint8_t iq1s[2048][8];  // plus 1: 0, 1, 2
    alignas(64) uint8_t ksigns[128];
    alignas(64) int8_t iq4nl[16];
    alignas(64) int8_t e2m1[16];
    alignas(64) uint8_t iq3xxs_columns[4][256];  // the same rows, transposed
    alignas(64) int8_t iq4nl_128[16], e2m1_128[16];  // plus 128
};
extern Grids grids;

}  // namespace tandem::quant
