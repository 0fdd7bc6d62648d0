// Chooses the kernel of each weight type; rounds activations; the entry points of matmul.h.
#include <algorithm>
#include <cstdlib>

#include "ops/matmul_panel.h"
#include "ops/program.h"

namespace tandem {

namespace quant {
Grids grids;
}

const Kernels* find_kernels(int32_t type) {
    static const Kernels* const* by_type = [] {
        static const Kernels* table[64] = {};
        for (int i = 0; i < kLegacyCount; i++) table[kLegacyKernels[i].type] = &kLegacyKernels[i];
        for (int i = 0; i < kKCount; i++) table[kKKernels[i].type] = &kKKernels[i];
        for (int i = 0; i < kICount; i++) table[kIKernels[i].type] = &kIKernels[i];
        for (int i = 0; i < kSmallCount; i++) table[kSmallKernels[i].type] = &kSmallKernels[i];
        return table;
    }();
    return type >= 0 && type < 64 ? by_type[type] : nullptr;
}

bool is_float_type(int32_t type) { return type == 0 || type == 1 || type == 30; }
bool is_known_type(int32_t type) { return is_float_type(type) || find_kernels(type); }
int64_t block_values(int32_t type) { return is_float_type(type) ? 1 : find_kernels(type)->block; }
int64_t block_bytes(int32_t type) { return is_float_type(type) ? (type == 0 ? 4 : 2) : find_kernels(type)->bytes; }

namespace {

// 32 values -> q, q + 128 and the sums of both halves.
inline void round32(const float* x, float inverse, int8_t* plain, uint8_t* shifted, int32_t* sums) {
#if TANDEM_AVX512
    for (int h = 0; h < 2; h++) {
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 16 * h), _mm512_set1_ps(inverse)));
        const __m128i q = _mm512_cvtsepi32_epi8(whole);
        _mm_storeu_si128((__m128i*)(plain + 16 * h), q);
        _mm_storeu_si128((__m128i*)(shifted + 16 * h), _mm_xor_si128(q, _mm_set1_epi8(-128)));
        sums[h] = _mm512_reduce_add_epi32(whole);
    }
#elif TANDEM_AVX2
    const __m256i ones = _mm256_set1_epi16(1);
    for (int h = 0; h < 2; h++) {
        const __m256 scale = _mm256_set1_ps(inverse);
        const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 16 * h), scale));
        const __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 16 * h + 8), scale));
        const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
        const __m128i q = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        _mm_storeu_si128((__m128i*)(plain + 16 * h), q);
        _mm_storeu_si128((__m128i*)(shifted + 16 * h), _mm_xor_si128(q, _mm_set1_epi8(-128)));
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
            plain[i] = int8_t(q);
            shifted[i] = uint8_t(q + 128);
            sums[h] += q;
        }
    }
#endif
}

}  // namespace

void quantize_row(const float* x, int64_t cols, uint8_t* record) { quantize_part(x, cols, 0, cols, record); }

void quantize_part(const float* x, int64_t cols, int64_t begin, int64_t end, uint8_t* record) {
    const ActLayout at(cols);
    x -= begin;
    float* scale32 = (float*)(record + at.scale32);
    float* scale16 = (float*)(record + at.scale16);
    float* sum32 = (float*)(record + at.sum32);
    float* sum16 = (float*)(record + at.sum16);
    for (int64_t g = begin / 32; g < end / 32; g++) {
        Vec top = abs(Vec::load(x + 32 * g));
        for (int i = Vec::lanes; i < 32; i += Vec::lanes) top = max(top, abs(Vec::load(x + 32 * g + i)));
        const float scale = top.max() / 127.0f;
        // Below the smallest normal number the inverse would overflow; such groups count as zero.
        const float inverse = scale >= 0x1p-126f ? 1.0f / scale : 0.0f;
        int32_t sums[2];
        round32(x + 32 * g, inverse, (int8_t*)record + at.plain + 32 * g, record + at.shifted + 32 * g, sums);
        scale32[g] = scale16[2 * g] = scale16[2 * g + 1] = scale;
        sum16[2 * g] = scale * float(sums[0]);
        sum16[2 * g + 1] = scale * float(sums[1]);
        sum32[g] = scale * float(sums[0] + sums[1]);
    }
    if (end < cols) return;
    const int64_t rest = at.padded - cols;
    std::memset(record + at.plain + cols, 0, size_t(rest));
    std::memset(record + at.shifted + cols, 128, size_t(rest));
    for (float* tail : {scale32 + cols / 32, sum32 + cols / 32}) std::memset(tail, 0, size_t(rest / 8));
    for (float* tail : {scale16 + cols / 16, sum16 + cols / 16}) std::memset(tail, 0, size_t(rest / 4));
}

void unpack_row(int32_t type, const uint8_t* blocks, int64_t cols, float* out) {
    if (is_float_type(type)) unpack_floats(type, blocks, cols, out);
    else find_kernels(type)->unpack(blocks, cols, out);
}

namespace {

void apply_scale(const Weight& w, int64_t expert, float* out, int64_t n_acts, int64_t ld, int64_t n) {
    const float scale = w.scale_of(expert);
    if (!w.scale) return;
    for (int64_t r = 0; r < n_acts; r++)
        for (int64_t i = 0; i < n; i++) out[r * ld + i] *= scale;
}

}  // namespace

void dot_rows(const Weight& w, int64_t expert, int64_t row_begin, int64_t row_end, const Acts& acts, float* out,
              int64_t ld) {
    const uint8_t* p = w.data + expert * w.expert_stride_bytes + row_begin * w.row_stride_bytes;
    const int64_t n = row_end - row_begin;
    if (is_float_type(w.type)) float_rows(w.type, p, w.row_stride_bytes, n, w.cols, acts.floats, acts.n, out, ld);
    else find_kernels(w.type)->dot(p, w.row_stride_bytes, n, w.cols, acts.records, acts.n, out, ld);
    apply_scale(w, expert, out, acts.n, ld, n);
}

namespace {

// Bytes begin .. end of n rows, which the next slice will unpack while this one is multiplied.
void prefetch_rows(const uint8_t* p, int64_t stride, int64_t n, int64_t begin, int64_t end) {
    for (int64_t r = 0; r < n; r++)
        for (int64_t b = begin; b < end; b += 64) __builtin_prefetch(p + r * stride + b, 0, 2);
}

}  // namespace

size_t panel_scratch_bytes() { return size_t(kSliceValues / 32 * panel_group_bytes({true, true, true, false, 1})); }

void panel_rows(const Weight& w, int64_t expert, int64_t row_begin, int64_t row_end, const Acts& acts, float* out,
                uint8_t* scratch) {
    const uint8_t* p = w.data + expert * w.expert_stride_bytes + row_begin * w.row_stride_bytes;
    const int64_t n = row_end - row_begin;
    if (is_float_type(w.type)) {
        float_rows(w.type, p, w.row_stride_bytes, n, w.cols, acts.floats, acts.n, out, kPanel);
    } else if (const Kernels& kernels = *find_kernels(w.type); kernels.panel) {
        for (int64_t k = 0; k < w.cols; k += kSliceValues) {
            const int64_t count = std::min(kSliceValues, w.cols - k);
            kernels.panel(p, w.row_stride_bytes, n, k, count, scratch);
            const int64_t next = k + count, ahead = std::min(kSliceValues, w.cols - next);
            if (ahead > 0)
                prefetch_rows(p, w.row_stride_bytes, n, next / kernels.block * kernels.bytes,
                              (next + ahead) / kernels.block * kernels.bytes);
            else
                prefetch_rows(p + n * w.row_stride_bytes, w.row_stride_bytes, n, 0,
                              count / kernels.block * kernels.bytes);
            multiply_panel({scratch, k, count, kernels.form}, w.cols, acts.records, acts.n, out, k > 0);
        }
    } else {
        for (int64_t r = 0; r < acts.n; r += kDotRows)
            kernels.dot(p, w.row_stride_bytes, n, w.cols, acts.records + r, std::min(kDotRows, acts.n - r),
                        out + r * kPanel, kPanel);
    }
    apply_scale(w, expert, out, acts.n, kPanel, n);
}

namespace {

void derive_tables(quant::Grids& g, const char* name) {
    if (!std::strcmp(name, "IQ1S"))
        for (auto& row : g.iq1s)
            for (uint8_t& value : row) value++;
    for (int c = 0; c < 4; c++)
        for (int i = 0; i < 256; i++) g.iq3xxs_columns[c][i] = g.iq3xxs[i][c];
}

}  // namespace

void activate(int32_t activation, float* gate, const float* up, int64_t n) {
    auto run = [&](auto function) {
        int64_t i = 0;
        for (; i + Vec::lanes <= n; i += Vec::lanes)
            (function(Vec::load(gate + i)) * Vec::load(up + i)).store(gate + i);
        if (const int rest = int(n - i))
            (function(Vec::load(gate + i, rest)) * Vec::load(up + i, rest)).store(gate + i, rest);
    };
    if (activation == kSilu) run([](Vec x) { return silu(x); });
    else run([](Vec x) { return gelu_tanh(x); });
}

}  // namespace tandem

extern "C" {
#pragma GCC visibility push(default)

// Copies a table of quant/iquant_grids.py; returns 0, or 1 for an unknown name or another size.
int32_t tandem_set_grid(const char* name, const void* bytes, int64_t size) {
    tandem::quant::Grids& g = tandem::quant::grids;
    const struct {
        const char* name;
        void* at;
        int64_t size;
    } known[] = {
        {"IQ2XXS", g.iq2xxs, sizeof g.iq2xxs}, {"IQ2XS", g.iq2xs, sizeof g.iq2xs}, {"IQ2S", g.iq2s, sizeof g.iq2s},
        {"IQ3XXS", g.iq3xxs, sizeof g.iq3xxs}, {"IQ3S", g.iq3s, sizeof g.iq3s},    {"IQ1S", g.iq1s, sizeof g.iq1s},
        {"KSIGNS", g.ksigns, sizeof g.ksigns}, {"IQ4NL", g.iq4nl, sizeof g.iq4nl}, {"E2M1", g.e2m1, sizeof g.e2m1},
    };
    for (const auto& grid : known)
        if (!std::strcmp(grid.name, name) && grid.size == size) {
            std::memcpy(grid.at, bytes, size_t(size));
            tandem::derive_tables(g, name);
            return 0;
        }
    return 1;
}

// Bytes of the activation record of a row of cols values.
int64_t tandem_act_bytes(int64_t cols) { return tandem::ActLayout(cols).bytes; }

int32_t tandem_knows_type(int32_t type) { return tandem::is_known_type(type); }

// One row of blocks as floats, for tests and tools.
void tandem_unpack_row(int32_t type, const uint8_t* blocks, int64_t cols, float* out) {
    tandem::unpack_row(type, blocks, cols, out);
}

#pragma GCC visibility pop
}
