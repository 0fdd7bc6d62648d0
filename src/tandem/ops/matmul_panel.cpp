// The matrix product of one panel slice (matmul_panel.h) with many int8 activation rows, in register tiles.
#include "ops/matmul_panel.h"

namespace tandem {

#if TANDEM_AVX512

namespace {

constexpr int kTileRows = 6;  // 6 x 32 results: 12 integer and 12 float accumulators

template <bool Group16, bool HasMin, int R>
void tile(const PanelSlice& slice, const ActLayout& at, const uint8_t* const* records, float* out, bool accumulate) {
    constexpr int halves = Group16 ? 2 : 1;
    constexpr int64_t group_bytes = panel_group_bytes({Group16, HasMin, true, false, 1});
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
    k += at.natural;
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
void tiles(const PanelSlice& slice, int64_t cols, const uint8_t* const* records, int64_t n, float* out,
           bool accumulate) {
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
    auto run = slice.form.group16 ? (slice.form.has_bias ? tiles<true, true> : tiles<true, false>)
                                  : (slice.form.has_bias ? tiles<false, true> : tiles<false, false>);
    run(slice, cols, records, n, out, accumulate);
}

#elif TANDEM_AVX2

namespace {

constexpr int kTileRows = 4;  // 4 x 16 results: 8 integer accumulators; the float ones stay in the first-level cache

// out[2 vectors] += scale * dot * x_scale (+ bias * x_sum)
template <bool HasBias, int R>
inline void finish(const __m256i (*dot)[2], const float* scale, const float* bias, const uint8_t* const* rows,
                   int64_t x_scale, int64_t x_sum, float* out) {
    for (int r = 0; r < R; r++) {
        const __m256 factor = _mm256_broadcast_ss((const float*)(rows[r] + x_scale));
        for (int c = 0; c < 2; c++) {
            float* to = out + kPanel * r + 8 * c;
            const __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(dot[r][c]), factor);
            __m256 total = _mm256_fmadd_ps(value, _mm256_load_ps(scale + 8 * c), _mm256_loadu_ps(to));
            if constexpr (HasBias) {
                const __m256 sum = _mm256_broadcast_ss((const float*)(rows[r] + x_sum));
                total = _mm256_fmadd_ps(sum, _mm256_load_ps(bias + 8 * c), total);
            }
            _mm256_storeu_ps(to, total);
        }
    }
}

template <bool Signed>
inline __m256i pairs(__m256i w, __m256i magnitude, __m256i x) {
    if constexpr (Signed) return _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x, w));
    else return _mm256_maddubs_epi16(w, x);
}

// Products of Quads quads of 16 weight rows with R activations, as 32-bit sums. At most Sums16 are added in 16 bits.
template <int Quads, int Sums16, bool Signed, int R>
inline __attribute__((always_inline)) void quads(const uint8_t* q, const uint8_t* const* rows, int64_t x,
                                                 __m256i (*dot)[2]) {
    const __m256i ones = _mm256_set1_epi16(1);
    constexpr int at_once = Sums16 < Quads ? Sums16 : Quads;
    constexpr int step = at_once < 2 ? 1 : 2;  // quads per pass over the rows
    for (int r = 0; r < R; r++) dot[r][0] = dot[r][1] = _mm256_setzero_si256();
// Unrolled, GCC reorders the integer sums so that the products spill.
#pragma GCC unroll 1
    for (int i = 0; i < Quads; i += step) {
        __m256i w[step][2], magnitude[step][2];
        for (int j = 0; j < step; j++)
            for (int c = 0; c < 2; c++) {
                w[j][c] = _mm256_load_si256((const __m256i*)(q + 128 * (i + j) + 32 * c));
                magnitude[j][c] = Signed ? _mm256_abs_epi8(w[j][c]) : w[j][c];
            }
        for (int r = 0; r < R; r++) {
            __m256i sum[2];
            for (int j = 0; j < step; j++) {
                const __m256i value = _mm256_set1_epi32(read_as<int32_t>(rows[r] + x + 4 * (i + j)));
                for (int c = 0; c < 2; c++) {
                    const __m256i product = pairs<Signed>(w[j][c], magnitude[j][c], value);
                    sum[c] = j == 0 ? product : _mm256_add_epi16(sum[c], product);
                }
            }
            for (int c = 0; c < 2; c++) {
                if constexpr (at_once < 4) dot[r][c] = _mm256_add_epi32(dot[r][c], _mm256_madd_epi16(sum[c], ones));
                else dot[r][c] = _mm256_add_epi16(dot[r][c], sum[c]);
            }
        }
    }
    if constexpr (at_once >= 4)
        for (int r = 0; r < R; r++)
            for (int c = 0; c < 2; c++) dot[r][c] = _mm256_madd_epi16(dot[r][c], ones);
}

template <bool Group16, bool HasBias, int Sums16, bool Signed, int R>
void tile(const PanelSlice& slice, const ActLayout& at, const uint8_t* const* records, float* out) {
    constexpr int halves = Group16 ? 2 : 1;
    constexpr int64_t group_bytes = panel_group_bytes({Group16, HasBias, false, Signed, Sums16});
    const uint8_t* rows[R];
    for (int r = 0; r < R; r++) rows[r] = records[r];
    for (int c = 0; c < 2; c++) {
        const uint8_t* group = slice.panel;
        for (int64_t k = slice.k; k < slice.k + slice.count; k += 32, group += group_bytes) {
            for (int h = 0; h < halves; h++) {
                __m256i dot[R][2];
                quads<8 / halves, Sums16, Signed, R>(group + 1024 / halves * h + 64 * c, rows, at.natural + k + 16 * h,
                                                     dot);
                const float* scale = (const float*)(group + 1024) + 32 * h + 16 * c;
                const int64_t x_sum = Group16 ? at.sum16 + k / 4 + 4 * h : at.sum32 + k / 8;
                finish<HasBias, R>(dot, scale, scale + 32 * halves, rows, at.scale32 + k / 8, x_sum, out + 16 * c);
            }
        }
    }
}

template <bool Group16, bool HasBias, int Sums16, bool Signed>
void tiles(const PanelSlice& slice, int64_t cols, const uint8_t* const* records, int64_t n, float* out) {
    const ActLayout at(cols);
    for (; n >= kTileRows; n -= kTileRows, records += kTileRows, out += kTileRows * kPanel)
        tile<Group16, HasBias, Sums16, Signed, kTileRows>(slice, at, records, out);
    switch (n) {
        case 1: return tile<Group16, HasBias, Sums16, Signed, 1>(slice, at, records, out);
        case 2: return tile<Group16, HasBias, Sums16, Signed, 2>(slice, at, records, out);
        case 3: return tile<Group16, HasBias, Sums16, Signed, 3>(slice, at, records, out);
        default: return;
    }
}

template <bool Group16, int Sums16>
auto choose(const PanelForm& form) {
    if (form.is_signed) return form.has_bias ? tiles<Group16, true, Sums16, true> : tiles<Group16, false, Sums16, true>;
    return form.has_bias ? tiles<Group16, true, Sums16, false> : tiles<Group16, false, Sums16, false>;
}

}  // namespace

void multiply_panel(const PanelSlice& slice, int64_t cols, const uint8_t* const* records, int64_t n, float* out,
                    bool accumulate) {
    if (!accumulate) std::memset(out, 0, size_t(n * kPanel) * sizeof(float));
    const PanelForm& form = slice.form;
    auto run = form.sums16 == 8   ? (form.group16 ? choose<true, 8>(form) : choose<false, 8>(form))
               : form.sums16 == 2 ? (form.group16 ? choose<true, 2>(form) : choose<false, 2>(form))
                                  : (form.group16 ? choose<true, 1>(form) : choose<false, 1>(form));
    run(slice, cols, records, n, out);
}

#else

void multiply_panel(const PanelSlice&, int64_t, const uint8_t* const*, int64_t, float*, bool) {}

#endif

}  // namespace tandem
