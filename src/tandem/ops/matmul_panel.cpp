// The matrix product of one panel slice (matmul_panel.h) with many int8 activation rows, in register tiles.
#include "ops/matmul_panel.h"

namespace tandem {

#if TANDEM_AVX512

namespace {

constexpr int kTileRows = 6;  // 6 x 32 results: 12 integer and 12 float accumulators

template <bool Group16, bool HasMin, int R>
void tile(const PanelSlice& slice, const ActLayout& at, const uint8_t* const* records, float* out, bool accumulate) {
    constexpr int halves = Group16 ? 2 : 1;
    constexpr int64_t group_bytes = panel_group_bytes(Group16, HasMin);
    const uint8_t* rows[R];
    for (int r = 0; r < R; r++) rows[r] = records[r];
    __m512 total[R][2];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < 2; c++)
            total[r][c] = accumulate ? _mm512_loadu_ps(out + kPanel * r + 16 * c) : _mm512_setzero_ps();
    const uint8_t* group = slice.panel;
    const uint8_t* const end = group + slice.count / 32 * group_bytes;
    int64_t k = slice.k;
    int64_t scales = at.scale32 + k / 8;
    const int64_t sums = (Group16 ? at.sum16 : at.sum32) - at.scale32;
    for (; group < end; group += group_bytes, k += 32, scales += 4) {
        for (int h = 0; h < halves; h++) {
            __m512i dot[R][2];
            for (int c = 0; c < 2; c++) {
                const __m512i start = _mm512_load_si512(group + 1024 + 128 * h + 64 * c);
                for (int r = 0; r < R; r++) dot[r][c] = start;
            }
#pragma GCC unroll 8
            for (int i = 8 / halves * h; i < 8 / halves * (h + 1); i++) {
                const __m512i w0 = _mm512_load_si512(group + 128 * i), w1 = _mm512_load_si512(group + 128 * i + 64);
                for (int r = 0; r < R; r++) {
                    const __m512i x = _mm512_set1_epi32(read_as<int32_t>(rows[r] + k + 4 * i));
                    dot[r][0] = _mm512_dpbusd_epi32(dot[r][0], x, w0);
                    dot[r][1] = _mm512_dpbusd_epi32(dot[r][1], x, w1);
                }
            }
            const float* w_scale = (const float*)(group + 1024 + 128 * halves + 128 * h);
            for (int r = 0; r < R; r++) {
                const __m512 x_scale = _mm512_set1_ps(read_as<float>(rows[r] + scales));
                for (int c = 0; c < 2; c++)
                    total[r][c] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(dot[r][c]), x_scale),
                                                  _mm512_load_ps(w_scale + 16 * c), total[r][c]);
                if constexpr (HasMin) {
                    const float* bias = w_scale + 32 * halves;
                    const int64_t offset = sums + (Group16 ? 2 * scales - at.scale32 + 4 * h : scales);
                    const __m512 x_sum = _mm512_set1_ps(read_as<float>(rows[r] + offset));
                    for (int c = 0; c < 2; c++)
                        total[r][c] = _mm512_fmadd_ps(x_sum, _mm512_load_ps(bias + 16 * c), total[r][c]);
                }
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < 2; c++) _mm512_storeu_ps(out + kPanel * r + 16 * c, total[r][c]);
}

template <bool Group16, bool HasMin>
void tiles(const PanelSlice& slice, int64_t cols, const uint8_t* const* records, int64_t n, float* out, bool accumulate) {
    const ActLayout at(cols);
    for (; n >= kTileRows; n -= kTileRows, records += kTileRows, out += kTileRows * kPanel)
        tile<Group16, HasMin, kTileRows>(slice, at, records, out, accumulate);
    switch (n) {
        case 1: return tile<Group16, HasMin, 1>(slice, at, records, out, accumulate);
        case 2: return tile<Group16, HasMin, 2>(slice, at, records, out, accumulate);
        case 3: return tile<Group16, HasMin, 3>(slice, at, records, out, accumulate);
        case 4: return tile<Group16, HasMin, 4>(slice, at, records, out, accumulate);
        case 5: return tile<Group16, HasMin, 5>(slice, at, records, out, accumulate);
        default: return;
    }
}

}  // namespace

void multiply_panel(const PanelSlice& slice, int64_t cols, const uint8_t* const* records, int64_t n, float* out,
                    bool accumulate) {
    auto run = slice.group16 ? (slice.has_min ? tiles<true, true> : tiles<true, false>)
                             : (slice.has_min ? tiles<false, true> : tiles<false, false>);
    run(slice, cols, records, n, out, accumulate);
}

#else

void multiply_panel(const PanelSlice&, int64_t, const uint8_t* const*, int64_t, float*, bool) {}

#endif

}  // namespace tandem
