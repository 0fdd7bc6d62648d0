// Ternary types: 256 values of -1, 0 or 1 under one f16 scale at the end. Meanings: quant/ternary.py.
#pragma once
#include "quant/format.h"

namespace tandem::quant {

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
#endif
#if TANDEM_AVX2
    static void unpack_avx2(const uint8_t* b, int8_t* q, float* scale, float*) {
        _mm256_storeu_ps(scale, _mm256_set1_ps(read_half(b + 64)));
        for (int h = 0; h < 2; h++) {
            const __m256i codes = load32(b + 32 * h);
            for (int part = 0; part < 4; part++) store32(q + 128 * h + 32 * part, keep(_mm256_srli_epi16(codes, 2 * part), 3));
        }
    }
#endif
};

}  // namespace tandem::quant
