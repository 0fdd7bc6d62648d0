// Ternary types: 256 values of -1, 0 or 1 under one f16 scale at the end. Meanings: quant/ternary.py.
#pragma once
#include "quant/lanes.h"

namespace tandem::quant {

// x * 3 >> 8 of each byte; averages round up, hence the 1.
#if TANDEM_AVX512
inline __m512i top_digits(__m512i x) {
    x = _mm512_subs_epu8(x, _mm512_set1_epi8(1));
    const __m512i three_quarters = _mm512_avg_epu8(x, _mm512_avg_epu8(x, _mm512_setzero_si512()));
    return keep(_mm512_srli_epi16(three_quarters, 6), 3);
}
#elif TANDEM_AVX2
inline __m256i top_digits(__m256i x) {
    x = _mm256_subs_epu8(x, _mm256_set1_epi8(1));
    const __m256i three_quarters = _mm256_avg_epu8(x, _mm256_avg_epu8(x, _mm256_setzero_si256()));
    return keep(_mm256_srli_epi16(three_quarters, 6), 3);
}
inline __m256i times_3(__m256i x) { return _mm256_add_epi8(_mm256_add_epi8(x, x), x); }
#endif

struct TQ1_0 {
    static constexpr int type = 34, block = 256, bytes = 54, group = 32, q_max = 2, offset = 1;
    static constexpr bool is_signed = false, has_min = false;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float*) {
        const float d = read_half(b + 52);
        for (int g = 0; g < 8; g++) scale[g] = d;
        digits(b, 32, 5, q);
        digits(b + 32, 16, 5, q + 160);
        digits(b + 48, 4, 4, q + 240);
    }
#if TANDEM_AVX512
    static Span<4, 8> load(const uint8_t* p) {
        alignas(64) static constexpr auto plan = [] {
            struct { uint8_t at[256], power[256]; } made{};  // of each value: its byte, 3^k
            for (int i = 0; i < 256; i++) {
                const int k = i < 160 ? i / 32 : i < 240 ? (i - 160) / 16 : (i - 240) / 4;
                made.at[i] = uint8_t(i < 160 ? i % 32 : i < 240 ? 32 + i % 16 : 48 + i % 4);
                made.power[i] = uint8_t(k == 0 ? 1 : k == 1 ? 3 : k == 2 ? 9 : k == 3 ? 27 : 81);
            }
            return made;
        }();
        Span<4, 8> s;
        const __m512i bytes = load_bytes<52>(p), even = _mm512_set1_epi16(255);
        for (int u = 0; u < 4; u++) {
            const __m512i own = _mm512_permutexvar_epi8(_mm512_load_si512(plan.at + 64 * u), bytes);
            const __m512i power = _mm512_load_si512(plan.power + 64 * u);
            const __m512i first = _mm512_maddubs_epi16(own, _mm512_and_si512(power, even));
            const __m512i second = _mm512_maddubs_epi16(own, _mm512_andnot_si512(even, power));
            const __m512i left = _mm512_ternarylogic_epi32(even, first, _mm512_slli_epi16(second, 8), 0xca);
            s.q[u] = top_digits(left);
        }
        s.scale = half_times_8(p + 52);
        return s;
    }
#endif
#if TANDEM_AVX2
    static void unpack_avx2(const uint8_t* b, int8_t* q, float* scale, float*) {
        _mm256_storeu_ps(scale, _mm256_set1_ps(read_half(b + 52)));
        __m256i whole = load32(b);
        for (int k = 0; k < 5; k++, whole = times_3(whole)) store32(q + 32 * k, top_digits(whole));
        // 16 bytes and their triples, then 9 times both; the last 16 values: 4 bytes, their triples, ...
        const __m128i half = _mm_loadu_si128((const __m128i*)(b + 32));
        __m256i pair = _mm256_set_m128i(_mm_add_epi8(_mm_add_epi8(half, half), half), half);
        store32(q + 160, top_digits(pair));
        pair = times_3(times_3(pair));
        store32(q + 192, top_digits(pair));
        const __m128i four = _mm_cvtsi32_si128(read_as<int>(b + 48));
        const __m128i two = _mm_unpacklo_epi32(four, _mm_add_epi8(_mm_add_epi8(four, four), four));
        const __m128i nine = _mm256_castsi256_si128(times_3(times_3(_mm256_castsi128_si256(two))));
        const __m128i top = _mm256_castsi256_si128(times_3(times_3(pair)));
        store32(q + 224, top_digits(_mm256_set_m128i(_mm_unpacklo_epi64(two, nine), top)));
    }
#endif

private:
    // Digit k of a byte is the top base-3 digit of byte * 3^k mod 256.
    static void digits(const uint8_t* b, int count, int per_byte, int8_t* q) {
        uint8_t power = 1;
        for (int k = 0; k < per_byte; k++, power = uint8_t(power * 3))
            for (int i = 0; i < count; i++) q[k * count + i] = int8_t(uint8_t(b[i] * power) * 3 >> 8);
    }
};

struct TQ2_0 {
    static constexpr int type = 35, block = 256, bytes = 66, group = 32, q_max = 3, offset = 1;
    static constexpr bool is_signed = false, has_min = false;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float*) {
        const float d = read_half(b + 64);
        for (int g = 0; g < 8; g++) scale[g] = d;
        for (int half = 0; half < 2; half++)
            for (int part = 0; part < 4; part++)
                for (int i = 0; i < 32; i++)
                    q[128 * half + 32 * part + i] = int8_t(b[32 * half + i] >> 2 * part & 3);
    }
#if TANDEM_AVX512
    static Span<4, 8> load(const uint8_t* p) {
        Span<4, 8> s;
        for (int u = 0; u < 4; u++) {
            const int part = 4 * (u % 2);
            s.q[u] = keep(shift_right(load_twice(p + 32 * (u / 2)), part, part + 2), 3);
        }
        s.scale = half_times_8(p + 64);
        return s;
    }
    static LaneSpan lanes(const uint8_t* p) {
        LaneSpan s;
        const __m512i packed = _mm512_loadu_si512(p);
        for (int u = 0; u < 4; u++) s.q[u] = kTwoBits.take(u, packed);
        s.scale = half_times_16(p + 64);
        return s;
    }
#endif
#if TANDEM_AVX2
    static void unpack_avx2(const uint8_t* b, int8_t* q, float* scale, float*) {
        _mm256_storeu_ps(scale, _mm256_set1_ps(read_half(b + 64)));
        for (int h = 0; h < 2; h++) {
            const __m256i codes = load32(b + 32 * h);
            for (int part = 0; part < 4; part++)
                store32(q + 128 * h + 32 * part, keep(_mm256_srli_epi16(codes, 2 * part), 3));
        }
    }
#endif
};

}  // namespace tandem::quant
