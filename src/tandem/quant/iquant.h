// The I types up to three bits: rows of codebooks with signs. Meanings: quant/iquant.py.
//
// AVX-512 looks rows of 4 values up in registers: on Zen 5 the 64 rows of an IQ3_S block take 4 cycles so and 50 by
// gathers; on Intel, where permuting two registers takes 2 cycles, 16 against about 40. Rows of 8 values are loaded one
// by one, as are all on AVX2, which has no permutation as wide; gathers are no faster on Zen 5, and slow on Intel parts
// with the fix for data sampling. Row numbers stay in general registers: extracting them from a vector, or reading back
// a vector just stored two bytes at a time, costs more than the rows.
#pragma once
#include <cassert>

#include "quant/lanes.h"

namespace tandem::quant {

inline void signed_values(const uint8_t* magnitudes, int n, uint32_t negative, int8_t* q) {
    for (int i = 0; i < n; i++) q[i] = int8_t(negative >> i & 1 ? -int(magnitudes[i]) : int(magnitudes[i]));
}

#if TANDEM_AVX512 || TANDEM_AVX2
// Rows of 8 values side by side; id(i) is the number of the i-th.
template <class Id>
inline __m256i four_rows(const uint8_t (*table)[8], Id id) {
    auto two = [&](int i) {
        const __m128 low = _mm_castsi128_ps(_mm_loadl_epi64((const __m128i*)table[id(i)]));
        return _mm_castps_si128(_mm_loadh_pi(low, (const __m64*)table[id(i + 1)]));
    };
    return _mm256_inserti128_si256(_mm256_castsi128_si256(two(0)), two(2), 1);
}

// Nibbles of 8 bytes, as 16 bytes in order.
inline __m128i spread_nibbles(uint64_t packed) {
    auto eight = [](uint64_t four) { return (long long)_pdep_u64(four, 0x0f0f0f0f0f0f0f0f); };
    return _mm_set_epi64x(eight(packed >> 32), eight(packed));
}
#endif

#if TANDEM_AVX512
// Row numbers in 16-bit words: four in first, four in second.
inline __m512i eight_rows(const uint8_t (*table)[8], uint64_t first, uint64_t second) {
    auto four = [&](uint64_t ids) {
        const uint32_t low = uint32_t(ids), high = uint32_t(ids >> 32);
        return four_rows(table, [&](int i) {
            const uint32_t two = i < 2 ? low : high;
            return i % 2 ? two >> 16 : two & 0xffff;
        });
    };
    return _mm512_inserti64x4(_mm512_castsi256_si512(four(first)), four(second), 1);
}

// Four bytes as 16-bit words.
inline uint64_t four_words(const uint8_t* p) { return _pdep_u64(read_as<uint32_t>(p), 0x00ff00ff00ff00ff); }

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

// Interleaving works within lanes of 128 bits; transposing 4 lanes x 4 dwords before it puts the results in order.
inline __m512i transpose_lanes(__m512i v) {
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), v);
}

inline __m512i look_up_256(const uint8_t* table, __m512i codes) {
    auto half = [&](const uint8_t* t) {
        return _mm512_permutex2var_epi8(_mm512_load_si512(t), codes, _mm512_load_si512(t + 64));
    };
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(codes), half(table), half(table + 128));
}

// 64 rows of IQ3_XXS, as 4 units in order.
inline void look_up_iq3xxs(__m512i ids, __m512i* q) {
    ids = transpose_lanes(ids);
    __m512i column[4];
    for (int c = 0; c < 4; c++) column[c] = look_up_256(grids.iq3xxs_columns[c], ids);
    const __m512i first[2] = {_mm512_unpacklo_epi8(column[0], column[1]), _mm512_unpackhi_epi8(column[0], column[1])};
    const __m512i second[2] = {_mm512_unpacklo_epi8(column[2], column[3]), _mm512_unpackhi_epi8(column[2], column[3])};
    for (int i = 0; i < 2; i++) {
        q[2 * i] = _mm512_unpacklo_epi16(first[i], second[i]);
        q[2 * i + 1] = _mm512_unpackhi_epi16(first[i], second[i]);
    }
}

// The codebook of IQ3_S with two values a byte, which halves the look-ups: [0] has values 0 and 2, [1] has 1 and 3.
struct PackedIq3s {
    alignas(64) uint8_t pairs[2][512];
};

[[gnu::noinline, gnu::cold]] inline PackedIq3s pack_iq3s() {
    assert(grids.iq3s[0][0] && "codebooks are used before they are handed over");
    PackedIq3s packed;
    for (int i = 0; i < 512; i++)
        for (int j = 0; j < 2; j++) packed.pairs[j][i] = uint8_t(grids.iq3s[i][j] | grids.iq3s[i][j + 2] << 4);
    return packed;
}

// Values 0 and 2, and 1 and 3, of 64 rows of IQ3_S, two in a byte. ids: row numbers modulo 256; upper: rows + 256.
inline void pairs_of_iq3s(__m512i ids, uint64_t upper, __m512i* pairs) {
    static const PackedIq3s packed = pack_iq3s();
    for (int i = 0; i < 2; i++) {
        const __m512i low = look_up_256(packed.pairs[i], ids), high = look_up_256(packed.pairs[i] + 256, ids);
        pairs[i] = _mm512_mask_blend_epi8(upper, low, high);
    }
}

// 64 rows of IQ3_S, as 4 units in order.
inline void look_up_iq3s(__m512i ids, uint64_t upper, __m512i* q) {
    __m512i rows[2];
    pairs_of_iq3s(ids, upper, rows);
    for (auto& row : rows) row = transpose_lanes(row);
    const __m512i pairs[2] = {_mm512_unpacklo_epi8(rows[0], rows[1]), _mm512_unpackhi_epi8(rows[0], rows[1])};
    for (int i = 0; i < 2; i++) {
        const __m512i first = keep(pairs[i], 15), second = keep(_mm512_srli_epi16(pairs[i], 4), 15);
        q[2 * i] = _mm512_unpacklo_epi16(first, second);
        q[2 * i + 1] = _mm512_unpackhi_epi16(first, second);
    }
}

// The same as strided lanes, plus 128: register c has value c of each row.
inline void strided_iq3s(__m512i ids, uint64_t upper, __m512i* q) {
    __m512i pairs[2];
    pairs_of_iq3s(ids, upper, pairs);
    const __m512i offset = constant(_mm512_set1_epi8(-128)), nibble = constant(_mm512_set1_epi8(15));
    for (int i = 0; i < 2; i++) {  // v & 15 | 128
        q[i] = _mm512_ternarylogic_epi32(pairs[i], nibble, offset, 0xea);
        q[i + 2] = _mm512_ternarylogic_epi32(_mm512_srli_epi16(pairs[i], 4), nibble, offset, 0xea);
    }
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

// The sign bytes of 32 seven-bit numbers, each in the low bits of its byte.
inline __m256i even_signs(__m256i numbers) {
    const __m128i odd = _mm_setr_epi8(0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0);
    const __m256i parity = _mm256_broadcastsi128_si256(odd);
    const __m256i low = _mm256_shuffle_epi8(parity, keep(numbers, 15));
    const __m256i high = _mm256_shuffle_epi8(parity, keep(_mm256_srli_epi16(numbers, 4), 15));
    return _mm256_or_si256(numbers, _mm256_xor_si256(low, high));
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

// Eight rows of 4 values; id(i) is the number of the i-th.
template <class Id>
inline __m256i eight_short_rows(const uint8_t (*table)[4], Id id) {
    auto row = [&](int i) { return int(read_as<int32_t>(table[id(i)])); };
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
            const __m256i low = four_rows(grids.iq2xxs, [&](int i) { return ids[i]; });
            const __m256i high = four_rows(grids.iq2xxs, [&](int i) { return ids[8 + i]; });
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
            const auto id = [&](int i) { return b[2 + 8 * g + i]; };
            store32(q + 32 * g, negate(four_rows(grids.iq2xxs, id), even_signs(word)));
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
        for (int u = 0; u < 4; u++) {
            auto ids = [&](int i) { return read_as<uint64_t>(p + 2 + 16 * u + 8 * i) & 0x01ff01ff01ff01ff; };
            s.q[u] = negate(eight_rows(grids.iq2xs, ids(0), ids(1)), signs[u]);
        }
        s.scale = half_plus_nibbles(read_half(p) * 0.25f, p + 66);
        return s;
    }
#elif TANDEM_AVX2
    static void unpack_avx2(const uint8_t* b, int8_t* q, float* scale, float*) {
        half_plus_nibbles(read_half(b) * 0.25f, b + 66, scale);
        alignas(32) uint32_t signs[8];
        const __m256i first = _mm256_srli_epi16(load32(b + 2), 9), second = _mm256_srli_epi16(load32(b + 34), 9);
        const __m256i numbers = _mm256_permute4x64_epi64(_mm256_packus_epi16(first, second), 0xd8);
        _mm256_store_si256((__m256i*)signs, even_signs(numbers));
        for (int g = 0; g < 8; g++) {
            const uint64_t words = read_as<uint64_t>(b + 2 + 8 * g);
            const auto id = [&](int i) { return words >> 16 * i & 511; };
            store32(q + 32 * g, negate(four_rows(grids.iq2xs, id), signs[g]));
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
        for (int u = 0; u < 4; u++) {
            auto ids = [&](int i) {
                return four_words(p + 2 + 8 * u + 4 * i) | _pdep_u64(p[66 + 2 * u + i], 0x0300030003000300);
            };
            s.q[u] = negate(eight_rows(grids.iq2s, ids(0), ids(1)), read_as<uint64_t>(p + 34 + 8 * u));
        }
        s.scale = half_plus_nibbles(read_half(p) * 0.25f, p + 74);
        return s;
    }
#elif TANDEM_AVX2
    static void unpack_avx2(const uint8_t* b, int8_t* q, float* scale, float*) {
        half_plus_nibbles(read_half(b) * 0.25f, b + 74, scale);
        for (int g = 0; g < 8; g++) {
            const uint8_t* low = b + 2 + 4 * g;
            const uint32_t high = b[66 + g];
            const auto id = [&](int i) { return low[i] | (high << (8 - 2 * i) & 0x300); };
            store32(q + 32 * g, negate(four_rows(grids.iq2s, id), read_as<uint32_t>(b + 34 + 4 * g)));
        }
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
    static constexpr bool strided = true;
    static __m256 factors(const uint8_t* p, __m256i words) {
        const __m256 codes = _mm256_cvtepi32_ps(_mm256_srli_epi32(words, 28));
        return _mm256_mul_ps(_mm256_set1_ps(read_half(p) * 0.5f), _mm256_add_ps(codes, _mm256_set1_ps(0.5f)));
    }
    static Span<4, 8> load(const uint8_t* p) {
        Span<4, 8> s;
        const __m256i words = _mm256_loadu_si256((const __m256i*)(p + 66));
        alignas(32) uint64_t signs[4];
        _mm256_store_si256((__m256i*)signs, even_signs(four_sevens(words)));
        look_up_iq3xxs(_mm512_loadu_si512(p + 2), s.q);
        for (int u = 0; u < 4; u++) s.q[u] = negate(s.q[u], signs[u]);
        s.scale = factors(p, words);
        return s;
    }
    static LaneSpan lanes(const uint8_t* p) {
        LaneSpan s;
        const __m256i words = _mm256_loadu_si256((const __m256i*)(p + 66));
        const __m512i ids = _mm512_loadu_si512(p + 2);
        for (int c = 0; c < 4; c++) s.q[c] = look_up_256(grids.iq3xxs_columns[c], ids);
        add_128(s.q);
        negate_strided(s.q, even_signs(four_sevens(words)));
        s.scale = lane_factors(factors(p, words));
        return s;
    }
#elif TANDEM_AVX2
    static void unpack_avx2(const uint8_t* b, int8_t* q, float* scale, float*) {
        half_plus_tops(read_half(b) * 0.5f, load32(b + 66), scale);
        for (int g = 0; g < 8; g++) {
            const uint32_t word = read_as<uint32_t>(b + 66 + 4 * g);
            const auto id = [&](int i) { return b[2 + 8 * g + i]; };
            store32(q + 32 * g, negate(eight_short_rows(grids.iq3xxs, id), even_signs(word)));
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
    static constexpr bool strided = true;
    static __m256 factors(const uint8_t* p) {
        const uint64_t codes = _pdep_u64(read_as<uint32_t>(p + 106), 0x1e1e1e1e1e1e1e1e) | 0x0101010101010101;
        return _mm256_mul_ps(half_times_8(p), bytes_to_float8(codes));
    }
    static Span<4, 8> load(const uint8_t* p) {
        Span<4, 8> s;
        look_up_iq3s(_mm512_loadu_si512(p + 2), read_as<uint64_t>(p + 66), s.q);
        for (int u = 0; u < 4; u++) s.q[u] = negate(s.q[u], read_as<uint64_t>(p + 74 + 8 * u));
        s.scale = factors(p);
        return s;
    }
    static LaneSpan lanes(const uint8_t* p) {
        LaneSpan s;
        strided_iq3s(_mm512_loadu_si512(p + 2), read_as<uint64_t>(p + 66), s.q);
        negate_strided(s.q, _mm256_loadu_si256((const __m256i*)(p + 74)));
        // 2 * nibble + 1 of each group
        const __m512i nibble_to_1 =
            _mm512_setr_epi32(31, 31, 3, 3, 7, 7, 11, 11, 15, 15, 19, 19, 23, 23, 27, 27);
        const __m512i packed = _mm512_rorv_epi32(_mm512_set1_epi32(read_as<int>(p + 106)), nibble_to_1);
        const __m512i odd = _mm512_ternarylogic_epi32(packed, _mm512_set1_epi32(30), _mm512_set1_epi32(1), 0xea);
        s.scale = _mm512_mul_ps(half_times_16(p), _mm512_cvtepi32_ps(odd));
        return s;
    }
#elif TANDEM_AVX2
    static void unpack_avx2(const uint8_t* b, int8_t* q, float* scale, float*) {
        const uint64_t codes = _pdep_u64(read_as<uint32_t>(b + 106), 0x1e1e1e1e1e1e1e1e) | 0x0101010101010101;
        _mm256_storeu_ps(scale, _mm256_mul_ps(_mm256_set1_ps(read_half(b)), bytes_to_float8(codes)));
        for (int g = 0; g < 8; g++) {
            const uint8_t* low = b + 2 + 8 * g;
            const uint32_t high = b[66 + g];
            const auto id = [&](int i) { return low[i] | (high << (8 - i) & 256); };
            store32(q + 32 * g, negate(eight_short_rows(grids.iq3s, id), read_as<uint32_t>(b + 74 + 4 * g)));
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
        const __m256 up = _mm256_set1_ps(-0.875f), down = _mm256_set1_ps(-1.125f);
        const __m256 shift = _mm256_blendv_ps(up, down, _mm256_castsi256_ps(wide));
        *bias = _mm256_mul_ps(*scale, shift);
    }
#endif
#if TANDEM_AVX512
    static Span<4, 8> load(const uint8_t* p) {
        Span<4, 8> s;
        const __m128i packed = _mm_loadu_si128((const __m128i*)(p + 34));
        for (int u = 0; u < 4; u++) {
            // The high bits of four row numbers lie in one word, 3 bits each.
            auto ids = [&](int i) {
                const uint64_t high = _pdep_u64(read_as<uint16_t>(p + 34 + 4 * u + 2 * i), 0x0700070007000700);
                return four_words(p + 2 + 8 * u + 4 * i) | high;
            };
            s.q[u] = eight_rows(grids.iq1s, ids(0), ids(1));
        }
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
            const uint8_t* low = b + 2 + 4 * g;
            const uint32_t word = read_as<uint16_t>(b + 34 + 2 * g);
            const auto id = [&](int i) { return low[i] | (word >> 3 * i & 7) << 8; };
            store32(q + 32 * g, four_rows(grids.iq1s, id));
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
        // Per 8 values: whether the shift is up, that is bit 3 of the nibble clear.
        const __m128i nibbles = _mm_loadu_si128((const __m128i*)(p + 32));
        const uint32_t even = _mm_movepi8_mask(_mm_slli_epi16(nibbles, 4)), uneven = _mm_movepi8_mask(nibbles);
        const uint32_t up = ~(_pdep_u32(even, 0x55555555) | _pdep_u32(uneven, 0xaaaaaaaa));
        for (int u = 0; u < 4; u++) {
            auto ids = [&](int i) {
                const uint64_t high = _pdep_u64(read_as<uint16_t>(p + 32 + 4 * u + 2 * i), 0x0f000f000f000f00);
                return four_words(p + 8 * u + 4 * i) | (high & 0x0700070007000700);
            };
            const __m512i eights = _mm512_slli_epi16(eight_rows(grids.iq1s, ids(0), ids(1)), 3);
            s.q[u] = _mm512_add_epi8(eights, _mm512_maskz_set1_epi64(__mmask8(up >> 8 * u), 0x0202020202020202));
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
        const __m256i bit_3 = _mm256_setr_epi64x(8, 128, 8 << 8, 128 << 8);
        for (int h = 0; h < 2; h++) {
            const uint64_t odd = _pdep_u64(threes >> 24 * h, 0x0e0e0e0e0e0e0e0e) | 0x0101010101010101;
            _mm256_storeu_ps(scale + 8 * h, _mm256_mul_ps(d, bytes_to_float8(odd)));
        }
        for (int g = 0; g < 8; g++) {
            const uint8_t* low = b + 4 * g;
            const uint32_t nibbles = read_as<uint16_t>(b + 32 + 2 * g);
            const auto id = [&](int i) { return low[i] | (nibbles >> 4 * i & 7) << 8; };
            const __m256i eights = _mm256_slli_epi16(four_rows(grids.iq1s, id), 3);
            // 2 where the shift is up: bit 3 of the nibble is clear.
            const __m256i down = _mm256_cmpeq_epi64(_mm256_and_si256(_mm256_set1_epi64x(nibbles), bit_3), bit_3);
            const __m256i twos = _mm256_andnot_si256(down, _mm256_set1_epi8(2));
            store32(q + 32 * g, _mm256_add_epi8(eights, twos));
        }
    }
#endif
};

}  // namespace tandem::quant
