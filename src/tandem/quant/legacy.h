// The 32-value types with one scale per block: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0. Meanings: quant/legacy.py.
// Low nibbles are values 0-15 of a block, high nibbles 16-31.
#pragma once
#include "quant/format.h"

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

struct Q4_0 {
    static constexpr int type = 2, block = 32, bytes = 18, group = 32, q_max = 15, offset = 8;
    static constexpr bool is_signed = false, has_min = false;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float*) {
        scale[0] = read_half(b);
        split_nibbles16(b + 2, q);
    }
};

struct Q4_1 {
    static constexpr int type = 3, block = 32, bytes = 20, group = 32, q_max = 15, offset = 0;
    static constexpr bool is_signed = false, has_min = true;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float* bias) {
        scale[0] = read_half(b);
        bias[0] = read_half(b + 2);
        split_nibbles16(b + 4, q);
    }
};

struct Q5_0 {
    static constexpr int type = 6, block = 32, bytes = 22, group = 32, q_max = 31, offset = 16;
    static constexpr bool is_signed = false, has_min = false;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float*) {
        scale[0] = read_half(b);
        split_nibbles16(b + 6, q);
        add_fifth_bits(read_as<uint32_t>(b + 2), q);
    }
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
};

struct Q8_0 {
    static constexpr int type = 8, block = 32, bytes = 34, group = 32, q_max = 128, offset = 0;
    static constexpr bool is_signed = true, has_min = false;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float*) {
        scale[0] = read_half(b);
        std::memcpy(q, b + 2, 32);
    }
};

}  // namespace tandem::quant
