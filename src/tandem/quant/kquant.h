// The K types: super-blocks of 256 values under f16 scales of small integer scales. Meanings: quant/kquant.py.
#pragma once
#include "quant/lanes.h"

namespace tandem::quant {

// 12 bytes of Q4_K and Q5_K -> 8 six-bit scales, then 8 six-bit mins, one byte each.
inline void split_scales(const uint8_t* packed, uint8_t* out) {
    const uint32_t first = read_as<uint32_t>(packed), second = read_as<uint32_t>(packed + 4);
    const uint32_t nibbles = read_as<uint32_t>(packed + 8);
    const uint32_t words[4] = {
        first & 0x3f3f3f3f,
        (nibbles & 0x0f0f0f0f) | (first >> 2 & 0x30303030),
        second & 0x3f3f3f3f,
        (nibbles >> 4 & 0x0f0f0f0f) | (second >> 2 & 0x30303030),
    };
    std::memcpy(out, words, 16);
}

inline void scales_and_mins(const uint8_t* b, float* scale, float* bias) {
    uint8_t s[16];
    split_scales(b + 4, s);
    const float d = read_half(b), dmin = read_half(b + 2);
    for (int g = 0; g < 8; g++) {
        scale[g] = d * float(s[g]);
        bias[g] = -(dmin * float(s[8 + g]));
    }
}

#if TANDEM_AVX2
inline void scales_and_mins_avx2(const uint8_t* b, float* scale, float* bias) {
    uint64_t s[2];
    split_scales(b + 4, (uint8_t*)s);
    _mm256_storeu_ps(scale, _mm256_mul_ps(_mm256_set1_ps(read_half(b)), bytes_to_float8(s[0])));
    _mm256_storeu_ps(bias, _mm256_mul_ps(_mm256_set1_ps(-read_half(b + 2)), bytes_to_float8(s[1])));
}

inline __m256i two_bits(__m256i packed, int part) { return keep(_mm256_srli_epi16(packed, 2 * part), 3); }
#endif

#if TANDEM_AVX512
inline void scales_and_mins(const uint8_t* b, __m256* scale, __m256* bias) {
    uint64_t s[2];
    split_scales(b + 4, (uint8_t*)s);
    *scale = _mm256_mul_ps(half_times_8(b), bytes_to_float8(s[0]));
    *bias = _mm256_mul_ps(_mm256_xor_ps(half_times_8(b + 2), _mm256_set1_ps(-0.0f)), bytes_to_float8(s[1]));
}

inline void lane_scales_and_mins(const uint8_t* b, LaneSpan* s) {
    // Of group g < 4 all six bits lie in byte 4 + g or 8 + g; of the others, four lie in bytes 12 .. 15 and two on top
    // of the first bytes.
    alignas(64) static constexpr ScaleTable scales = scale_table(
        [](int l) { return l / 2 < 4 ? 4 + l / 2 : 8 + l / 2; }, [](int) { return 0; },
        [](int l) { return 4 + l / 2 % 4; }, [](int l) { return l / 2 < 4 ? 4 : 6; });
    alignas(64) static constexpr ScaleTable mins = scale_table(
        [](int l) { return 8 + l / 2; }, [](int l) { return l / 2 < 4 ? 0 : 4; },
        [](int l) { return 8 + l / 2 % 4; }, [](int l) { return l / 2 < 4 ? 4 : 6; });
    const __m512i packed = sixteen_everywhere(b);
    const __m128 both = two_halves(read_as<uint32_t>(b));
    s->scale = _mm512_mul_ps(_mm512_broadcastss_ps(both), _mm512_cvtepi32_ps(six_bits(scales, packed, false)));
    s->min =
        _mm512_mul_ps(_mm512_broadcastss_ps(_mm_movehdup_ps(both)), _mm512_cvtepi32_ps(six_bits(mins, packed)));
}

// The two bits of each byte of 32, at 2 * part and 2 * part + 2, for the lower and the upper half.
inline __m512i two_bits(const uint8_t* p, int part) {
    return keep(shift_right(load_twice(p), 2 * part, 2 * part + 2), 3);
}
#endif

inline void split_nibbles32(const uint8_t* packed, int8_t* q) {
    for (int i = 0; i < 32; i++) {
        q[i] = int8_t(packed[i] & 15);
        q[i + 32] = int8_t(packed[i] >> 4);
    }
}

struct Q2_K {
    static constexpr int type = 10, block = 256, bytes = 84, group = 16, q_max = 3, offset = 0;
    static constexpr bool is_signed = false, has_min = true;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float* bias) {
        const float d = read_half(b + 80), dmin = read_half(b + 82);
        for (int g = 0; g < 16; g++) {
            scale[g] = d * float(b[g] & 15);
            bias[g] = -(dmin * float(b[g] >> 4));
        }
        for (int half = 0; half < 2; half++)
            for (int part = 0; part < 4; part++)
                for (int i = 0; i < 32; i++)
                    q[128 * half + 32 * part + i] = int8_t(b[16 + 32 * half + i] >> 2 * part & 3);
    }
#if TANDEM_AVX512
    static void factors(const uint8_t* p, __m512* scale, __m512* min) {
        const __m512i packed = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
        const __m512 codes = _mm512_cvtepi32_ps(_mm512_and_si512(packed, _mm512_set1_epi32(15)));
        const __m128 both = two_halves(read_as<uint32_t>(p + 80));
        *scale = _mm512_mul_ps(_mm512_broadcastss_ps(both), codes);
        *min = _mm512_mul_ps(_mm512_broadcastss_ps(_mm_movehdup_ps(both)),
                             _mm512_cvtepi32_ps(_mm512_srli_epi32(packed, 4)));
    }
    static Span<4, 16> load(const uint8_t* p) {
        Span<4, 16> s;
        for (int u = 0; u < 4; u++) s.q[u] = two_bits(p + 16 + 32 * (u / 2), 2 * (u % 2));
        factors(p, &s.scale, &s.bias);
        s.bias = _mm512_xor_ps(s.bias, _mm512_set1_ps(-0.0f));
        return s;
    }
    static LaneSpan lanes(const uint8_t* p) {
        LaneSpan s;
        const __m512i packed = _mm512_loadu_si512(p + 16);
        for (int u = 0; u < 4; u++) s.q[u] = kTwoBits.take(u, packed);
        factors(p, &s.scale, &s.min);
        return s;
    }
#endif
#if TANDEM_AVX2
    static void unpack_avx2(const uint8_t* b, int8_t* q, float* scale, float* bias) {
        const __m128i packed = _mm_loadu_si128((const __m128i*)b), low = _mm_and_si128(packed, _mm_set1_epi8(15));
        const __m128i high = _mm_and_si128(_mm_srli_epi16(packed, 4), _mm_set1_epi8(15));
        const __m256 d = _mm256_set1_ps(read_half(b + 80)), minus = _mm256_set1_ps(-read_half(b + 82));
        for (int h = 0; h < 2; h++) {
            const uint64_t s = uint64_t(h ? _mm_extract_epi64(low, 1) : _mm_cvtsi128_si64(low));
            const uint64_t m = uint64_t(h ? _mm_extract_epi64(high, 1) : _mm_cvtsi128_si64(high));
            _mm256_storeu_ps(scale + 8 * h, _mm256_mul_ps(d, bytes_to_float8(s)));
            _mm256_storeu_ps(bias + 8 * h, _mm256_mul_ps(minus, bytes_to_float8(m)));
            const __m256i codes = load32(b + 16 + 32 * h);
            for (int part = 0; part < 4; part++) store32(q + 128 * h + 32 * part, two_bits(codes, part));
        }
    }
#endif
};

struct Q3_K {
    static constexpr int type = 11, block = 256, bytes = 110, group = 16, q_max = 7, offset = 4;
    static constexpr bool is_signed = false, has_min = false;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float*) {
        const float d = read_half(b + 108);
        const uint8_t* packed = b + 96;
        for (int g = 0; g < 16; g++) {
            const int low = g < 8 ? packed[g] & 15 : packed[g - 8] >> 4;
            scale[g] = d * float((low | (packed[8 + g % 4] >> 2 * (g / 4) & 3) << 4) - 32);
        }
        for (int half = 0; half < 2; half++)
            for (int part = 0; part < 4; part++)
                for (int i = 0; i < 32; i++) {
                    const int high = b[i] >> (4 * half + part) & 1;
                    q[128 * half + 32 * part + i] = int8_t((b[32 + 32 * half + i] >> 2 * part & 3) | high << 2);
                }
    }
#if TANDEM_AVX512
    static __m512 factors(const uint8_t* p) {
        const uint64_t nibbles = read_as<uint64_t>(p + 96), top = read_as<uint32_t>(p + 104);
        const uint64_t low = (nibbles & 0x0f0f0f0f0f0f0f0f) | ((top << 4 | top << 34) & 0x3030303030303030);
        const uint64_t upper = (nibbles >> 4 & 0x0f0f0f0f0f0f0f0f) | ((top | top << 30) & 0x3030303030303030);
        const __m512i codes = _mm512_cvtepu8_epi32(_mm_set_epi64x((long long)upper, (long long)low));
        return _mm512_mul_ps(half_times_16(p + 108),
                             _mm512_cvtepi32_ps(_mm512_sub_epi32(codes, _mm512_set1_epi32(32))));
    }
    static Span<4, 16> load(const uint8_t* p) {
        Span<4, 16> s;
        const __m512i high = load_twice(p);
        s.q[0] = merge(two_bits(p + 32, 0), shift_left(high, 2, 1), 4);
        s.q[1] = merge(two_bits(p + 32, 2), shift_right(high, 0, 1), 4);
        s.q[2] = merge(two_bits(p + 64, 0), shift_right(high, 2, 3), 4);
        s.q[3] = merge(two_bits(p + 64, 2), shift_right(high, 4, 5), 4);
        s.scale = factors(p);
        return s;
    }
    static LaneSpan lanes(const uint8_t* p) {
        LaneSpan s;
        const __m512i high = load_twice(p), packed = _mm512_loadu_si512(p + 32);
        for (int u = 0; u < 4; u++) s.q[u] = _mm512_or_si512(kTwoBits.take(u, packed), kBitTo2.take(u, high));
        // 8 bytes of low nibbles, 4 of two more bits each, at 2 of the 16 loaded (nothing past the block).
        alignas(64) static constexpr ScaleTable table =
            scale_table([](int l) { return 2 + l % 8; }, [](int l) { return 4 * (l / 8); },
                        [](int l) { return 10 + l % 4; }, [](int l) { return 2 * (l / 4); });
        const __m512i codes = six_bits(table, sixteen_everywhere(p + 94));
        s.scale =
            _mm512_mul_ps(half_times_16(p + 108), _mm512_cvtepi32_ps(_mm512_sub_epi32(codes, _mm512_set1_epi32(32))));
        return s;
    }
#endif
#if TANDEM_AVX2
    static void unpack_avx2(const uint8_t* b, int8_t* q, float* scale, float*) {
        const uint64_t nibbles = read_as<uint64_t>(b + 96), top = read_as<uint32_t>(b + 104);
        const uint64_t sixes[2] = {(nibbles & 0x0f0f0f0f0f0f0f0f) | ((top << 4 | top << 34) & 0x3030303030303030),
                                   (nibbles >> 4 & 0x0f0f0f0f0f0f0f0f) | ((top | top << 30) & 0x3030303030303030)};
        const __m256 d = _mm256_set1_ps(read_half(b + 108));
        const __m256i masks = load32(b);
        for (int h = 0; h < 2; h++) {
            _mm256_storeu_ps(scale + 8 * h,
                             _mm256_mul_ps(d, _mm256_sub_ps(bytes_to_float8(sixes[h]), _mm256_set1_ps(32))));
            const __m256i codes = load32(b + 32 + 32 * h), high = h ? _mm256_srli_epi16(masks, 4) : masks;
            for (int part = 0; part < 4; part++) {
                const __m256i bit = keep(_mm256_slli_epi16(_mm256_srli_epi16(high, part), 2), 4);
                store32(q + 128 * h + 32 * part, _mm256_or_si256(two_bits(codes, part), bit));
            }
        }
    }
#endif
};

struct Q4_K {
    static constexpr int type = 12, block = 256, bytes = 144, group = 32, q_max = 15, offset = 0;
    static constexpr bool is_signed = false, has_min = true;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float* bias) {
        scales_and_mins(b, scale, bias);
        for (int j = 0; j < 4; j++) split_nibbles32(b + 16 + 32 * j, q + 64 * j);
    }
#if TANDEM_AVX512
    static Span<4, 8> load(const uint8_t* p) {
        Span<4, 8> s;
        for (int u = 0; u < 4; u++) s.q[u] = keep(shift_right(load_twice(p + 16 + 32 * u), 0, 4), 15);
        scales_and_mins(p, &s.scale, &s.bias);
        return s;
    }
    static LaneSpan lanes(const uint8_t* p) {
        LaneSpan s;
        const __m512i first = _mm512_loadu_si512(p + 16), second = _mm512_loadu_si512(p + 80);
        for (int u = 0; u < 4; u++) s.q[u] = kNibblePairs.take(u, first, second);
        lane_scales_and_mins(p, &s);
        return s;
    }
#endif
#if TANDEM_AVX2
    static void unpack_avx2(const uint8_t* b, int8_t* q, float* scale, float* bias) {
        factors_avx2(b, scale, bias);
        for (int j = 0; j < 4; j++) {
            const __m256i packed = load32(b + 16 + 32 * j);
            store32(q + 64 * j, keep(packed, 15));
            store32(q + 64 * j + 32, keep(_mm256_srli_epi16(packed, 4), 15));
        }
    }
    // Dword u of both halves of two pairs of groups, each twice: low nibbles for the first group of a pair.
    static void lanes_avx2(const uint8_t* b, int part, __m256i* q) {
        const __m256i first = load32(b + 16 + 64 * part), second = load32(b + 48 + 64 * part);
        const __m256i low = _mm256_unpacklo_epi32(first, second), high = _mm256_unpackhi_epi32(first, second);
        const __m256i twice[4] = {_mm256_shuffle_epi32(low, 0x50), _mm256_shuffle_epi32(low, 0xfa),
                                  _mm256_shuffle_epi32(high, 0x50), _mm256_shuffle_epi32(high, 0xfa)};
        const __m256i nibble = _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4);
        for (int u = 0; u < 4; u++) q[u] = keep(_mm256_srlv_epi32(twice[u], nibble), 15);
    }
    static void factors_avx2(const uint8_t* b, float* scale, float* bias) { scales_and_mins_avx2(b, scale, bias); }
#endif
};

struct Q5_K {
    static constexpr int type = 13, block = 256, bytes = 176, group = 32, q_max = 31, offset = 0;
    static constexpr bool is_signed = false, has_min = true;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float* bias) {
        scales_and_mins(b, scale, bias);
        for (int j = 0; j < 4; j++) split_nibbles32(b + 48 + 32 * j, q + 64 * j);
        for (int j = 0; j < 8; j++)
            for (int i = 0; i < 32; i++) q[32 * j + i] = int8_t(q[32 * j + i] | (b[16 + i] >> j & 1) << 4);
    }
#if TANDEM_AVX512
    static Span<4, 8> load(const uint8_t* p) {
        Span<4, 8> s;
        const __m512i high = load_twice(p + 16);
        const __m512i fifth[4] = {shift_left(high, 4, 3), shift_left(high, 2, 1), shift_right(high, 0, 1),
                                  shift_right(high, 2, 3)};
        for (int u = 0; u < 4; u++)
            s.q[u] = merge(keep(shift_right(load_twice(p + 48 + 32 * u), 0, 4), 15), fifth[u], 16);
        scales_and_mins(p, &s.scale, &s.bias);
        return s;
    }
    static LaneSpan lanes(const uint8_t* p) {
        LaneSpan s;
        const __m512i high = load_twice(p + 16);
        const __m512i first = _mm512_loadu_si512(p + 48), second = _mm512_loadu_si512(p + 112);
        for (int u = 0; u < 4; u++)
            s.q[u] = _mm512_or_si512(kNibblePairs.take(u, first, second), kBitTo4.take(u, high));
        lane_scales_and_mins(p, &s);
        return s;
    }
#endif
#if TANDEM_AVX2
    static void unpack_avx2(const uint8_t* b, int8_t* q, float* scale, float* bias) {
        scales_and_mins_avx2(b, scale, bias);
        const __m256i high = load32(b + 16);
        for (int j = 0; j < 4; j++) {
            const __m256i packed = load32(b + 48 + 32 * j), bits = _mm256_srli_epi16(high, 2 * j);
            store32(q + 64 * j, _mm256_or_si256(keep(packed, 15), keep(_mm256_slli_epi16(bits, 4), 16)));
            store32(q + 64 * j + 32,
                    _mm256_or_si256(keep(_mm256_srli_epi16(packed, 4), 15), keep(_mm256_slli_epi16(bits, 3), 16)));
        }
    }
#endif
};

struct Q6_K {
    static constexpr int type = 14, block = 256, bytes = 210, group = 16, q_max = 63, offset = 32;
    static constexpr bool is_signed = false, has_min = false;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float*) {
        const float d = read_half(b + 208);
        for (int g = 0; g < 16; g++) scale[g] = d * float(int8_t(b[192 + g]));
        for (int half = 0; half < 2; half++)
            for (int part = 0; part < 4; part++)
                for (int i = 0; i < 32; i++) {
                    const int low = b[64 * half + 32 * (part % 2) + i] >> 4 * (part / 2) & 15;
                    const int high = b[128 + 32 * half + i] >> 2 * part & 3;
                    q[128 * half + 32 * part + i] = int8_t(low | high << 4);
                }
    }
#if TANDEM_AVX512
    static __m512 factors(const uint8_t* p) {
        const __m512i codes = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(p + 192)));
        return _mm512_mul_ps(half_times_16(p + 208), _mm512_cvtepi32_ps(codes));
    }
    static Span<4, 16> load(const uint8_t* p) {
        Span<4, 16> s;
        for (int h = 0; h < 2; h++) {
            const __m512i low = _mm512_loadu_si512(p + 64 * h), high = load_twice(p + 128 + 32 * h);
            s.q[2 * h] = merge(keep(low, 15), shift_left(high, 4, 2), 48);
            s.q[2 * h + 1] = merge(keep(_mm512_srli_epi16(low, 4), 15), shift_right(high, 0, 2), 48);
        }
        s.scale = factors(p);
        return s;
    }
    static LaneSpan lanes(const uint8_t* p) {
        LaneSpan s;
        const __m512i first = _mm512_loadu_si512(p), second = _mm512_loadu_si512(p + 64);
        const __m512i high = _mm512_loadu_si512(p + 128);
        for (int u = 0; u < 4; u++)
            s.q[u] = _mm512_or_si512(kNibbleHalves.take(u, first, second), kTwoBitsTo4.take(u, high));
        s.scale = factors(p);
        return s;
    }
#endif
#if TANDEM_AVX2
    static void unpack_avx2(const uint8_t* b, int8_t* q, float* scale, float*) {
        const __m256 d = _mm256_set1_ps(read_half(b + 208));
        for (int h = 0; h < 2; h++) {
            const __m256i codes = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(b + 192 + 8 * h)));
            _mm256_storeu_ps(scale + 8 * h, _mm256_mul_ps(d, _mm256_cvtepi32_ps(codes)));
            const __m256i high = load32(b + 128 + 32 * h), low[2] = {load32(b + 64 * h), load32(b + 64 * h + 32)};
            for (int part = 0; part < 4; part++) {
                const __m256i four = keep(part < 2 ? low[part] : _mm256_srli_epi16(low[part - 2], 4), 15);
                const __m256i two = keep(_mm256_slli_epi16(_mm256_srli_epi16(high, 2 * part), 4), 48);
                store32(q + 128 * h + 32 * part, _mm256_or_si256(four, two));
            }
        }
    }
#endif
};

}  // namespace tandem::quant
