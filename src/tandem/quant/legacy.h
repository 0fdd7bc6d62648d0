// The 32-value types with one scale per block: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0. Meanings: quant/legacy.py.
// Low nibbles are values 0-15 of a block, high nibbles 16-31.
#pragma once
#include "quant/lanes.h"

namespace tandem::quant {

inline void split_nibbles16(const uint8_t* packed, int8_t* q) {
    for (int i = 0; i < 16; i++) {
        q[i] = int8_t(packed[i] & 15);
        q[i + 16] = int8_t(packed[i] >> 4);
    }
}

inline void add_fifth_bits(uint32_t bits, int8_t* q) {
    for (int i = 0; i < 32; i++) q[i] = int8_t(q[i] | (bits >> i & 1) << 4);
}

#if TANDEM_AVX512
inline __m512i with_fifth_bits(__m512i q, uint32_t low, uint32_t high) {
    return _mm512_mask_add_epi8(q, low | uint64_t(high) << 32, q, _mm512_set1_epi8(16));
}
#endif

#if TANDEM_AVX2
// Bit i of bits becomes 16 in byte i of q.
inline __m256i with_fifth_bits(__m256i q, uint32_t bits) {
    const __m256i source = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x(int64_t(0x8040201008040201));
    const __m256i bytes = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(int(bits)), source), bit);
    return _mm256_or_si256(q, keep(_mm256_cmpeq_epi8(bytes, bit), 16));
}
#endif

struct Q4_0 {
    static constexpr int type = 2, block = 32, bytes = 18, group = 32, q_max = 15, offset = 8;
    static constexpr bool is_signed = false, has_min = false;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float*) {
        scale[0] = read_half(b);
        split_nibbles16(b + 2, q);
    }
#if TANDEM_AVX512
    static __m512i codes(const uint8_t* p) { return two_blocks_of_nibbles<2, 18>(p); }
    template <class At>
    static void lane_codes(At at, __m512i* q) {
        lane_nibbles(at, 2, q);
    }
#endif
#if TANDEM_AVX2
    static __m256i codes(const uint8_t* b) { return split_nibbles(b + 2); }
#endif
};

struct Q4_1 {
    static constexpr int type = 3, block = 32, bytes = 20, group = 32, q_max = 15, offset = 0;
    static constexpr bool is_signed = false, has_min = true;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float* bias) {
        scale[0] = read_half(b);
        bias[0] = read_half(b + 2);
        split_nibbles16(b + 4, q);
    }
#if TANDEM_AVX512
    static __m512i codes(const uint8_t* p) { return two_blocks_of_nibbles<4, 20>(p); }
    template <class At>
    static void lane_codes(At at, __m512i* q) {
        lane_nibbles(at, 4, q);
    }
#endif
#if TANDEM_AVX2
    static __m256i codes(const uint8_t* b) { return split_nibbles(b + 4); }
#endif
};

struct Q5_0 {
    static constexpr int type = 6, block = 32, bytes = 22, group = 32, q_max = 31, offset = 16;
    static constexpr bool is_signed = false, has_min = false;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float*) {
        scale[0] = read_half(b);
        split_nibbles16(b + 6, q);
        add_fifth_bits(read_as<uint32_t>(b + 2), q);
    }
#if TANDEM_AVX512
    static __m512i codes(const uint8_t* p) {
        return with_fifth_bits(two_blocks_of_nibbles<6, 22>(p), read_as<uint32_t>(p + 2), read_as<uint32_t>(p + 24));
    }
#endif
#if TANDEM_AVX2
    static __m256i codes(const uint8_t* b) { return with_fifth_bits(split_nibbles(b + 6), read_as<uint32_t>(b + 2)); }
#endif
};

struct Q5_1 {
    static constexpr int type = 7, block = 32, bytes = 24, group = 32, q_max = 31, offset = 0;
    static constexpr bool is_signed = false, has_min = true;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float* bias) {
        scale[0] = read_half(b);
        bias[0] = read_half(b + 2);
        split_nibbles16(b + 8, q);
        add_fifth_bits(read_as<uint32_t>(b + 4), q);
    }
#if TANDEM_AVX512
    static __m512i codes(const uint8_t* p) {
        return with_fifth_bits(two_blocks_of_nibbles<8, 24>(p), read_as<uint32_t>(p + 4), read_as<uint32_t>(p + 28));
    }
#endif
#if TANDEM_AVX2
    static __m256i codes(const uint8_t* b) { return with_fifth_bits(split_nibbles(b + 8), read_as<uint32_t>(b + 4)); }
#endif
};

struct Q8_0 {
    static constexpr int type = 8, block = 32, bytes = 34, group = 32, q_max = 128, offset = 0;
    static constexpr bool is_signed = true, has_min = false;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float*) {
        scale[0] = read_half(b);
        std::memcpy(q, b + 2, 32);
    }
#if TANDEM_AVX512
    static __m512i codes(const uint8_t* p) {
        const __m256i low = _mm256_loadu_si256((const __m256i*)(p + 2)),
                      high = _mm256_loadu_si256((const __m256i*)(p + 36));
        return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    }
#endif
#if TANDEM_AVX2
    static __m256i codes(const uint8_t* b) { return load32(b + 2); }
#endif
};

}  // namespace tandem::quant
