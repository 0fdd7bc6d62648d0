// Rounds activations to the records of matmul.h. Whole spans are rounded at once; 32 values alone get the same bits.
#include "ops/matmul_kernels.h"
#include "quant/lanes.h"

namespace tandem {

namespace {

// Where the parts of a record lie from one span on.
struct Target {
    ActSpan* span;
    uint8_t* natural;
    float *scale32, *sum32, *sum16;

    Target(uint8_t* record, const ActLayout& at, int64_t k) {
        const int64_t first = k / ActSpan::values * ActSpan::values;
        span = (ActSpan*)record + k / ActSpan::values;
        natural = record + at.natural + first;
        scale32 = (float*)(record + at.scale32) + first / 32;
        sum32 = (float*)(record + at.sum32) + first / 32;
        sum16 = (float*)(record + at.sum16) + first / 16;
    }
};

// 32 values -> int8 in their places, `at` values into a span, and the sums of both halves.
inline void round32(const float* x, float inverse, int at, const Target& to, int32_t* sums) {
    ActSpan* const span = to.span;
#if TANDEM_AVX512
    const __m128i top = _mm_set1_epi8(-128);
    __m128i q[2];
    for (int h = 0; h < 2; h++) {
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 16 * h), _mm512_set1_ps(inverse)));
        q[h] = _mm512_cvtsepi32_epi8(whole);
        _mm_store_si128((__m128i*)(to.natural + at + 16 * h), _mm_xor_si128(q[h], top));
        sums[h] = _mm512_reduce_add_epi32(whole);
    }
    const int begin = ActSpan::byte_of(at);
    auto store = [begin](void* bytes, __m128i a, __m128i b) {
        uint8_t* first = (uint8_t*)bytes + begin;
        for (int half = 0; half < 2; half++) {
            const __m128i two = half ? _mm_unpackhi_epi32(a, b) : _mm_unpacklo_epi32(a, b);
            _mm_storel_epi64((__m128i*)(first + 128 * half), two);
            _mm_storeh_pd((double*)(first + 128 * half + 64), _mm_castsi128_pd(two));
        }
    };
    const __m128i stride = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    store(span->plain, q[0], q[1]);
    store(span->strided, _mm_shuffle_epi8(q[0], stride), _mm_shuffle_epi8(q[1], stride));
#elif TANDEM_AVX2
    const __m256i ones = _mm256_set1_epi16(1);
    for (int h = 0; h < 2; h++) {
        const __m256 scale = _mm256_set1_ps(inverse);
        const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 16 * h), scale));
        const __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 16 * h + 8), scale));
        const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
        const __m128i q = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        _mm_storeu_si128((__m128i*)(to.natural + at + 16 * h), q);
        int8_t* lane = span->plain + ActSpan::byte_of(at + 16 * h);
        _mm_storeu_si32(lane, q);
        _mm_storeu_si32(lane + 32, _mm_shuffle_epi32(q, 1));
        _mm_storeu_si32(lane + 64, _mm_shuffle_epi32(q, 2));
        _mm_storeu_si32(lane + 96, _mm_shuffle_epi32(q, 3));
        const __m256i pairs = _mm256_madd_epi16(words, ones);
        __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
        sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
        sums[h] = _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
    }
#else
    float whole[32];
    for (int i = 0; i < 32; i += Vec::lanes) round(Vec::load(x + i) * Vec::set(inverse)).store(whole + i);
    for (int h = 0; h < 2; h++) {
        sums[h] = 0;
        for (int i = 16 * h; i < 16 * h + 16; i++) {
            const int32_t q = whole[i] == whole[i] ? int32_t(whole[i]) : 0;
            span->plain[at + i] = int8_t(q);
            sums[h] += q;
        }
    }
#endif
}

void store_factors(float scale, const int32_t* sums, int at, const Target& to) {
    for (int h = 0; h < 2; h++) {
        const int lane = ActSpan::lane_of(at / 16 + h);
        to.span->scale16[lane] = scale;
        to.span->sum16[lane] = to.sum16[at / 16 + h] = scale * float(sums[h]);
#if TANDEM_AVX512
        to.span->minus_sum[lane] = -sums[h];
#endif
    }
    to.scale32[at / 32] = scale;
    to.sum32[at / 32] = scale * float(sums[0] + sums[1]);
}

void round_group(const float* x, int at, const Target& to) {
    Vec top = abs(Vec::load(x));
    for (int i = Vec::lanes; i < 32; i += Vec::lanes) top = max(top, abs(Vec::load(x + i)));
    const float scale = top.max() / 127.0f;
    // Below the smallest normal number the inverse would overflow; such groups count as zero.
    const float inverse = scale >= 0x1p-126f ? 1.0f / scale : 0.0f;
    int32_t sums[2];
    round32(x, inverse, at, to, sums);
    store_factors(scale, sums, at, to);
}

#if TANDEM_AVX512

// The largest of each of 8 vectors.
inline __m256 largest(const __m512* v) {
    __m512 pairs[4], fours[2];
    for (int i = 0; i < 4; i++)
        pairs[i] =
            _mm512_max_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 2; i++) {
        const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
        fours[i] =
            _mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    const __m512 low = _mm512_shuffle_f32x4(fours[0], fours[1], 0x44);
    const __m512 high = _mm512_shuffle_f32x4(fours[0], fours[1], 0xee);
    const __m512 two = _mm512_max_ps(low, high);  // lanes of 128 bits: 0-3, 0-3, 4-7, 4-7
    const __m512 swapped = _mm512_shuffle_f32x4(two, two, 0xb1);
    const __m512 all = _mm512_max_ps(two, swapped);
    return _mm512_castps512_ps256(_mm512_shuffle_f32x4(all, all, 0x08));
}

void round_span(const float* x, const Target& to) {
    ActSpan* const span = to.span;
    __m512 tops[8];
    for (int g = 0; g < 8; g++)
        tops[g] = _mm512_max_ps(_mm512_abs_ps(_mm512_loadu_ps(x + 32 * g)),
                                _mm512_abs_ps(_mm512_loadu_ps(x + 32 * g + 16)));
    const __m256 scale = _mm256_div_ps(largest(tops), _mm256_set1_ps(127.0f));
    const __mmask8 normal = _mm256_cmp_ps_mask(scale, _mm256_set1_ps(0x1p-126f), _CMP_GE_OQ);
    const __m512 inverse = _mm512_castps256_ps512(_mm256_maskz_div_ps(normal, _mm256_set1_ps(1.0f), scale));
    __m512i natural[4];
    for (int t = 0; t < 4; t++) {
        __m512i whole[4];
        for (int m = 0; m < 4; m++) {
            const __m512 factor = _mm512_permutexvar_ps(_mm512_set1_epi32(2 * t + m / 2), inverse);
            whole[m] = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 64 * t + 16 * m), factor));
        }
        // Lane i of the packed bytes holds quad i of four groups.
        const __m512i quads =
            _mm512_packs_epi16(_mm512_packs_epi32(whole[0], whole[1]), _mm512_packs_epi32(whole[2], whole[3]));
        natural[t] = _mm512_permutexvar_epi32(
            _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), quads);
        _mm512_store_si512(to.natural + 64 * t, _mm512_xor_si512(natural[t], _mm512_set1_epi8(-128)));
    }
    __m512i q[4] = {natural[0], natural[1], natural[2], natural[3]};
    quant::to_lanes(q);
    __m512i sum = _mm512_setzero_si512();
    for (int u = 0; u < 4; u++) {
        _mm512_store_si512(span->plain + 64 * u, q[u]);
        sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), q[u]);
    }
    const __m128i stride = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int t = 0; t < 4; t++) q[t] = _mm512_shuffle_epi8(natural[t], _mm512_broadcast_i32x4(stride));
    quant::to_lanes(q);
    for (int u = 0; u < 4; u++) _mm512_store_si512(span->strided + 64 * u, q[u]);
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512 scales = _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(scale));
    _mm512_store_ps(span->scale16, scales);
    const __m512 sums = _mm512_mul_ps(scales, _mm512_cvtepi32_ps(sum));
    _mm512_store_ps(span->sum16, sums);
    _mm512_store_si512(span->minus_sum, _mm512_sub_epi32(_mm512_setzero_si512(), sum));
    _mm512_store_ps(to.sum16, sums);
    _mm256_store_ps(to.scale32, scale);
    const __m256i sum32 = _mm512_cvtepi64_epi32(_mm512_add_epi32(sum, _mm512_srli_epi64(sum, 32)));
    _mm256_store_ps(to.sum32, _mm256_mul_ps(scale, _mm256_cvtepi32_ps(sum32)));
}

#elif TANDEM_AVX2

void round_span(const float* x, const Target& to) {
    ActSpan* const span = to.span;
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 tops[4];
    for (int g = 0; g < 4; g++) {
        tops[g] = _mm256_andnot_ps(sign, _mm256_loadu_ps(x + 32 * g));
        for (int i = 8; i < 32; i += 8)
            tops[g] = _mm256_max_ps(tops[g], _mm256_andnot_ps(sign, _mm256_loadu_ps(x + 32 * g + i)));
    }
    const __m256 a = _mm256_max_ps(_mm256_unpacklo_ps(tops[0], tops[1]), _mm256_unpackhi_ps(tops[0], tops[1]));
    const __m256 b = _mm256_max_ps(_mm256_unpacklo_ps(tops[2], tops[3]), _mm256_unpackhi_ps(tops[2], tops[3]));
    const __m256d low = _mm256_unpacklo_pd(_mm256_castps_pd(a), _mm256_castps_pd(b));
    const __m256d high = _mm256_unpackhi_pd(_mm256_castps_pd(a), _mm256_castps_pd(b));
    const __m256 all = _mm256_max_ps(_mm256_castpd_ps(low), _mm256_castpd_ps(high));
    const __m128 largest = _mm_max_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    const __m128 scale = _mm_div_ps(largest, _mm_set1_ps(127.0f));
    const __m128 normal = _mm_cmpge_ps(scale, _mm_set1_ps(0x1p-126f));
    alignas(16) float inverse[4];
    _mm_store_ps(inverse, _mm_and_ps(normal, _mm_div_ps(_mm_set1_ps(1.0f), scale)));
    __m256i n[4];
    for (int g = 0; g < 4; g++) {
        const __m256 factor = _mm256_broadcast_ss(inverse + g);
        __m256i whole[4];
        for (int i = 0; i < 4; i++)
            whole[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 32 * g + 8 * i), factor));
        const __m256i quads =
            _mm256_packs_epi16(_mm256_packs_epi32(whole[0], whole[1]), _mm256_packs_epi32(whole[2], whole[3]));
        n[g] = _mm256_permutevar8x32_epi32(quads, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        _mm256_store_si256((__m256i*)(to.natural + 32 * g), n[g]);
    }
    const __m256i c = _mm256_unpacklo_epi32(n[0], n[1]), d = _mm256_unpackhi_epi32(n[0], n[1]);
    const __m256i e = _mm256_unpacklo_epi32(n[2], n[3]), f = _mm256_unpackhi_epi32(n[2], n[3]);
    const __m256i lanes[4] = {_mm256_unpacklo_epi64(c, e), _mm256_unpackhi_epi64(c, e), _mm256_unpacklo_epi64(d, f),
                              _mm256_unpackhi_epi64(d, f)};
    __m256i pairs = _mm256_setzero_si256();
    for (int u = 0; u < 4; u++) {
        _mm256_store_si256((__m256i*)(span->plain + 32 * u), lanes[u]);
        pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(_mm256_set1_epi8(1), lanes[u]));
    }
    const __m256i sum = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    const __m256 scales = _mm256_set_m128(scale, scale);
    _mm256_store_ps(span->scale16, scales);
    const __m256 sums = _mm256_mul_ps(scales, _mm256_cvtepi32_ps(sum));
    _mm256_store_ps(span->sum16, sums);
    _mm256_store_ps(to.sum16, _mm256_permutevar8x32_ps(sums, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
    _mm_store_ps(to.scale32, scale);
    const __m128i sum32 = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    _mm_store_ps(to.sum32, _mm_mul_ps(scale, _mm_cvtepi32_ps(sum32)));
}

#else

void round_span(const float* x, const Target& to) {
    for (int at = 0; at < ActSpan::values; at += 32) round_group(x + at, at, to);
}

#endif

}  // namespace

void quantize_row(const float* x, int64_t cols, uint8_t* record) { quantize_part(x, cols, 0, cols, record); }

void quantize_part(const float* x, int64_t cols, int64_t begin, int64_t end, uint8_t* record) {
    const ActLayout layout(cols);
    for (int64_t k = begin; k < end;) {
        const int at = int(k % ActSpan::values);
        const Target to(record, layout, k);
        if (at == 0 && k + ActSpan::values <= end) {
            round_span(x + k - begin, to);
            k += ActSpan::values;
        } else {
            round_group(x + k - begin, at, to);
            k += 32;
        }
    }
    if (end < cols) return;
    constexpr float zeros[32] = {};
    for (int64_t k = cols; k % ActSpan::values; k += 32)
        round_group(zeros, int(k % ActSpan::values), Target(record, layout, k));
}

}  // namespace tandem
