// The I types: rows of codebooks with signs, or a non-linear 4-bit table. Meanings: quant/iquant.py.
#pragma once
#include "quant/format.h"

namespace tandem::quant {

inline void signed_values(const uint8_t* magnitudes, int n, uint32_t negative, int8_t* q) {
    for (int i = 0; i < n; i++) q[i] = int8_t(negative >> i & 1 ? -int(magnitudes[i]) : int(magnitudes[i]));
}

#if TANDEM_AVX512 || TANDEM_AVX2
// Rows of 8 values by number, side by side.
template <class Id>
inline __m256i four_rows(const uint8_t (*table)[8], const Id* id) {
    auto two = [&](int i) {
        const __m128 low = _mm_castsi128_ps(_mm_loadl_epi64((const __m128i*)table[id[i]]));
        return _mm_castps_si128(_mm_loadh_pi(low, (const __m64*)table[id[i + 1]]));
    };
    return _mm256_inserti128_si256(_mm256_castsi128_si256(two(0)), two(2), 1);
}

// 2-bit codes of 8 bytes, as 32 bytes in order.
inline __m256i spread_two_bits(uint64_t packed) {
    auto eight = [&](int i) { return (long long)_pdep_u64(packed >> 16 * i, 0x0303030303030303); };
    return _mm256_setr_epi64x(eight(0), eight(1), eight(2), eight(3));
}

// Nibbles of 8 bytes, as 16 bytes in order.
inline __m128i spread_nibbles(uint64_t packed) {
    return _mm_set_epi64x((long long)_pdep_u64(packed >> 32, 0x0f0f0f0f0f0f0f0f), (long long)_pdep_u64(packed, 0x0f0f0f0f0f0f0f0f));
}
#endif

#if TANDEM_AVX512
template <class Id>
inline __m512i eight_rows(const uint8_t (*table)[8], const Id* id) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(four_rows(table, id)), four_rows(table, id + 4), 1);
}

inline __m512i negate(__m512i q, uint64_t where) { return _mm512_mask_sub_epi8(q, where, _mm512_setzero_si512(), q); }

// Sign bytes of 32 seven-bit numbers, each in the low bits of its byte.
inline __m256i even_signs(__m256i numbers) {
    const __m512i low = _mm512_load_si512(grids.ksigns), high = _mm512_load_si512(grids.ksigns + 64);
    return _mm512_castsi512_si256(_mm512_permutex2var_epi8(low, _mm512_castsi256_si512(numbers), high));
}

// Eight words with four 7-bit numbers each -> bytes with those numbers in the low bits.
inline __m256i four_sevens(__m256i words) {
    return _mm256_multishift_epi64_epi8(_mm256_set1_epi64x(0x352e2720150e0700), words);
}

// d * (0.5 + nibble), 16 of them
inline __m512 half_plus_nibbles(float d, const uint8_t* packed) {
    const __m512 s = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(spread_nibbles(read_as<uint64_t>(packed))));
    return _mm512_mul_ps(_mm512_set1_ps(d), _mm512_add_ps(s, _mm512_set1_ps(0.5f)));
}

// 64 rows of 4 values from a table given by columns, as 4 units in order. id: row numbers modulo 256; upper: rows + 256.
template <int Rows>
inline void look_up_rows(const uint8_t (*columns)[Rows], __m512i id, uint64_t upper, __m512i* q) {
    // Interleaving works inside 16-byte lanes: put the numbers where their values will be wanted.
    const __m512i turn = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    id = _mm512_permutexvar_epi32(turn, id);
    const __mmask64 second = _mm512_movepi8_mask(id);
    [[maybe_unused]] __mmask64 third = 0;
    if constexpr (Rows > 256) third = _mm512_movepi8_mask(_mm512_permutexvar_epi32(turn, _mm512_movm_epi8(upper)));
    __m512i column[4];
    for (int c = 0; c < 4; c++) {
        auto half = [&](int from) {
            const uint8_t* t = columns[c] + from;
            const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(t), id, _mm512_load_si512(t + 64));
            const __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(t + 128), id, _mm512_load_si512(t + 192));
            return _mm512_mask_blend_epi8(second, low, high);
        };
        column[c] = half(0);
        if constexpr (Rows > 256) column[c] = _mm512_mask_blend_epi8(third, column[c], half(256));
    }
    const __m512i low01 = _mm512_unpacklo_epi8(column[0], column[1]), high01 = _mm512_unpackhi_epi8(column[0], column[1]);
    const __m512i low23 = _mm512_unpacklo_epi8(column[2], column[3]), high23 = _mm512_unpackhi_epi8(column[2], column[3]);
    q[0] = _mm512_unpacklo_epi16(low01, low23);
    q[1] = _mm512_unpackhi_epi16(low01, low23);
    q[2] = _mm512_unpacklo_epi16(high01, high23);
    q[3] = _mm512_unpackhi_epi16(high01, high23);
}
#elif TANDEM_AVX2
// Values whose bit of `where` is set, negated.
inline __m256i negate(__m256i q, uint32_t where) {
    const __m256i source = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x(int64_t(0x8040201008040201));
    const __m256i bytes = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(int(where)), source), bit);
    const __m256i mask = _mm256_cmpeq_epi8(bytes, bit);
    return _mm256_sub_epi8(_mm256_xor_si256(q, mask), mask);
}

// The sign bytes of the four 7-bit numbers of a word.
inline uint32_t even_signs(uint32_t word) {
    const uint32_t sevens = _pdep_u32(word, 0x7f7f7f7f);
    uint32_t folded = sevens ^ sevens >> 4;
    folded ^= folded >> 2;
    folded ^= folded >> 1;
    return sevens | (folded & 0x01010101) << 7;
}

// d * (0.5 + nibble), 16 of them
inline void half_plus_nibbles(float d, const uint8_t* packed, float* scale) {
    const __m128i s = spread_nibbles(read_as<uint64_t>(packed));
    for (int h = 0; h < 2; h++) {
        const __m256 codes = bytes_to_float8(uint64_t(h ? _mm_extract_epi64(s, 1) : _mm_cvtsi128_si64(s)));
        _mm256_storeu_ps(scale + 8 * h, _mm256_mul_ps(_mm256_set1_ps(d), _mm256_add_ps(codes, _mm256_set1_ps(0.5f))));
    }
}

// d * (0.5 + top nibble of each word)
inline void half_plus_tops(float d, __m256i words, float* scale) {
    const __m256 codes = _mm256_cvtepi32_ps(_mm256_srli_epi32(words, 28));
    _mm256_storeu_ps(scale, _mm256_mul_ps(_mm256_set1_ps(d), _mm256_add_ps(codes, _mm256_set1_ps(0.5f))));
}

// Eight rows of 4 values.
template <class Id>
inline __m256i eight_short_rows(const uint8_t (*table)[4], const Id* id) {
    auto row = [&](int i) { return int(read_as<int32_t>(table[id[i]])); };
    return _mm256_setr_epi32(row(0), row(1), row(2), row(3), row(4), row(5), row(6), row(7));
}
#endif

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
#if TANDEM_AVX512
    static Span<4, 8> load(const uint8_t* p) {
        Span<4, 8> s;
        // Per 32 values: 4 row numbers, then a word of signs and scale.
        const __m512i all = _mm512_loadu_si512(p + 2);
        const __m256i words = _mm512_cvtepi64_epi32(_mm512_srli_epi64(all, 32));
        alignas(32) uint64_t signs[4];
        _mm256_store_si256((__m256i*)signs, even_signs(four_sevens(words)));
        for (int u = 0; u < 4; u++) {
            const uint8_t* ids = p + 2 + 16 * u;
            const __m256i low = four_rows(grids.iq2xxs, ids), high = four_rows(grids.iq2xxs, ids + 8);
            s.q[u] = negate(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1), signs[u]);
        }
        const __m256 codes = _mm256_cvtepi32_ps(_mm256_srli_epi32(words, 28));
        s.scale = _mm256_mul_ps(_mm256_set1_ps(read_half(p) * 0.25f), _mm256_add_ps(codes, _mm256_set1_ps(0.5f)));
        return s;
    }
#elif TANDEM_AVX2
    static void unpack_avx2(const uint8_t* b, int8_t* q, float* scale, float*) {
        const __m256 low = _mm256_castsi256_ps(load32(b + 2)), high = _mm256_castsi256_ps(load32(b + 34));
        const __m256i words = _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(low, high, 0xdd)), 0xd8);
        half_plus_tops(read_half(b) * 0.25f, words, scale);
        for (int g = 0; g < 8; g++) {
            const uint32_t word = read_as<uint32_t>(b + 6 + 8 * g);
            store32(q + 32 * g, negate(four_rows(grids.iq2xxs, b + 2 + 8 * g), even_signs(word)));
        }
    }
#endif
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
#if TANDEM_AVX512
    static Span<4, 16> load(const uint8_t* p) {
        Span<4, 16> s;
        const __m512i words = _mm512_loadu_si512(p + 2);
        alignas(32) uint64_t signs[4];
        _mm256_store_si256((__m256i*)signs, even_signs(_mm512_cvtepi16_epi8(_mm512_srli_epi16(words, 9))));
        alignas(64) uint16_t ids[32];
        _mm512_store_si512(ids, _mm512_and_si512(words, _mm512_set1_epi16(511)));
        for (int u = 0; u < 4; u++) s.q[u] = negate(eight_rows(grids.iq2xs, ids + 8 * u), signs[u]);
        s.scale = half_plus_nibbles(read_half(p) * 0.25f, p + 66);
        return s;
    }
#elif TANDEM_AVX2
    static void unpack_avx2(const uint8_t* b, int8_t* q, float* scale, float*) {
        half_plus_nibbles(read_half(b) * 0.25f, b + 66, scale);
        for (int g = 0; g < 8; g++) {
            const uint64_t words = read_as<uint64_t>(b + 2 + 8 * g);
            const uint16_t ids[4] = {uint16_t(words & 511), uint16_t(words >> 16 & 511), uint16_t(words >> 32 & 511),
                                     uint16_t(words >> 48 & 511)};
            const uint32_t sevens = uint32_t(_pext_u64(words, 0xfe00fe00fe00fe00));
            store32(q + 32 * g, negate(four_rows(grids.iq2xs, ids), even_signs(sevens)));
        }
    }
#endif
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
#if TANDEM_AVX512
    static Span<4, 16> load(const uint8_t* p) {
        Span<4, 16> s;
        const __m512i low = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)(p + 2)));
        const __m512i high = _mm512_slli_epi16(_mm512_cvtepu8_epi16(spread_two_bits(read_as<uint64_t>(p + 66))), 8);
        alignas(64) uint16_t ids[32];
        _mm512_store_si512(ids, _mm512_or_si512(low, high));
        for (int u = 0; u < 4; u++)
            s.q[u] = negate(eight_rows(grids.iq2s, ids + 8 * u), read_as<uint64_t>(p + 34 + 8 * u));
        s.scale = half_plus_nibbles(read_half(p) * 0.25f, p + 74);
        return s;
    }
#elif TANDEM_AVX2
    static void unpack_avx2(const uint8_t* b, int8_t* q, float* scale, float*) {
        half_plus_nibbles(read_half(b) * 0.25f, b + 74, scale);
        const __m256i high = spread_two_bits(read_as<uint64_t>(b + 66)), low = load32(b + 2);
        alignas(32) uint16_t ids[32];
        for (int h = 0; h < 2; h++) {
            const __m128i l = h ? _mm256_extracti128_si256(low, 1) : _mm256_castsi256_si128(low);
            const __m128i u = h ? _mm256_extracti128_si256(high, 1) : _mm256_castsi256_si128(high);
            const __m256i joined = _mm256_or_si256(_mm256_cvtepu8_epi16(l), _mm256_slli_epi16(_mm256_cvtepu8_epi16(u), 8));
            _mm256_store_si256((__m256i*)(ids + 16 * h), joined);
        }
        for (int g = 0; g < 8; g++)
            store32(q + 32 * g, negate(four_rows(grids.iq2s, ids + 4 * g), read_as<uint32_t>(b + 34 + 4 * g)));
    }
#endif
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
#if TANDEM_AVX512
    static Span<4, 8> load(const uint8_t* p) {
        Span<4, 8> s;
        const __m256i words = _mm256_loadu_si256((const __m256i*)(p + 66));
        alignas(32) uint64_t signs[4];
        _mm256_store_si256((__m256i*)signs, even_signs(four_sevens(words)));
        look_up_rows(grids.iq3xxs_columns, _mm512_loadu_si512(p + 2), 0, s.q);
        for (int u = 0; u < 4; u++) s.q[u] = negate(s.q[u], signs[u]);
        const __m256 codes = _mm256_cvtepi32_ps(_mm256_srli_epi32(words, 28));
        s.scale = _mm256_mul_ps(_mm256_set1_ps(read_half(p) * 0.5f), _mm256_add_ps(codes, _mm256_set1_ps(0.5f)));
        return s;
    }
#elif TANDEM_AVX2
    static void unpack_avx2(const uint8_t* b, int8_t* q, float* scale, float*) {
        half_plus_tops(read_half(b) * 0.5f, load32(b + 66), scale);
        for (int g = 0; g < 8; g++) {
            const uint32_t word = read_as<uint32_t>(b + 66 + 4 * g);
            store32(q + 32 * g, negate(eight_short_rows(grids.iq3xxs, b + 2 + 8 * g), even_signs(word)));
        }
    }
#endif
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
#if TANDEM_AVX512
    static Span<4, 8> load(const uint8_t* p) {
        Span<4, 8> s;
        look_up_rows(grids.iq3s_columns, _mm512_loadu_si512(p + 2), read_as<uint64_t>(p + 66), s.q);
        for (int u = 0; u < 4; u++) s.q[u] = negate(s.q[u], read_as<uint64_t>(p + 74 + 8 * u));
        const uint64_t codes = _pdep_u64(read_as<uint32_t>(p + 106), 0x1e1e1e1e1e1e1e1e) | 0x0101010101010101;
        s.scale = _mm256_mul_ps(half_times_8(p), bytes_to_float8(codes));
        return s;
    }
#elif TANDEM_AVX2
    static void unpack_avx2(const uint8_t* b, int8_t* q, float* scale, float*) {
        const uint64_t codes = _pdep_u64(read_as<uint32_t>(b + 106), 0x1e1e1e1e1e1e1e1e) | 0x0101010101010101;
        _mm256_storeu_ps(scale, _mm256_mul_ps(_mm256_set1_ps(read_half(b)), bytes_to_float8(codes)));
        for (int g = 0; g < 8; g++) {
            const uint64_t high = _pdep_u64(b[66 + g], 0x0101010101010101);
            uint16_t ids[8];
            for (int i = 0; i < 8; i++) ids[i] = uint16_t(b[2 + 8 * g + i] | (high >> 8 * i & 1) << 8);
            store32(q + 32 * g, negate(eight_short_rows(grids.iq3s, ids), read_as<uint32_t>(b + 74 + 4 * g)));
        }
    }
#endif
};

// The grid is stored plus 1, so q is not negative: ternary - 1 + shift is the meaning.
struct IQ1_S {
    static constexpr int type = 19, block = 256, bytes = 50, group = 32, q_max = 2, offset = 0;
    static constexpr bool is_signed = false, has_min = true;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float* bias) {
        const float d = read_half(b);
        for (int g = 0; g < 8; g++) {
            const uint16_t word = read_as<uint16_t>(b + 34 + 2 * g);
            scale[g] = d * float(2 * (word >> 12 & 7) + 1);
            bias[g] = scale[g] * (word >> 15 ? -1.125f : -0.875f);
            for (int i = 0; i < 4; i++) {
                const int id = b[2 + 4 * g + i] | (word >> 3 * i & 7) << 8;
                std::memcpy(q + 32 * g + 8 * i, grids.iq1s[id], 8);
            }
        }
    }
#if TANDEM_AVX512 || TANDEM_AVX2
    static void scale_and_shift(float d, __m128i words, __m256* scale, __m256* bias) {
        const __m256i wide = _mm256_cvtepi16_epi32(words);
        const __m256i codes = _mm256_and_si256(_mm256_srli_epi32(wide, 12), _mm256_set1_epi32(7));
        const __m256 odd = _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_add_epi32(codes, codes), _mm256_set1_epi32(1)));
        *scale = _mm256_mul_ps(_mm256_set1_ps(d), odd);
        const __m256 shift = _mm256_blendv_ps(_mm256_set1_ps(-0.875f), _mm256_set1_ps(-1.125f), _mm256_castsi256_ps(wide));
        *bias = _mm256_mul_ps(*scale, shift);
    }
#endif
#if TANDEM_AVX512
    static Span<4, 8> load(const uint8_t* p) {
        Span<4, 8> s;
        const __m128i packed = _mm_loadu_si128((const __m128i*)(p + 34));
        // The high bits of four row numbers lie in one word, 3 bits each.
        alignas(64) uint16_t ids[32];
        const __m512i words = _mm512_permutexvar_epi16(
            _mm512_setr_epi64(0, 0x0001000100010001, 0x0002000200020002, 0x0003000300030003, 0x0004000400040004,
                              0x0005000500050005, 0x0006000600060006, 0x0007000700070007),
            _mm512_castsi128_si512(packed));
        const __m512i high = _mm512_and_si512(_mm512_srlv_epi16(words, _mm512_set1_epi64(0x0009000600030000)), _mm512_set1_epi16(7));
        const __m512i low = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)(p + 2)));
        _mm512_store_si512(ids, _mm512_or_si512(low, _mm512_slli_epi16(high, 8)));
        for (int u = 0; u < 4; u++) s.q[u] = eight_rows(grids.iq1s, ids + 8 * u);
        scale_and_shift(read_half(p), packed, &s.scale, &s.bias);
        return s;
    }
#elif TANDEM_AVX2
    static void unpack_avx2(const uint8_t* b, int8_t* q, float* scale, float* bias) {
        __m256 scales, biases;
        scale_and_shift(read_half(b), _mm_loadu_si128((const __m128i*)(b + 34)), &scales, &biases);
        _mm256_storeu_ps(scale, scales);
        _mm256_storeu_ps(bias, biases);
        for (int g = 0; g < 8; g++) {
            const uint32_t word = read_as<uint16_t>(b + 34 + 2 * g), low = read_as<uint32_t>(b + 2 + 4 * g);
            const uint32_t high = _pdep_u32(word, 0x07070707);
            const uint16_t ids[4] = {uint16_t((low & 255) | (high & 255) << 8), uint16_t((low >> 8 & 255) | (high & 0xff00)),
                                     uint16_t((low >> 16 & 255) | (high >> 8 & 0xff00)), uint16_t(low >> 24 | (high >> 16 & 0xff00))};
            store32(q + 32 * g, four_rows(grids.iq1s, ids));
        }
    }
#endif
};

// A shift per 8 values becomes whole: 8 * ternary +- 1 under an eighth of the scale, plus 9 so that q is not negative.
struct IQ1_M {
    static constexpr int type = 29, block = 256, bytes = 56, group = 16, q_max = 18, offset = 9;
    static constexpr bool is_signed = false, has_min = false;
    static float eighth_of_d(const uint8_t* b) {
        const uint64_t words = read_as<uint64_t>(b + 48);
        return half_to_float(uint16_t((words >> 12 & 0xf) | (words >> 24 & 0xf0) | (words >> 36 & 0xf00) |
                                      (words >> 48 & 0xf000))) * 0.125f;
    }
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float*) {
        const uint64_t words = read_as<uint64_t>(b + 48);
        const float d = eighth_of_d(b);
        for (int g = 0; g < 16; g++) scale[g] = d * float(2 * (words >> (16 * (g / 4) + 3 * (g % 4)) & 7) + 1);
        for (int i = 0; i < 32; i++) {
            const int nibble = b[32 + i / 2] >> 4 * (i % 2) & 15;
            const uint8_t* ternary = grids.iq1s[b[i] | (nibble & 7) << 8];
            for (int j = 0; j < 8; j++) q[8 * i + j] = int8_t(8 * ternary[j] + (nibble >> 3 ? 0 : 2));
        }
    }
#if TANDEM_AVX512
    static Span<4, 16> load(const uint8_t* p) {
        Span<4, 16> s;
        const __m256i nibbles = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(p + 32)));
        // Each byte -> two bytes with a nibble each.
        const __m256i both = _mm256_and_si256(_mm256_or_si256(nibbles, _mm256_slli_epi16(nibbles, 4)), _mm256_set1_epi8(15));
        const __m512i wide = _mm512_cvtepu8_epi16(both), low = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p));
        alignas(64) uint16_t ids[32];
        _mm512_store_si512(ids, _mm512_or_si512(low, _mm512_slli_epi16(_mm512_and_si512(wide, _mm512_set1_epi16(7)), 8)));
        const uint32_t down = _mm512_test_epi16_mask(wide, _mm512_set1_epi16(8));
        for (int u = 0; u < 4; u++) {
            const __m512i eights = _mm512_slli_epi16(eight_rows(grids.iq1s, ids + 8 * u), 3);
            const __m512i twos = _mm512_maskz_set1_epi64(__mmask8(~(down >> 8 * u)), 0x0202020202020202);
            s.q[u] = _mm512_add_epi8(eights, twos);
        }
        const uint64_t threes = _pext_u64(read_as<uint64_t>(p + 48), 0x0fff0fff0fff0fff);
        auto odd = [&](uint64_t bits) { return (long long)(_pdep_u64(bits, 0x0e0e0e0e0e0e0e0e) | 0x0101010101010101); };
        const __m512 codes = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_set_epi64x(odd(threes >> 24), odd(threes))));
        s.scale = _mm512_mul_ps(_mm512_set1_ps(eighth_of_d(p)), codes);
        return s;
    }
#elif TANDEM_AVX2
    static void unpack_avx2(const uint8_t* b, int8_t* q, float* scale, float*) {
        const uint64_t threes = _pext_u64(read_as<uint64_t>(b + 48), 0x0fff0fff0fff0fff);
        const __m256 d = _mm256_set1_ps(eighth_of_d(b));
        for (int h = 0; h < 2; h++) {
            const uint64_t odd = _pdep_u64(threes >> 24 * h, 0x0e0e0e0e0e0e0e0e) | 0x0101010101010101;
            _mm256_storeu_ps(scale + 8 * h, _mm256_mul_ps(d, bytes_to_float8(odd)));
        }
        for (int g = 0; g < 8; g++) {
            const uint32_t nibbles = _pdep_u32(read_as<uint16_t>(b + 32 + 2 * g), 0x0f0f0f0f), high = nibbles & 0x07070707;
            const uint32_t low = read_as<uint32_t>(b + 4 * g);
            const uint16_t ids[4] = {uint16_t((low & 255) | (high & 255) << 8), uint16_t((low >> 8 & 255) | (high & 0xff00)),
                                     uint16_t((low >> 16 & 255) | (high >> 8 & 0xff00)), uint16_t(low >> 24 | (high >> 16 & 0xff00))};
            const __m256i eights = _mm256_slli_epi16(four_rows(grids.iq1s, ids), 3);
            // 2 where the shift is up: bit 3 of the nibble is clear.
            const __m256i up = _mm256_cvtepi8_epi64(_mm_cvtsi32_si128(int((~nibbles & 0x08080808) >> 2)));
            const __m256i twos = _mm256_shuffle_epi8(up, _mm256_setr_epi64x(0, 0x0808080808080808, 0, 0x0808080808080808));
            store32(q + 32 * g, _mm256_add_epi8(eights, twos));
        }
    }
#endif
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
