// The K types: super-blocks of 256 values under f16 scales of small integer scales. Meanings: quant/kquant.py.
#pragma once
#include "quant/format.h"

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
};

struct Q4_K {
    static constexpr int type = 12, block = 256, bytes = 144, group = 32, q_max = 15, offset = 0;
    static constexpr bool is_signed = false, has_min = true;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float* bias) {
        scales_and_mins(b, scale, bias);
        for (int j = 0; j < 4; j++) split_nibbles32(b + 16 + 32 * j, q + 64 * j);
    }
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
};

}  // namespace tandem::quant
