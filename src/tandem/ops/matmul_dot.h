// Dot products of weight rows with 1..8 int8 activation rows: each block is unpacked once for all of them.
//
// The floating-point operations of one result are the same, in the same order, for any number of activations.
#pragma once
#include "ops/matmul_kernels.h"

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

inline float total(__m128 v) {
    v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)));
}
inline float total(__m256 v) { return total(_mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1))); }
inline float total(__m512 v) { return total(_mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1))); }

// Which scale each of the 16 lanes (4 values each) of unit u takes.
template <int Group>
inline __m512i scale_lanes(int u) {
    const __m512i first = Group == 32 ? _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1)
                                      : _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return _mm512_add_epi32(first, _mm512_set1_epi32(64 / Group * u));
}

inline __m256 grow(__m128 v, __m256) { return _mm256_zextps128_ps256(v); }
template <class V>
inline V grow(V v, V) { return v; }

template <class F, int R>
struct Sums {
    static constexpr bool has_bias = F::has_min || F::offset != 0;
    using BiasSums = typename quant::Lanes<quant::kSpan<F> / F::group>::V;
    __m512 products[R];
    BiasSums biases[R];

    Sums() {
        for (int r = 0; r < R; r++) {
            products[r] = _mm512_setzero_ps();
            biases[r] = BiasSums{};
        }
    }

    // Adds the span that begins at value k.
    template <int Units, int Groups>
    inline __attribute__((always_inline)) void add(const quant::Span<Units, Groups>& s, int64_t k, const ActLayout& at,
                                                   const uint8_t* const* records) {
        using L = quant::Lanes<Groups>;
        const int64_t scales = (F::group == 32 ? at.scale32 : at.scale16) + k / F::group * 4;
        const int64_t sums = (F::group == 32 ? at.sum32 : at.sum16) + k / F::group * 4;
        [[maybe_unused]] typename L::V bias;
        if constexpr (F::has_min) bias = s.bias;
        else if constexpr (F::offset != 0) bias = quant::times(s.scale, -float(F::offset));
        // Signed weights are the signed operand against activations + 128; this takes the 128 out again.
        __m512i start[Units];
        for (int u = 0; u < Units; u++) {
            start[u] = _mm512_setzero_si512();
            if constexpr (F::is_signed)
                start[u] = _mm512_sub_epi32(start[u], _mm512_dpbusd_epi32(start[u], _mm512_set1_epi8(-128), s.q[u]));
        }
        for (int r = 0; r < R; r++) {
            const uint8_t* record = records[r];
            const __m512 scale = quant::widen(quant::mul(s.scale, L::load((const float*)(record + scales))));
            __m512 sum;
            for (int u = 0; u < Units; u++) {
                __m512i dot;
                if constexpr (F::is_signed)
                    dot = _mm512_dpbusd_epi32(start[u], _mm512_loadu_si512(record + at.shifted + k + 64 * u), s.q[u]);
                else dot = _mm512_dpbusd_epi32(start[u], s.q[u], _mm512_loadu_si512(record + at.plain + k + 64 * u));
                const __m512 lane_scale = _mm512_permutexvar_ps(scale_lanes<F::group>(u), scale);
                const __m512 value = _mm512_cvtepi32_ps(dot);
                // Only one addition per span waits for the previous span.
                sum = u == 0 ? _mm512_mul_ps(value, lane_scale) : _mm512_fmadd_ps(value, lane_scale, sum);
            }
            products[r] = _mm512_add_ps(products[r], sum);
            if constexpr (has_bias) {
                const BiasSums x_sum = grow(L::load((const float*)(record + sums)), BiasSums{});
                biases[r] = quant::mul_add(grow(bias, BiasSums{}), x_sum, biases[r]);
            }
        }
    }

    float total(int r) const {
        if constexpr (has_bias) return dot512::total(products[r]) + dot512::total(biases[r]);
        else return dot512::total(products[r]);
    }
};

}  // namespace dot512

template <class F, int R>
void dot_fixed(const uint8_t* w, int64_t stride, int64_t n, int64_t cols, const uint8_t* const* given, float* out,
               int64_t ld) {
    using quant::kSpan;
    using quant::kSpanBytes;
    const ActLayout at(cols);
    const uint8_t* records[R];
    for (int r = 0; r < R; r++) records[r] = given[r];
    const int64_t whole = cols / kSpan<F> * kSpan<F>;
    for (int64_t i = 0; i < n; i++) {
        dot512::Sums<F, R> sums;
        const uint8_t* p = w + i * stride;
        for (int64_t k = 0; k < whole; k += kSpan<F>, p += kSpanBytes<F>) {
            prefetch_ahead<kSpanBytes<F>>(p);
            sums.add(quant::load_span<F>(p), k, at, records);
        }
        if constexpr (quant::HasCodes<F>::value) {
            int64_t k = whole;
            for (; k + 64 <= cols; k += 64, p += 2 * F::bytes) sums.add(quant::load_pair<F>(p), k, at, records);
            if (k < cols) {
                uint8_t last[2 * F::bytes] = {};
                std::memcpy(last, p, F::bytes);
                sums.add(quant::load_pair<F>(last), k, at, records);
            }
        }
        for (int r = 0; r < R; r++) out[r * ld + i] = sums.total(r);
    }
}

#elif TANDEM_AVX2

namespace dot256 {

constexpr int kStep = 256;  // values unpacked at a time; what a row has less is zero

// Sums of 4 products in each of 8 lanes: 32 weights against 32 activations.
template <class F>
inline __m256i dot32(__m256i q, __m256i x) {
    __m256i pairs;
    if constexpr (F::is_signed) pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(q), _mm256_sign_epi8(x, q));
    else pairs = _mm256_maddubs_epi16(q, x);
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

template <class F>
struct Step {
    static constexpr int groups = kStep / F::group, vectors = groups / 8, blocks = kStep / F::block;
    static constexpr bool has_bias = F::has_min || F::offset != 0;
    alignas(32) int8_t q[kStep] = {};
    alignas(32) float scale[groups], bias[groups];

    void unpack(const uint8_t* p) {
        quant::unpack_blocks<F, blocks>(p, q, scale, bias);
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

    // Adds the products with values k .. k + 32 * units of one activation row.
    inline __attribute__((always_inline)) void add(const uint8_t* record, const ActLayout& at, int64_t k, int units,
                                                   __m256& products, __m256& biases) const {
        const float* x_scale = (const float*)(record + (F::group == 32 ? at.scale32 : at.scale16)) + k / F::group;
        const float* x_sum = (const float*)(record + (F::group == 32 ? at.sum32 : at.sum16)) + k / F::group;
        alignas(32) float joint[groups];
        for (int v = 0; v < vectors; v++)
            _mm256_store_ps(joint + 8 * v,
                            _mm256_mul_ps(_mm256_load_ps(scale + 8 * v), _mm256_loadu_ps(x_scale + 8 * v)));
        __m256 sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
        for (int u = 0; u < units; u++) {
            const __m256i x = _mm256_loadu_si256((const __m256i*)(record + at.plain + k + 32 * u));
            const __m256 value = _mm256_cvtepi32_ps(dot32<F>(_mm256_load_si256((const __m256i*)(q + 32 * u)), x));
            __m256 lane_scale;
            if constexpr (F::group == 32) lane_scale = _mm256_broadcast_ss(joint + u);
            else
                lane_scale =
                    _mm256_insertf128_ps(_mm256_broadcast_ss(joint + 2 * u), _mm_broadcast_ss(joint + 2 * u + 1), 1);
            sum[u % 2] = _mm256_fmadd_ps(value, lane_scale, sum[u % 2]);
        }
        products = _mm256_add_ps(products, _mm256_add_ps(sum[0], sum[1]));
        if constexpr (has_bias)
            for (int v = 0; v < vectors; v++)
                biases = _mm256_fmadd_ps(_mm256_load_ps(bias + 8 * v), _mm256_loadu_ps(x_sum + 8 * v), biases);
    }
};

// One block of 32 values without the detour over memory: for the few blocks that are left at the end of a row.
template <class F, int R>
inline void add_block(const uint8_t* b, const uint8_t* const* records, const ActLayout& at, int64_t k, __m256* products,
                      __m256* biases) {
    const __m256i q = F::codes(b);
    const float scale = read_half(b), bias = F::has_min ? read_half(b + 2) : -float(F::offset) * scale;
    for (int r = 0; r < R; r++) {
        const __m256i x = _mm256_loadu_si256((const __m256i*)(records[r] + at.plain + k));
        const float joint = scale * read_as<float>(records[r] + at.scale32 + k / 8);
        products[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot32<F>(q, x)), _mm256_set1_ps(joint), products[r]);
        if constexpr (Step<F>::has_bias) {
            const __m128 sum = _mm_set_ss(read_as<float>(records[r] + at.sum32 + k / 8));
            biases[r] = _mm256_fmadd_ps(_mm256_set1_ps(bias), _mm256_zextps128_ps256(sum), biases[r]);
        }
    }
}

}  // namespace dot256

template <class F, int R>
void dot_fixed(const uint8_t* w, int64_t stride, int64_t n, int64_t cols, const uint8_t* const* given, float* out,
               int64_t ld) {
    using dot256::kStep;
    using Step = dot256::Step<F>;
    const ActLayout at(cols);
    const uint8_t* records[R];
    for (int r = 0; r < R; r++) records[r] = given[r];
    Step step;
    for (int64_t i = 0; i < n; i++) {
        __m256 products[R], biases[R];
        for (int r = 0; r < R; r++) products[r] = biases[r] = _mm256_setzero_ps();
        const uint8_t* p = w + i * stride;
        int64_t k = 0;
        for (; k + kStep <= cols; k += kStep, p += Step::blocks * F::bytes) {
            prefetch_ahead<Step::blocks * F::bytes>(p);
            step.unpack(p);
            for (int r = 0; r < R; r++) step.add(records[r], at, k, kStep / 32, products[r], biases[r]);
        }
        if constexpr (quant::HasCodes<F>::value) {
            for (; k < cols; k += 32, p += F::bytes) dot256::add_block<F, R>(p, records, at, k, products, biases);
        } else if (k < cols) {
            step.unpack_some(p, int(cols - k) / F::block);
            for (int r = 0; r < R; r++) step.add(records[r], at, k, int(cols - k) / 32, products[r], biases[r]);
        }
        for (int r = 0; r < R; r++) {
            const float sum = Vec{products[r]}.sum();
            out[r * ld + i] = Step::has_bias ? sum + Vec{biases[r]}.sum() : sum;
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
                const int8_t* x = (const int8_t*)(given[r] + at.plain) + k;
                const float* x_scale = (const float*)(given[r] + at.scale16) + k / 16;
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
    // 5 and 7 run as 4 + 1 and 4 + 3: fewer instantiations, and the second reading of a piece comes from the cache.
    switch (n_acts) {
        case 1: return dot_fixed<F, 1>(w, stride, n, cols, records, out, ld);
        case 2: return dot_fixed<F, 2>(w, stride, n, cols, records, out, ld);
        case 3: return dot_fixed<F, 3>(w, stride, n, cols, records, out, ld);
        case 4: return dot_fixed<F, 4>(w, stride, n, cols, records, out, ld);
        case 6: return dot_fixed<F, 6>(w, stride, n, cols, records, out, ld);
        case 8: return dot_fixed<F, 8>(w, stride, n, cols, records, out, ld);
        default:
            dot_fixed<F, 4>(w, stride, n, cols, records, out, ld);
            return dot<F>(w, stride, n, cols, records + 4, n_acts - 4, out + 4 * ld, ld);
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
