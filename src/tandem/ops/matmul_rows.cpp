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
    for (int i = 0; i < 16; i++) {
        g.iq4nl_128[i] = int8_t(g.iq4nl[i] ^ 0x80);
        g.e2m1_128[i] = int8_t(g.e2m1[i] ^ 0x80);
    }
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
