// Dot products of weight rows with 1..8 int8 activation rows: each block is unpacked once for all of them.
//
// The floating-point operations of one result are the same, in the same order, for any number of activations.
#pragma once
#include "ops/matmul_kernels.h"
#include "quant/lanes.h"

namespace tandem {

// A page ahead: the hardware prefetcher stops at page borders, and the weights of a run go on in the next page.
// Prefetching past the end of a tensor is harmless.
constexpr int kPrefetchBytes = 4096;

template <int Bytes>
inline void prefetch_ahead(const uint8_t* p) {
    for (int line = 0; line < Bytes; line += 64) __builtin_prefetch(p + kPrefetchBytes + line);
}

#if TANDEM_AVX512

namespace dot512 {

constexpr int kTogether = 4;  // weight rows whose sums over lanes are taken together

constexpr int log2_of(int n) { return n <= 1 ? 0 : 1 + log2_of(n / 2); }

// Products of one weight row with R activation rows.
template <class F, int R>
struct Sums {
    static constexpr int offset = quant::kLaneOffset<F>;
    // An offset that is no power of two goes over the sums in float.
    static constexpr bool whole_offset = offset != 0 && (offset & (offset - 1)) == 0;
    static constexpr bool has_bias = F::has_min || (offset != 0 && !whole_offset);
    __m512 products[R], biases[R];

    void clear() {
        for (int r = 0; r < R; r++) products[r] = biases[r] = _mm512_setzero_ps();
    }

    // Adds the span that begins `at` bytes into the records.
    inline __attribute__((always_inline)) void add(const quant::LaneSpan& s, const uint8_t* const* records,
                                                   int64_t at) {
        [[maybe_unused]] __m512 min;
        if constexpr (F::has_min) min = s.min;
        else if constexpr (has_bias) min = _mm512_mul_ps(s.scale, _mm512_set1_ps(float(offset)));
        for (int r = 0; r < R; r++) {
            const ActSpan& x = *(const ActSpan*)(records[r] + at);
            __m512i dot = _mm512_setzero_si512();
            if constexpr (whole_offset) dot = _mm512_slli_epi32(_mm512_load_si512(x.minus_sum), log2_of(offset));
            const int8_t* values = quant::IsStrided<F>::value ? x.strided : x.plain;
            for (int u = 0; u < 4; u++) dot = _mm512_dpbusd_epi32(dot, s.q[u], _mm512_load_si512(values + 64 * u));
            const __m512 scale = _mm512_mul_ps(s.scale, _mm512_load_ps(x.scale16));
            products[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, products[r]);
            if constexpr (has_bias) biases[r] = _mm512_fnmadd_ps(min, _mm512_load_ps(x.sum16), biases[r]);
        }
    }

    __m512 lanes(int r) const { return has_bias ? _mm512_add_ps(products[r], biases[r]) : products[r]; }
};

// The sums over lanes of four vectors, each in the same order.
inline __m128 totals(const __m512* v) {
    const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b));
    const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b));
    const __m512 all = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

}  // namespace dot512

template <class F, int R>
void dot_fixed(const uint8_t* w, int64_t stride, int64_t n, int64_t cols, const uint8_t* const* given, float* out,
               int64_t ld) {
    using dot512::kTogether;
    constexpr int64_t span_bytes = quant::kLaneSpan / F::block * F::bytes;
    static_assert(ActSpan::values == quant::kLaneSpan);
    const uint8_t* records[R];
    for (int r = 0; r < R; r++) records[r] = given[r];
    const int64_t whole = cols / quant::kLaneSpan * int64_t(sizeof(ActSpan));
    const int rest = int(cols % quant::kLaneSpan);
    const int64_t gap = stride - whole / int64_t(sizeof(ActSpan)) * span_bytes;
    __m512 lanes[R][kTogether];
    dot512::Sums<F, R> sums;
    sums.clear();
    int64_t i = 0, at = 0;
    const uint8_t* p = w;
    // One loop over all spans of all rows, so that constants stay in registers from row to row.
    while (i < n) {
        if (whole) {
            prefetch_ahead<span_bytes>(p);
            sums.add(quant::load_lanes<F>(p), records, at);
            p += span_bytes;
            at += sizeof(ActSpan);
            if (at < whole) continue;
        }
        if constexpr (F::block < quant::kLaneSpan)
            if (rest) sums.add(quant::load_some_lanes<F>(p, rest / F::block), records, whole);
        for (int r = 0; r < R; r++) lanes[r][i % kTogether] = sums.lanes(r);
        sums.clear();
        at = 0;
        p += gap;
        i++;
        const int rows = i % kTogether ? int(i % kTogether) : kTogether;
        if (rows < kTogether && i < n) continue;
        for (int r = 0; r < R; r++) {
            for (int j = rows; j < kTogether; j++) lanes[r][j] = lanes[r][0];
            const __m128 some = dot512::totals(lanes[r]);
            if (rows == kTogether) _mm_storeu_ps(out + r * ld + i - rows, some);
            else _mm_mask_storeu_ps(out + r * ld + i - rows, __mmask8((1 << rows) - 1), some);
        }
    }
}

#elif TANDEM_AVX2

namespace dot256 {

constexpr int kStep = 256;    // values unpacked at a time; what a row has less is zero
constexpr int kTogether = 4;  // weight rows whose sums over lanes are taken together
constexpr int kParts = kStep / ActSpan::values;

// Four units of 32 values in natural order -> the lanes of an ActSpan.
inline void to_lanes(const int8_t* natural, __m256i* q) {
    __m256i n[4];
    for (int i = 0; i < 4; i++) n[i] = _mm256_load_si256((const __m256i*)(natural + 32 * i));
    const __m256i a = _mm256_unpacklo_epi32(n[0], n[1]), b = _mm256_unpackhi_epi32(n[0], n[1]);
    const __m256i c = _mm256_unpacklo_epi32(n[2], n[3]), d = _mm256_unpackhi_epi32(n[2], n[3]);
    q[0] = _mm256_unpacklo_epi64(a, c);
    q[1] = _mm256_unpackhi_epi64(a, c);
    q[2] = _mm256_unpacklo_epi64(b, d);
    q[3] = _mm256_unpackhi_epi64(b, d);
}

// By lane, the factors of a part of 8 groups of 16 or 4 of 32.
template <int Group>
inline __m256 lane_factors(const float* factors) {
    if constexpr (Group == 32) return _mm256_broadcast_ps((const __m128*)factors);
    else return _mm256_permutevar8x32_ps(_mm256_load_ps(factors), _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
}

// Sums of the 16 products in each lane. How many products of pairs fit a sum in 16 bits: 2 * q_max * 127 each.
template <class F>
inline __attribute__((always_inline)) __m256i dot_part(const __m256i* q, const __m256i* magnitude, const int8_t* x) {
    constexpr int in_16 = F::q_max <= 32 ? 4 : F::q_max <= 64 ? 2 : 1;
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i total, sum;
    for (int u = 0; u < 4; u++) {
        const __m256i values = _mm256_load_si256((const __m256i*)(x + 32 * u));
        __m256i pairs;
        if constexpr (F::is_signed) pairs = _mm256_maddubs_epi16(magnitude[u], _mm256_sign_epi8(values, q[u]));
        else pairs = _mm256_maddubs_epi16(q[u], values);
        sum = u % in_16 == 0 ? pairs : _mm256_add_epi16(sum, pairs);
        if (u % in_16 == in_16 - 1) {
            const __m256i fours = _mm256_madd_epi16(sum, ones);
            total = u < in_16 ? fours : _mm256_add_epi32(total, fours);
        }
    }
    return total;
}

template <class F>
struct Step {
    static constexpr int groups = kStep / F::group, vectors = groups / 8, blocks = kStep / F::block;
    static constexpr bool has_bias = F::has_min || F::offset != 0;
    alignas(32) int8_t q[kStep] = {};
    alignas(32) float scale[groups], bias[groups];

    const uint8_t* block = nullptr;

    void unpack(const uint8_t* p) {
        block = p;
        if constexpr (quant::HasLanesAvx2<F>::value) F::factors_avx2(p, scale, bias);
        else quant::unpack_blocks<F, blocks>(p, q, scale, bias);
        offset_to_bias();
    }
    void unpack_some(const uint8_t* p, int n_blocks) {
        constexpr int per_block = F::block / F::group;
        for (int i = 0; i < n_blocks; i++)
            quant::unpack_blocks<F, 1>(p + i * F::bytes, q + i * F::block, scale + i * per_block, bias + i * per_block);
        for (int g = n_blocks * per_block; g < groups; g++) scale[g] = bias[g] = 0;
        offset_to_bias();
    }
    void offset_to_bias() {
        if constexpr (F::offset != 0)
            for (int v = 0; v < vectors; v++)
                _mm256_store_ps(bias + 8 * v,
                                _mm256_mul_ps(_mm256_load_ps(scale + 8 * v), _mm256_set1_ps(-float(F::offset))));
    }

    // Adds the products of part h with R activation spans that begin `offset` bytes into the records.
    template <int R>
    inline __attribute__((always_inline)) void add(int h, const uint8_t* const* records, int64_t offset,
                                                   __m256* products, __m256* biases) const {
        constexpr int per_part = ActSpan::values / F::group;
        __m256i lanes[4], magnitude[4];
        if constexpr (quant::HasLanesAvx2<F>::value) F::lanes_avx2(block, h, lanes);
        else to_lanes(q + ActSpan::values * h, lanes);
        for (int u = 0; u < 4; u++) magnitude[u] = F::is_signed ? _mm256_abs_epi8(lanes[u]) : lanes[u];
        const __m256 scales = lane_factors<F::group>(scale + per_part * h);
        [[maybe_unused]] __m256 bias_lanes;
        if constexpr (has_bias) bias_lanes = lane_factors<F::group>(bias + per_part * h);
        for (int r = 0; r < R; r++) {
            const ActSpan& x = *(const ActSpan*)(records[r] + offset);
            const __m256 value = _mm256_cvtepi32_ps(dot_part<F>(lanes, magnitude, x.plain));
            products[r] = _mm256_fmadd_ps(value, _mm256_mul_ps(scales, _mm256_load_ps(x.scale16)), products[r]);
            if constexpr (has_bias) biases[r] = _mm256_fmadd_ps(bias_lanes, _mm256_load_ps(x.sum16), biases[r]);
        }
    }
};

// The sums over lanes of four vectors, each in the same order.
inline __m128 totals(const __m256* v) {
    const __m256 a = _mm256_add_ps(_mm256_unpacklo_ps(v[0], v[1]), _mm256_unpackhi_ps(v[0], v[1]));
    const __m256 b = _mm256_add_ps(_mm256_unpacklo_ps(v[2], v[3]), _mm256_unpackhi_ps(v[2], v[3]));
    const __m256d low = _mm256_unpacklo_pd(_mm256_castps_pd(a), _mm256_castps_pd(b));
    const __m256d high = _mm256_unpackhi_pd(_mm256_castps_pd(a), _mm256_castps_pd(b));
    const __m256 all = _mm256_add_ps(_mm256_castpd_ps(low), _mm256_castpd_ps(high));
    return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

}  // namespace dot256

template <class F, int R>
void dot_fixed(const uint8_t* w, int64_t stride, int64_t n, int64_t cols, const uint8_t* const* given, float* out,
               int64_t ld) {
    using namespace dot256;
    constexpr int64_t step_bytes = kStep / F::block * F::bytes;
    const uint8_t* records[R];
    for (int r = 0; r < R; r++) records[r] = given[r];
    const int64_t whole = cols / kStep * kParts * int64_t(sizeof(ActSpan));
    const int rest = int(cols % kStep);
    Step<F> step;
    __m256 lanes[R][kTogether] = {};
    for (int64_t i = 0; i < n; i += kTogether) {
        const int rows = n - i < kTogether ? int(n - i) : kTogether;
        for (int j = 0; j < rows; j++) {
            __m256 products[R], biases[R];
            for (int r = 0; r < R; r++) products[r] = biases[r] = _mm256_setzero_ps();
            const uint8_t* p = w + (i + j) * stride;
            for (int64_t at = 0; at < whole; at += kParts * sizeof(ActSpan), p += step_bytes) {
                prefetch_ahead<step_bytes>(p);
                step.unpack(p);
                for (int h = 0; h < kParts; h++)
                    step.template add<R>(h, records, at + h * int64_t(sizeof(ActSpan)), products, biases);
            }
            if constexpr (F::block < kStep)
                if (rest) {
                    step.unpack_some(p, rest / F::block);
                    for (int h = 0; h * ActSpan::values < rest; h++)
                        step.template add<R>(h, records, whole + h * int64_t(sizeof(ActSpan)), products, biases);
                }
            for (int r = 0; r < R; r++)
                lanes[r][j] = Step<F>::has_bias ? _mm256_add_ps(products[r], biases[r]) : products[r];
        }
        for (int r = 0; r < R; r++) {
            alignas(16) float four[4];
            _mm_store_ps(four, totals(lanes[r]));
            if (rows == kTogether) _mm_storeu_ps(out + r * ld + i, _mm_load_ps(four));
            else std::memcpy(out + r * ld + i, four, size_t(rows) * sizeof(float));
        }
    }
}

#else

template <class F, int R>
void dot_fixed(const uint8_t* w, int64_t stride, int64_t n, int64_t cols, const uint8_t* const* given, float* out,
               int64_t ld) {
    constexpr int groups = F::block / F::group;
    const ActLayout at(cols);
    int8_t q[F::block];
    float scale[groups], bias[groups];
    for (int64_t i = 0; i < n; i++) {
        float sums[R] = {};
        const uint8_t* p = w + i * stride;
        for (int64_t k = 0; k < cols; k += F::block, p += F::bytes) {
            F::unpack(p, q, scale, bias);
            for (int r = 0; r < R; r++) {
                const ActSpan& span = *((const ActSpan*)given[r] + k / ActSpan::values);
                const int8_t* x = span.plain + k % ActSpan::values;
                const float* x_scale = span.scale16 + k % ActSpan::values / 16;
                const float* x_sum = (const float*)(given[r] + (F::group == 32 ? at.sum32 : at.sum16)) + k / F::group;
                for (int g = 0; g < groups; g++) {
                    int32_t dot = 0;
                    for (int j = 0; j < F::group; j++) dot += (q[g * F::group + j] - F::offset) * x[g * F::group + j];
                    sums[r] += scale[g] * x_scale[g * (F::group / 16)] * float(dot);
                    if constexpr (F::has_min) sums[r] += bias[g] * x_sum[g];
                }
            }
        }
        for (int r = 0; r < R; r++) out[r * ld + i] = sums[r];
    }
}

#endif

template <class F>
void dot(const uint8_t* w, int64_t stride, int64_t n, int64_t cols, const uint8_t* const* records, int64_t n_acts,
         float* out, int64_t ld) {
    switch (n_acts) {
        case 1: return dot_fixed<F, 1>(w, stride, n, cols, records, out, ld);
        case 2: return dot_fixed<F, 2>(w, stride, n, cols, records, out, ld);
        case 3: return dot_fixed<F, 3>(w, stride, n, cols, records, out, ld);
        case 4: return dot_fixed<F, 4>(w, stride, n, cols, records, out, ld);
        case 5: return dot_fixed<F, 5>(w, stride, n, cols, records, out, ld);
        case 6: return dot_fixed<F, 6>(w, stride, n, cols, records, out, ld);
        case 7: return dot_fixed<F, 7>(w, stride, n, cols, records, out, ld);
        default: return dot_fixed<F, 8>(w, stride, n, cols, records, out, ld);
    }
}

template <class F>
void unpack_floats(const uint8_t* blocks, int64_t cols, float* out) {
    alignas(64) int8_t q[F::block];
    alignas(64) float scale[F::block / F::group], bias[F::block / F::group];
    for (int64_t k = 0; k < cols; k += F::block, blocks += F::bytes) {
        quant::unpack_block<F>(blocks, q, scale, bias);
        for (int i = 0; i < F::block; i++) {
            const float value = scale[i / F::group] * float(q[i] - F::offset);
            out[k + i] = F::has_min ? value + bias[i / F::group] : value;
        }
    }
}

}  // namespace tandem
