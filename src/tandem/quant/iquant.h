// The I types: rows of codebooks with signs, or a non-linear 4-bit table. Meanings: quant/iquant.py.
#pragma once
#include "quant/format.h"

namespace tandem::quant {

inline void signed_values(const uint8_t* magnitudes, int n, uint32_t negative, int8_t* q) {
    for (int i = 0; i < n; i++) q[i] = int8_t(negative >> i & 1 ? -int(magnitudes[i]) : int(magnitudes[i]));
}

struct IQ2_XXS {
    static constexpr int type = 16, block = 256, bytes = 66, group = 32, q_max = 43, offset = 0;
    static constexpr bool is_signed = true, has_min = false;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float*) {
        const float d = read_half(b) * 0.25f;
        for (int g = 0; g < 8; g++) {
            const uint8_t* ids = b + 2 + 8 * g;
            const uint32_t word = read_as<uint32_t>(ids + 4);
            scale[g] = d * (0.5f + float(word >> 28));
            for (int i = 0; i < 4; i++)
                signed_values(grids.iq2xxs[ids[i]], 8, grids.ksigns[word >> 7 * i & 127], q + 32 * g + 8 * i);
        }
    }
};

struct IQ2_XS {
    static constexpr int type = 17, block = 256, bytes = 74, group = 16, q_max = 43, offset = 0;
    static constexpr bool is_signed = true, has_min = false;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float*) {
        const float d = read_half(b) * 0.25f;
        for (int g = 0; g < 16; g++) scale[g] = d * (0.5f + float(b[66 + g / 2] >> 4 * (g % 2) & 15));
        for (int i = 0; i < 32; i++) {
            const uint16_t word = read_as<uint16_t>(b + 2 + 2 * i);
            signed_values(grids.iq2xs[word & 511], 8, grids.ksigns[word >> 9], q + 8 * i);
        }
    }
};

struct IQ2_S {
    static constexpr int type = 22, block = 256, bytes = 82, group = 16, q_max = 43, offset = 0;
    static constexpr bool is_signed = true, has_min = false;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float*) {
        const float d = read_half(b) * 0.25f;
        for (int g = 0; g < 16; g++) scale[g] = d * (0.5f + float(b[74 + g / 2] >> 4 * (g % 2) & 15));
        for (int i = 0; i < 32; i++) {
            const int id = b[2 + i] | (b[66 + i / 4] >> 2 * (i % 4) & 3) << 8;
            signed_values(grids.iq2s[id], 8, b[34 + i], q + 8 * i);
        }
    }
};

struct IQ3_XXS {
    static constexpr int type = 18, block = 256, bytes = 98, group = 32, q_max = 62, offset = 0;
    static constexpr bool is_signed = true, has_min = false;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float*) {
        const float d = read_half(b) * 0.5f;
        for (int g = 0; g < 8; g++) {
            const uint32_t word = read_as<uint32_t>(b + 66 + 4 * g);
            scale[g] = d * (0.5f + float(word >> 28));
            for (int i = 0; i < 8; i++) {
                const uint32_t signs = grids.ksigns[word >> 7 * (i / 2) & 127] >> 4 * (i % 2);
                signed_values(grids.iq3xxs[b[2 + 8 * g + i]], 4, signs, q + 32 * g + 4 * i);
            }
        }
    }
};

struct IQ3_S {
    static constexpr int type = 21, block = 256, bytes = 110, group = 32, q_max = 15, offset = 0;
    static constexpr bool is_signed = true, has_min = false;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float*) {
        const float d = read_half(b);
        for (int g = 0; g < 8; g++) scale[g] = d * float(1 + 2 * (b[106 + g / 2] >> 4 * (g % 2) & 15));
        for (int i = 0; i < 64; i++) {
            const int id = b[2 + i] | (b[66 + i / 8] >> i % 8 & 1) << 8;
            signed_values(grids.iq3s[id], 4, b[74 + i / 2] >> 4 * (i % 2), q + 4 * i);
        }
    }
};

// The shift of 1/8 becomes whole: q = 8 * ternary +- 1 under an eighth of the scale.
inline void shifted_values(const int8_t* ternary, bool negative, int8_t* q) {
    for (int i = 0; i < 8; i++) q[i] = int8_t(8 * ternary[i] + (negative ? -1 : 1));
}

struct IQ1_S {
    static constexpr int type = 19, block = 256, bytes = 50, group = 32, q_max = 9, offset = 0;
    static constexpr bool is_signed = true, has_min = false;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float*) {
        const float d = read_half(b) * 0.125f;
        for (int g = 0; g < 8; g++) {
            const uint16_t word = read_as<uint16_t>(b + 34 + 2 * g);
            scale[g] = d * float(2 * (word >> 12 & 7) + 1);
            for (int i = 0; i < 4; i++) {
                const int id = b[2 + 4 * g + i] | (word >> 3 * i & 7) << 8;
                shifted_values(grids.iq1s[id], word >> 15, q + 32 * g + 8 * i);
            }
        }
    }
};

struct IQ1_M {
    static constexpr int type = 29, block = 256, bytes = 56, group = 16, q_max = 9, offset = 0;
    static constexpr bool is_signed = true, has_min = false;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float*) {
        uint16_t words[4];
        std::memcpy(words, b + 48, 8);
        const float d = half_to_float(uint16_t(words[0] >> 12 | (words[1] >> 12) << 4 | (words[2] >> 12) << 8 |
                                               (words[3] >> 12) << 12)) * 0.125f;
        for (int g = 0; g < 16; g++) scale[g] = d * float(2 * (words[g / 4] >> 3 * (g % 4) & 7) + 1);
        for (int i = 0; i < 32; i++) {
            const int nibble = b[32 + i / 2] >> 4 * (i % 2) & 15;
            shifted_values(grids.iq1s[b[i] | (nibble & 7) << 8], nibble >> 3, q + 8 * i);
        }
    }
};

struct IQ4_NL {
    static constexpr int type = 20, block = 32, bytes = 18, group = 32, q_max = 127, offset = 0;
    static constexpr bool is_signed = true, has_min = false;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float*) {
        scale[0] = read_half(b);
        for (int i = 0; i < 16; i++) {
            q[i] = grids.iq4nl[b[2 + i] & 15];
            q[i + 16] = grids.iq4nl[b[2 + i] >> 4];
        }
    }
#if TANDEM_AVX512
    static __m512i codes(const uint8_t* p) { return look_up(grids.iq4nl, two_blocks_of_nibbles<2, 18>(p)); }
#endif
#if TANDEM_AVX2
    static __m256i codes(const uint8_t* b) { return look_up(grids.iq4nl, split_nibbles(b + 2)); }
#endif
};

struct IQ4_XS {
    static constexpr int type = 23, block = 256, bytes = 136, group = 32, q_max = 127, offset = 0;
    static constexpr bool is_signed = true, has_min = false;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float*) {
        const float d = read_half(b);
        const uint16_t high = read_as<uint16_t>(b + 2);
        for (int g = 0; g < 8; g++) {
            const int s = (b[4 + g / 2] >> 4 * (g % 2) & 15) | (high >> 2 * g & 3) << 4;
            scale[g] = d * float(s - 32);
            for (int i = 0; i < 16; i++) {
                q[32 * g + i] = grids.iq4nl[b[8 + 16 * g + i] & 15];
                q[32 * g + 16 + i] = grids.iq4nl[b[8 + 16 * g + i] >> 4];
            }
        }
    }
#if TANDEM_AVX512
    static Span<4, 8> load(const uint8_t* p) {
        Span<4, 8> s;
        // 64 bytes are four groups of 16: the unit's groups are (low, high) of two of them.
        const __m512i lower = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), upper = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
        for (int h = 0; h < 2; h++) {
            const __m512i packed = _mm512_loadu_si512(p + 8 + 64 * h);
            const __m512i low = look_up(grids.iq4nl, keep(packed, 15));
            const __m512i high = look_up(grids.iq4nl, keep(_mm512_srli_epi16(packed, 4), 15));
            s.q[2 * h] = _mm512_permutex2var_epi64(low, lower, high);
            s.q[2 * h + 1] = _mm512_permutex2var_epi64(low, upper, high);
        }
        const uint64_t codes = _pdep_u64(read_as<uint32_t>(p + 4), 0x0f0f0f0f0f0f0f0f) |
                               _pdep_u64(read_as<uint16_t>(p + 2), 0x3030303030303030);
        s.scale = _mm256_mul_ps(half_times_8(p), _mm256_sub_ps(bytes_to_float8(codes), _mm256_set1_ps(32)));
        return s;
    }
#endif
#if TANDEM_AVX2
    static void unpack_avx2(const uint8_t* b, int8_t* q, float* scale, float*) {
        for (int g = 0; g < 8; g++) store32(q + 32 * g, look_up(grids.iq4nl, split_nibbles(b + 8 + 16 * g)));
        const uint64_t codes = _pdep_u64(read_as<uint32_t>(b + 4), 0x0f0f0f0f0f0f0f0f) |
                               _pdep_u64(read_as<uint16_t>(b + 2), 0x3030303030303030);
        const __m256 d = _mm256_set1_ps(read_half(b));
        _mm256_storeu_ps(scale, _mm256_mul_ps(d, _mm256_sub_ps(bytes_to_float8(codes), _mm256_set1_ps(32))));
    }
#endif
};

}  // namespace tandem::quant
