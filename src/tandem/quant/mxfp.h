// FP4 types: doubled E2M1 values under small float scales. Meanings: quant/mxfp.py.
#pragma once
#include "quant/format.h"

namespace tandem::quant {

// 2^(code - 128): half of the E8M0 number, which undoes the doubling.
inline float half_e8m0(uint8_t code) { return bits_to_float(code < 2 ? 0x00200000u << code : uint32_t(code - 1) << 23); }

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
};

}  // namespace tandem::quant
