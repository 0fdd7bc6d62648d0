// The I types of four bits: codes into a non-linear table of 16 values. Meanings: quant/iquant.py.
#pragma once
#include "quant/lanes.h"

namespace tandem::quant {

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
    template <class At>
    static void lane_codes(At at, __m512i* q) {
        lane_nibbles(at, 2, grids.iq4nl_128, q);
    }
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
    static __m256 factors(const uint8_t* p) {
        const uint64_t codes = _pdep_u64(read_as<uint32_t>(p + 4), 0x0f0f0f0f0f0f0f0f) |
                               _pdep_u64(read_as<uint16_t>(p + 2), 0x3030303030303030);
        return _mm256_mul_ps(half_times_8(p), _mm256_sub_ps(bytes_to_float8(codes), _mm256_set1_ps(32)));
    }
    static Span<4, 8> load(const uint8_t* p) {
        Span<4, 8> s;
        // 64 bytes are four groups of 16: the unit's groups are (low, high) of two of them.
        const __m512i lower = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
        const __m512i upper = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
        for (int h = 0; h < 2; h++) {
            const __m512i packed = _mm512_loadu_si512(p + 8 + 64 * h);
            const __m512i low = look_up(grids.iq4nl, keep(packed, 15));
            const __m512i high = look_up(grids.iq4nl, keep(_mm512_srli_epi16(packed, 4), 15));
            s.q[2 * h] = _mm512_permutex2var_epi64(low, lower, high);
            s.q[2 * h + 1] = _mm512_permutex2var_epi64(low, upper, high);
        }
        s.scale = factors(p);
        return s;
    }
    static LaneSpan lanes(const uint8_t* p) {
        LaneSpan s;
        const __m512i first = _mm512_loadu_si512(p + 8), second = _mm512_loadu_si512(p + 72);
        for (int u = 0; u < 4; u++)
            s.q[u] = look_up_low(four_times(grids.iq4nl_128), group_nibbles(u, first, second));
        // Half scale, two high bits of each group's scale, low nibbles.
        alignas(64) static constexpr ScaleTable table =
            scale_table([](int l) { return 4 + l / 4; }, [](int l) { return 4 * (l / 2 % 2); },
                        [](int l) { return 2 + l / 8; }, [](int l) { return 2 * (l / 2 % 4); });
        const __m512i codes = six_bits(table, _mm512_set1_epi64(read_as<long long>(p)));
        s.scale = _mm512_mul_ps(half_times_16(p), _mm512_cvtepi32_ps(_mm512_sub_epi32(codes, _mm512_set1_epi32(32))));
        return s;
    }
#endif
#if TANDEM_AVX2
    static void unpack_avx2(const uint8_t* b, int8_t* q, float* scale, float* bias) {
        for (int g = 0; g < 8; g++) store32(q + 32 * g, look_up(grids.iq4nl, split_nibbles(b + 8 + 16 * g)));
        factors_avx2(b, scale, bias);
    }
    // In lane u of 128 bits the dwords u of four groups: low nibbles are their first halves, high ones the others.
    static void lanes_avx2(const uint8_t* b, int part, __m256i* q) {
        const __m128i* p = (const __m128i*)(b + 8 + 64 * part);
        const __m128i w = _mm_loadu_si128(p), x = _mm_loadu_si128(p + 1);
        const __m128i y = _mm_loadu_si128(p + 2), z = _mm_loadu_si128(p + 3);
        const __m128i low[2] = {_mm_unpacklo_epi32(w, x), _mm_unpacklo_epi32(y, z)};
        const __m128i high[2] = {_mm_unpackhi_epi32(w, x), _mm_unpackhi_epi32(y, z)};
        const __m128i dwords[4] = {_mm_unpacklo_epi64(low[0], low[1]), _mm_unpackhi_epi64(low[0], low[1]),
                                   _mm_unpacklo_epi64(high[0], high[1]), _mm_unpackhi_epi64(high[0], high[1])};
        for (int u = 0; u < 4; u++) {
            const __m256i both = _mm256_set_m128i(_mm_srli_epi16(dwords[u], 4), dwords[u]);
            q[u] = look_up(grids.iq4nl, keep(both, 15));
        }
    }
    static void factors_avx2(const uint8_t* b, float* scale, float*) {
        const uint64_t codes = _pdep_u64(read_as<uint32_t>(b + 4), 0x0f0f0f0f0f0f0f0f) |
                               _pdep_u64(read_as<uint16_t>(b + 2), 0x3030303030303030);
        const __m256 d = _mm256_set1_ps(read_half(b));
        _mm256_storeu_ps(scale, _mm256_mul_ps(d, _mm256_sub_ps(bytes_to_float8(codes), _mm256_set1_ps(32))));
    }
#endif
};

}  // namespace tandem::quant
