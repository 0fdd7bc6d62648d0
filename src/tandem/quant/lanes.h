// Spans of 256 weights in the order of the activations (ops/matmul.h): lane l of 16 holds group l of 16 values, and
// register u its values 4 u .. 4 u + 3 (in strided order: u, u + 4, u + 8, u + 12). So the integer products of all four
// registers add up in one, lane by lane, and one conversion and one multiplication by scales serve all of them. Weights
// are unsigned here: signed formats add 128, which kLaneOffset takes out again.
//
// A format may say static LaneSpan lanes(const uint8_t*), or, in blocks of 32, lane_codes(at, q) with at(i) the i-th
// of 8 blocks; the others are loaded in natural order and transposed.
#pragma once
#include "quant/format.h"

#if TANDEM_AVX512

namespace tandem::quant {

constexpr int kLaneSpan = 256;

struct LaneSpan {
    __m512i q[4];
    __m512 scale, min;  // value = scale * (q - kLaneOffset) - min; min is set only with F::has_min
};

template <class F>
constexpr int kLaneOffset = F::is_signed ? 128 : F::offset;

template <class F, class = void> struct HasLanes : std::false_type {};
template <class F> struct HasLanes<F, std::void_t<decltype(&F::lanes)>> : std::true_type {};
// Whether lanes come in strided order: where a codebook row is four values, looking up one of each row is that.
template <class F, class = void> struct IsStrided : std::false_type {};
template <class F> struct IsStrided<F, std::void_t<decltype(F::strided)>> : std::true_type {};
struct AnyBlock {
    const uint8_t* operator()(int) const;
};
template <class F, class = void> struct HasLaneCodes : std::false_type {};
template <class F>
struct HasLaneCodes<F, std::void_t<decltype(F::lane_codes(AnyBlock{}, nullptr))>> : std::true_type {};

// A constant that stays in a register over a loop: the compiler would rather make it anew each time.
inline __attribute__((always_inline)) __m512i constant(__m512i c) {
    asm("" : "+v"(c));
    return c;
}

// Which dword of the packed bytes register u takes into lane l, and which bits of their bytes.
struct LaneTable {
    uint32_t dword[4][16];
    uint64_t bits[8];  // of two lanes each: the matrix over GF(2) that moves them to their place and drops the others
    __m512i take(int u, __m512i bytes) const {
        return chosen(_mm512_permutexvar_epi32(_mm512_load_si512(dword[u]), bytes));
    }
    __m512i take(int u, __m512i first, __m512i second) const {
        return chosen(_mm512_permutex2var_epi32(first, _mm512_load_si512(dword[u]), second));
    }
    __m512i chosen(__m512i bytes) const { return _mm512_gf2p8affine_epi64_epi8(bytes, _mm512_load_si512(bits), 0); }
};

// `count` bits from bit from(lane) on, moved to bit `to`.
template <class Dword, class From>
constexpr LaneTable lane_table(Dword dword, From from, int count, int to) {
    LaneTable t{};
    for (int l = 0; l < 16; l++)
        for (int u = 0; u < 4; u++) t.dword[u][l] = uint32_t(dword(l) + u);
    for (int pair = 0; pair < 8; pair++)
        for (int i = 0; i < count; i++)
            t.bits[pair] |= uint64_t(1) << (8 * (7 - (to + i)) + from(2 * pair) + i);  // byte 7 - i gives bit i
    return t;
}

// 32 bytes of nibbles for each two groups of 32: low ones for the first.
alignas(64) inline constexpr LaneTable kNibblePairs =
    lane_table([](int l) { return 8 * (l / 4) + 4 * (l % 2); }, [](int l) { return 4 * (l / 2 % 2); }, 4, 0);
// 64 bytes of nibbles for each half: low ones for the first 64 values.
alignas(64) inline constexpr LaneTable kNibbleHalves =
    lane_table([](int l) { return 16 * (l / 8) + 8 * (l / 2 % 2) + 4 * (l % 2); },
               [](int l) { return 4 * (l / 4 % 2); }, 4, 0);
// 32 bytes of two-bit parts for each half, to bit 0 or 4.
alignas(64) inline constexpr LaneTable kTwoBits =
    lane_table([](int l) { return 8 * (l / 8) + 4 * (l % 2); }, [](int l) { return 2 * (l / 2 % 4); }, 2, 0);
alignas(64) inline constexpr LaneTable kTwoBitsTo4 =
    lane_table([](int l) { return 8 * (l / 8) + 4 * (l % 2); }, [](int l) { return 2 * (l / 2 % 4); }, 2, 4);
// 32 bytes with one bit for each group of 32, to bit 2 or 4.
alignas(64) inline constexpr LaneTable kBitTo2 =
    lane_table([](int l) { return 4 * (l % 2); }, [](int l) { return l / 2; }, 1, 2);
alignas(64) inline constexpr LaneTable kBitTo4 =
    lane_table([](int l) { return 4 * (l % 2); }, [](int l) { return l / 2; }, 1, 4);

// 16 bytes of nibbles for each group of 32, low ones for its first half: numbers whose low four bits count.
struct NibbleGroups {
    uint32_t dword[4][16], shift[16];
};
alignas(64) inline constexpr NibbleGroups kNibbleGroups = [] {
    NibbleGroups t{};
    for (int l = 0; l < 16; l++) {
        for (int u = 0; u < 4; u++) t.dword[u][l] = uint32_t(4 * (l / 2) + u);
        t.shift[l] = uint32_t(4 * (l % 2));
    }
    return t;
}();
inline __m512i group_nibbles(int u, __m512i first, __m512i second) {
    const __m512i own = _mm512_permutex2var_epi32(first, _mm512_load_si512(kNibbleGroups.dword[u]), second);
    return _mm512_srlv_epi32(own, _mm512_load_si512(kNibbleGroups.shift));
}
// Of a table of 16 bytes, by the low four bits.
inline __m512i look_up_low(__m512i table_64, __m512i codes) { return _mm512_permutexvar_epi8(codes, table_64); }
inline __m512i four_times(const int8_t* table16) {
    return constant(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table16)));
}

// Small numbers packed in up to 16 bytes, one a lane: byte 0 of a lane is low_at(l) of them, byte 1 is high_at(l).
// The number is the 4 bits at low_shift, with 2 more from bit high_bit of byte 1.
struct ScaleTable {
    uint8_t byte[64];
    uint32_t low[16], high[16];
};

template <class LowAt, class LowShift, class HighAt, class HighBit>
constexpr ScaleTable scale_table(LowAt low_at, LowShift low_shift, HighAt high_at, HighBit high_bit) {
    ScaleTable t{};
    for (int l = 0; l < 16; l++) {
        t.byte[4 * l] = uint8_t(low_at(l));
        t.byte[4 * l + 1] = uint8_t(high_at(l));
        t.byte[4 * l + 2] = t.byte[4 * l + 3] = 0x80;  // zero
        t.low[l] = uint32_t(low_shift(l));
        t.high[l] = uint32_t(8 + high_bit(l) - 4);
    }
    return t;
}

inline __m512i six_bits(const ScaleTable& t, __m512i packed, bool low_is_shifted = true) {
    const __m512i own = _mm512_shuffle_epi8(packed, _mm512_load_si512(t.byte));
    const __m512i shifted = low_is_shifted ? _mm512_srlv_epi32(own, _mm512_load_si512(t.low)) : own;
    const __m512i low = _mm512_and_si512(shifted, constant(_mm512_set1_epi32(15)));
    const __m512i high = _mm512_rorv_epi32(own, _mm512_load_si512(t.high));
    return _mm512_ternarylogic_epi32(low, high, constant(_mm512_set1_epi32(0x30)), 0xf8);
}

inline __m512i sixteen_everywhere(const uint8_t* p) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p));
}

// Four units of 64 values in natural order -> lanes.
inline void to_lanes(__m512i* q) {
    const __m512i even = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    const __m512i odd = _mm512_setr_epi32(2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31);
    const __m512i a = _mm512_permutex2var_epi32(q[0], even, q[1]), b = _mm512_permutex2var_epi32(q[2], even, q[3]);
    const __m512i c = _mm512_permutex2var_epi32(q[0], odd, q[1]), d = _mm512_permutex2var_epi32(q[2], odd, q[3]);
    q[0] = _mm512_shuffle_i64x2(a, b, 0x44);
    q[1] = _mm512_shuffle_i64x2(a, b, 0xee);
    q[2] = _mm512_shuffle_i64x2(c, d, 0x44);
    q[3] = _mm512_shuffle_i64x2(c, d, 0xee);
}

inline void add_128(__m512i* q) {
    for (int u = 0; u < 4; u++) q[u] = _mm512_xor_si512(q[u], _mm512_set1_epi8(-128));
}

// One factor a lane from one per group.
inline __m512 lane_factors(__m256 per_32) {
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(per_32));
}
inline __m512 lane_factors(__m512 per_16) { return per_16; }

// Strided values whose bit of `signs` is set (256 of them in natural order), negated; of 128 + q, 128 - q is left.
inline void negate_strided(__m512i* q, __m256i signs) {
    alignas(64) static constexpr auto index = [] {
        struct { uint8_t at[64]; } made{};
        for (int i = 0; i < 64; i++) made.at[i] = uint8_t(i / 2);
        return made;
    }();
    const __m512i bytes = _mm512_permutexvar_epi8(_mm512_load_si512(index.at), _mm512_castsi256_si512(signs));
    for (int c = 0; c < 4; c++) {
        const __mmask64 where = _mm512_test_epi8_mask(bytes, constant(_mm512_set1_epi16(short(0x1001 << c))));
        q[c] = _mm512_mask_sub_epi8(q[c], where, _mm512_setzero_si512(), q[c]);
    }
}

// 16 bytes from each of 8 blocks, `skip` into them.
template <class At>
inline void load_sixteens(At at, int skip, __m512i* out) {
    for (int h = 0; h < 2; h++) {
        auto part = [&](int i) { return _mm_loadu_si128((const __m128i*)(at(4 * h + i) + skip)); };
        const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(part(0)), part(1), 1);
        const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(part(2)), part(3), 1);
        out[h] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    }
}
template <class At>
inline void lane_nibbles(At at, int skip, __m512i* q) {
    __m512i packed[2];
    load_sixteens(at, skip, packed);
    for (int u = 0; u < 4; u++)
        q[u] = _mm512_and_si512(group_nibbles(u, packed[0], packed[1]), constant(_mm512_set1_epi8(15)));
}

template <class At>
inline void lane_nibbles(At at, int skip, const int8_t* table16, __m512i* q) {
    __m512i packed[2];
    load_sixteens(at, skip, packed);
    for (int u = 0; u < 4; u++) q[u] = look_up_low(four_times(table16), group_nibbles(u, packed[0], packed[1]));
}

// Scale, and bias with has_min, of 8 blocks that begin with them.
template <class F, class At>
inline void load_factors(At at, LaneSpan* s) {
    uint32_t first[8];
    for (int i = 0; i < 8; i++) first[i] = read_as<uint32_t>(at(i));
    const __m256i both = _mm256_loadu_si256((const __m256i*)first);
    if constexpr (HasScales<F>::value) s->scale = lane_factors(F::scales(first));
    else s->scale = lane_factors(_mm256_cvtph_ps(_mm256_cvtepi32_epi16(both)));
    if constexpr (F::has_min)
        s->min = lane_factors(_mm256_xor_ps(_mm256_cvtph_ps(_mm256_cvtepi32_epi16(_mm256_srli_epi32(both, 16))),
                                            _mm256_set1_ps(-0.0f)));
}

template <class F>
LaneSpan load_some_lanes(const uint8_t* p, int n_blocks);

// The next 256 values.
template <class F>
inline LaneSpan load_lanes(const uint8_t* p) {
    LaneSpan s;
    if constexpr (HasLanes<F>::value) {
        return F::lanes(p);
    } else if constexpr (HasCodes<F>::value) {
        auto at = [&](int i) { return p + i * F::bytes; };
        if constexpr (HasLaneCodes<F>::value) {
            F::lane_codes(at, s.q);
        } else {
            for (int u = 0; u < 4; u++) s.q[u] = F::codes(at(2 * u));
            to_lanes(s.q);
            if (F::is_signed) add_128(s.q);
        }
        load_factors<F>(at, &s);
    } else if constexpr (kSpan<F> == kLaneSpan) {
        const SpanOf<F> natural = load_span<F>(p);
        for (int u = 0; u < 4; u++) s.q[u] = natural.q[u];
        to_lanes(s.q);
        if (F::is_signed) add_128(s.q);
        s.scale = lane_factors(natural.scale);
        if constexpr (F::has_min) s.min = _mm512_xor_ps(lane_factors(natural.bias), _mm512_set1_ps(-0.0f));
    } else {
        return load_some_lanes<F>(p, kLaneSpan / F::block);
    }
    return s;
}

// The last blocks of a row, fewer than a span: what follows them are some numbers, which meet activations of zero.
template <class F>
inline LaneSpan load_some_lanes(const uint8_t* p, int n_blocks) {
    LaneSpan s;
    auto at = [&](int i) { return p + (i < n_blocks ? i : n_blocks - 1) * F::bytes; };
    if constexpr (HasCodes<F>::value) {
        if constexpr (HasLaneCodes<F>::value) {
            F::lane_codes(at, s.q);
        } else {
            for (int u = 0; u < 4; u++) {
                s.q[u] = _mm512_setzero_si512();
                if (2 * u + 1 < n_blocks) {
                    s.q[u] = F::codes(at(2 * u));
                } else if (2 * u < n_blocks) {
                    uint8_t last[2 * F::bytes] = {};
                    std::memcpy(last, at(2 * u), F::bytes);
                    s.q[u] = F::codes(last);
                }
            }
            to_lanes(s.q);
            if (F::is_signed) add_128(s.q);
        }
        load_factors<F>(at, &s);
    } else if constexpr (F::block == 64) {
        __m128 scale[4];
        for (int u = 0; u < 4; u++) {
            const Span<1, 4> part = load_span<F>(at(u));
            s.q[u] = part.q[0];
            scale[u] = part.scale;
        }
        to_lanes(s.q);
        if (F::is_signed) add_128(s.q);
        const __m256 low = _mm256_set_m128(scale[1], scale[0]), high = _mm256_set_m128(scale[3], scale[2]);
        s.scale = _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
    }
    return s;
}

}  // namespace tandem::quant

#endif
