// Unpacks weight rows into the layout of the matrix product of many activations.
//
// A panel slice holds 32 weight rows. Per group of 32 values, contiguous:
//   int8   q[8 quads][32 rows][4]
//   int32  start[halves][32 rows]     -128 * sum of q: undoes the +128 of the unsigned activations (AVX-512 only)
//   float  scale[halves][32 rows]
//   float  bias[halves][32 rows]      only where the layout has one
// halves = 2 for types with a scale per 16 values, else 1.
// AVX-512 takes signed q, so offsets are subtracted; AVX2 takes unsigned q where it can, so offsets become biases.
#pragma once
#include "ops/matmul_kernels.h"

namespace tandem {

constexpr int64_t kSliceValues = 512;  // values of K per slice: a slice stays in the first-level cache

template <class F>
constexpr PanelForm panel_form() {
#if TANDEM_AVX512
    return {F::group == 16, F::has_min, true, false, 1};
#else
    // How many products can be summed in 16 bits: 2 * q_max * 127 each.
    return {F::group == 16, F::has_min || F::offset != 0, false, F::is_signed,
            F::q_max <= 15   ? 8
            : F::q_max <= 63 ? 2
                             : 1};
#endif
}

constexpr int64_t panel_group_bytes(PanelForm form) {
    return 1024 + 128 * (form.group16 ? 2 : 1) * (1 + form.has_start + form.has_bias);
}

#if TANDEM_AVX512

namespace panel512 {

// Rows a[0..15] of 16 dwords -> columns.
inline __attribute__((always_inline)) void transpose16(__m512i* a) {
    __m512i b[16];
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
            a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
        }
    // a[4 i + j]: lane l holds rows 4 i .. 4 i + 3 of column 4 l + j.
    for (int j = 0; j < 4; j++) {
        const __m512i low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88),
                      high = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
        const __m512i low2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
        const __m512i high2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
        b[j] = _mm512_shuffle_i32x4(low, low2, 0x88);
        b[8 + j] = _mm512_shuffle_i32x4(low, low2, 0xdd);
        b[4 + j] = _mm512_shuffle_i32x4(high, high2, 0x88);
        b[12 + j] = _mm512_shuffle_i32x4(high, high2, 0xdd);
    }
    for (int i = 0; i < 16; i++) a[i] = b[i];
}

// 16 weight rows from `first` on, 64 * Units values (count of them valid) that begin at group `at`.
template <class F, int Units, class Load>
void fill_rows(int64_t n, int64_t first, int64_t count, uint8_t* at, Load load) {
    using namespace quant;
    constexpr int groups = 64 * Units / F::group, halves = 32 / F::group;
    constexpr int64_t group_bytes = panel_group_bytes(panel_form<F>());
    constexpr int columns = groups * (F::has_min ? 2 : 1);
    alignas(64) int8_t q[16][64 * Units];
    alignas(64) float factors[16][(columns + 15) / 16 * 16] = {};  // scales, then biases
    for (int64_t r = 0; r < 16; r++) {
        // Rows past the last one repeat it; their results are not used.
        Span<Units, groups> s = load(first + r < n ? first + r : n - 1);
        for (int u = 0; u < Units; u++) {
            if (F::offset != 0) s.q[u] = _mm512_sub_epi8(s.q[u], _mm512_set1_epi8(F::offset));
            _mm512_store_si512(q[r] + 64 * u, s.q[u]);
        }
        Lanes<groups>::store(factors[r], s.scale);
        if constexpr (F::has_min) Lanes<groups>::store(factors[r] + groups, s.bias);
    }
    auto factor_at = [&](int i) {
        const int g = i % groups;
        return (float*)(at + g / halves * group_bytes + 1024 + 128 * halves) + 32 * (g % halves + i / groups * halves) +
               first;
    };
    for (int i = 0; i < columns; i += 16) {
        __m512i block[16];
        for (int r = 0; r < 16; r++) block[r] = _mm512_load_si512(factors[r] + i);
        transpose16(block);
        for (int j = 0; j < 16 && i + j < columns; j++)
            if ((i + j) % groups * F::group < count) _mm512_store_si512(factor_at(i + j), block[j]);
    }
    for (int u = 0; u < Units; u++) {
        __m512i quads[16];
        for (int r = 0; r < 16; r++) quads[r] = _mm512_load_si512(q[r] + 64 * u);
        transpose16(quads);
        for (int g = 0; g < 2; g++) {  // groups of 32 values in the unit
            if (64 * u + 32 * g >= count) break;
            uint8_t* group = at + (2 * u + g) * group_bytes;
            for (int h = 0; h < halves; h++) {
                __m512i sum = _mm512_setzero_si512();
                for (int i = 8 / halves * h; i < 8 / halves * (h + 1); i++) {
                    _mm512_store_si512(group + 128 * i + 4 * first, quads[8 * g + i]);
                    sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(-128), quads[8 * g + i]);
                }
                _mm512_store_si512(group + 1024 + 128 * h + 4 * first, _mm512_sub_epi32(_mm512_setzero_si512(), sum));
            }
        }
    }
}

}  // namespace panel512

template <class F>
void fill_panel(const uint8_t* w, int64_t stride, int64_t n, int64_t k, int64_t count, uint8_t* panel) {
    constexpr int span = quant::kSpan<F>;
    constexpr int64_t group_bytes = panel_group_bytes(panel_form<F>());
    for (int64_t first = 0; first < kPanel; first += 16) {
        int64_t done = 0;
        auto block_of = [&](int64_t row) { return w + row * stride + (k + done) / F::block * F::bytes; };
        for (; done + span <= count; done += span)
            panel512::fill_rows<F, span / 64>(n, first, span, panel + done / 32 * group_bytes,
                                              [&](int64_t row) { return quant::load_span<F>(block_of(row)); });
        if constexpr (quant::HasCodes<F>::value)
            for (; done < count; done += 64)
                panel512::fill_rows<F, 1>(n, first, count - done, panel + done / 32 * group_bytes, [&](int64_t row) {
                    if (count - done >= 64) return quant::load_pair<F>(block_of(row));
                    uint8_t last[2 * F::bytes] = {};
                    std::memcpy(last, block_of(row), F::bytes);
                    return quant::load_pair<F>(last);
                });
    }
}

#elif TANDEM_AVX2

namespace panel256 {

// Rows a[0..7] of 8 dwords -> columns.
inline void transpose8(__m256i* a) {
    __m256i b[8], c[8];
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            c[i + 2 * j] = _mm256_unpacklo_epi64(b[i + j], b[i + j + 2]);
            c[i + 2 * j + 1] = _mm256_unpackhi_epi64(b[i + j], b[i + j + 2]);
        }
    for (int j = 0; j < 4; j++) {
        a[j] = _mm256_permute2x128_si256(c[j], c[4 + j], 0x20);
        a[4 + j] = _mm256_permute2x128_si256(c[j], c[4 + j], 0x31);
    }
}

}  // namespace panel256

template <class F>
void fill_panel(const uint8_t* w, int64_t stride, int64_t n, int64_t k, int64_t count, uint8_t* panel) {
    constexpr int halves = 32 / F::group, groups = F::block / F::group;
    constexpr int64_t group_bytes = panel_group_bytes(panel_form<F>());
    alignas(32) int8_t q[8][F::block] = {};
    alignas(32) float scale[groups] = {}, bias[groups] = {};
    for (int64_t first = 0; first < kPanel; first += 8)
        for (int64_t done = 0; done < count; done += F::block) {
            uint8_t* at = panel + done / 32 * group_bytes;
            for (int64_t r = 0; r < 8; r++) {
                // Rows past the last one repeat it; their results are not used.
                const int64_t row = first + r < n ? first + r : n - 1;
                quant::unpack_block<F>(w + row * stride + (k + done) / F::block * F::bytes, q[r], scale, bias);
                for (int g = 0; g < groups; g++) {
                    float* scales = (float*)(at + g / halves * group_bytes + 1024) + 32 * (g % halves) + first + r;
                    scales[0] = scale[g];
                    if (F::has_min) scales[32 * halves] = bias[g];
                    else if (F::offset) scales[32 * halves] = -float(F::offset) * scale[g];
                }
            }
            for (int u = 0; u < F::block / 32; u++) {
                __m256i quads[8];
                for (int r = 0; r < 8; r++) quads[r] = _mm256_load_si256((const __m256i*)(q[r] + 32 * u));
                panel256::transpose8(quads);
                for (int i = 0; i < 8; i++)
                    _mm256_store_si256((__m256i*)(at + u * group_bytes + 128 * i + 4 * first), quads[i]);
            }
        }
}

#endif

}  // namespace tandem
