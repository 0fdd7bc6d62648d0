// What the driver of all formats needs of each of them: entry points instantiated once per format and instruction set.
#pragma once
#include "ops/matmul.h"
#include "quant/format.h"

namespace tandem {

// Weight rows w + i * stride, i < n, against n_acts <= kDotRows records: out[r * ld + i].
using DotFn = void (*)(const uint8_t* w, int64_t stride, int64_t n, int64_t cols, const uint8_t* const* records,
                       int64_t n_acts, float* out, int64_t ld);
// Unpacks values k .. k + count of n <= kPanel weight rows into the layout of the matrix product (matmul_panel.h).
using PanelFn = void (*)(const uint8_t* w, int64_t stride, int64_t n, int64_t k, int64_t count, uint8_t* panel);
using UnpackFn = void (*)(const uint8_t* blocks, int64_t cols, float* out);

// What the matrix product must know of the panels of a format; see matmul_panel.h.
struct PanelForm {
    bool group16;    // a scale per 16 values, not 32
    bool has_bias;   // a bias beside each scale
    bool has_start;  // integer start values (AVX-512)
    bool is_signed;  // AVX2: q may be negative
    int sums16;      // AVX2: quads whose products fit a sum in 16 bits
};

struct Kernels {
    int32_t type, block, bytes;
    PanelForm form;
    DotFn dot;
    PanelFn panel;  // null where products of many rows also go through dot
    UnpackFn unpack;
};

// Null for unknown and for float types.
const Kernels* find_kernels(int32_t type);

// The tables of each translation unit.
extern const Kernels kLegacyKernels[];
extern const Kernels kKKernels[];
extern const Kernels kIKernels[];
extern const Kernels kSmallKernels[];
extern const int kLegacyCount, kKCount, kICount, kSmallCount;

// Float weights (F32, F16, BF16): out[r * ld + i], any number of activations.
void float_rows(int32_t type, const uint8_t* w, int64_t stride, int64_t n, int64_t cols, const float* const* x,
                int64_t n_acts, float* out, int64_t ld);
void unpack_floats(int32_t type, const uint8_t* blocks, int64_t cols, float* out);

// The matrix product over one unpacked panel slice; see matmul_panel.h.
struct PanelSlice {
    const uint8_t* panel;
    int64_t k, count;  // values k .. k + count
    PanelForm form;
};
void multiply_panel(const PanelSlice& slice, int64_t cols, const uint8_t* const* records, int64_t n_acts, float* out,
                    bool accumulate);

}  // namespace tandem
