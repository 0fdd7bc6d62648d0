// FP4 types: doubled E2M1 values under small float scales. Meanings: quant/mxfp.py.
#pragma once
#include "quant/lanes.h"

namespace tandem::quant {

// 2^(code - 128): half of the E8M0 number, which undoes the doubling.
inline float half_e8m0(uint8_t code) {
    return bits_to_float(code < 2 ? 0x00200000u << code : uint32_t(code - 1) << 23);
}

// Half of an unsigned E4M3 number; the NaN code 0x7F means 0.
inline float half_e4m3(uint8_t code) {
    const uint32_t exponent = code >> 3 & 15, mantissa = code & 7;
    if (code == 0x7f) return 0;
    return exponent == 0 ? float(mantissa) * 0x1p-10f : bits_to_float((exponent + 119) << 23 | mantissa << 20);
}

struct MXFP4 {
    static constexpr int type = 39, block = 32, bytes = 17, group = 32, q_max = 12, offset = 0;
    static constexpr bool is_signed = true, has_min = false;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float*) {
        scale[0] = half_e8m0(b[0]);
        for (int i = 0; i < 16; i++) {
            q[i] = grids.e2m1[b[1 + i] & 15];
            q[i + 16] = grids.e2m1[b[1 + i] >> 4];
        }
    }
#if TANDEM_AVX512
    static __m512i codes(const uint8_t* p) { return look_up(grids.e2m1, two_blocks_of_nibbles<1, 17>(p)); }
    template <class At>
    static void lane_codes(At at, __m512i* q) {
        lane_nibbles(at, 1, grids.e2m1_128, q);
    }
    static __m256 scales(const uint32_t* firsts) {
        const __m256i codes = _mm256_and_si256(_mm256_loadu_si256((const __m256i*)firsts), _mm256_set1_epi32(0xff));
        const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(codes, _mm256_set1_epi32(1)), 23);
        const __mmask8 tiny = _mm256_cmplt_epi32_mask(codes, _mm256_set1_epi32(2));
        return _mm256_castsi256_ps(_mm256_mask_sllv_epi32(normal, tiny, _mm256_set1_epi32(0x00200000), codes));
    }
#endif
#if TANDEM_AVX2
    static void unpack_avx2(const uint8_t* b, int8_t* q, float* scale, float*) {
        scale[0] = half_e8m0(b[0]);
        store32(q, look_up(grids.e2m1, split_nibbles(b + 1)));
    }
#endif
};

struct NVFP4 {
    static constexpr int type = 40, block = 64, bytes = 36, group = 16, q_max = 12, offset = 0;
    static constexpr bool is_signed = true, has_min = false;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float*) {
        for (int g = 0; g < 4; g++) {
            scale[g] = half_e4m3(b[g]);
            for (int i = 0; i < 8; i++) {
                q[16 * g + i] = grids.e2m1[b[4 + 8 * g + i] & 15];
                q[16 * g + 8 + i] = grids.e2m1[b[4 + 8 * g + i] >> 4];
            }
        }
    }
#if TANDEM_AVX512
    static Span<1, 4> load(const uint8_t* p) {
        Span<1, 4> s;
        const __m256i packed = _mm256_loadu_si256((const __m256i*)(p + 4));
        // Each 8 bytes twice: their low nibbles, then their high ones.
        const __m512i twice =
            _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3), _mm512_castsi256_si512(packed));
        s.q[0] = look_up(grids.e2m1, keep(_mm512_srlv_epi64(twice, _mm512_setr_epi64(0, 4, 0, 4, 0, 4, 0, 4)), 15));
        // An E4M3 code shifted into a half is 2^-8 of its value; half of that is wanted.
        const __m128i codes = _mm_cvtepu8_epi16(_mm_cvtsi32_si128(read_as<int>(p)));
        const __m128i bits = _mm_slli_epi16(_mm_and_si128(codes, _mm_set1_epi16(0x7f)), 7);
        const __m128i valid = _mm_maskz_mov_epi16(_mm_cmpneq_epi16_mask(codes, _mm_set1_epi16(0x7f)), bits);
        s.scale = _mm_mul_ps(_mm_cvtph_ps(valid), _mm_set1_ps(128));
        return s;
    }
#endif
#if TANDEM_AVX2
    static void unpack_avx2(const uint8_t* b, int8_t* q, float* scale, float*) {
        for (int g = 0; g < 4; g++) scale[g] = half_e4m3(b[g]);
        for (int h = 0; h < 2; h++) {
            // Each 8 bytes twice: their low nibbles, then their high ones.
            const __m256i twice = _mm256_permute4x64_epi64(
                _mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)(b + 4 + 16 * h))), 0x50);
            store32(q + 32 * h,
                    look_up(grids.e2m1, keep(_mm256_srlv_epi64(twice, _mm256_setr_epi64x(0, 4, 0, 4)), 15)));
        }
    }
#endif
};

}  // namespace tandem::quant
