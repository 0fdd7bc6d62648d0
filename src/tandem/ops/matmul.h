// Matrix products with weights still in their blocks: what other ops may call inside a parallel region.
//
// Quantized types multiply int8 activations (one float scale per 32 values); F32, F16 and BF16 multiply the floats.
// An activation row after `quantize_row` is one record of `ActLayout(cols).bytes` bytes.
#pragma once
#include <cstddef>
#include <cstdint>

#include "quant/simd.h"

namespace tandem {

constexpr int kActLanes = TANDEM_AVX2 ? 8 : 16;

// One weight matrix, or a stack of them (experts). Mirror of WeightArgs in matmul_cpu.py.
struct Weight {
    const uint8_t* data;
    int64_t rows, cols;  // of one expert: out, in
    int64_t row_stride_bytes, expert_stride_bytes;
    const float* scale;  // factor on the products, or null
    int32_t type;        // GGUF type id
    int32_t scale_per_expert;

    float scale_of(int64_t expert) const { return scale ? scale[scale_per_expert ? expert : 0] : 1.0f; }
};

// A span of one activation row, for products of few rows. AVX-512 and AVX2 keep the values in lanes: lane l holds one
// group of 16 values, four at a time in `lanes` consecutive quads (quant/lanes.h).
struct alignas(kActLanes * 4) ActSpan {
    static constexpr int lanes = kActLanes, values = 16 * lanes;
    int8_t plain[values];
    float scale16[lanes], sum16[lanes];  // by lane: scale, and scale * sum of the group's values
#if TANDEM_AVX512
    int32_t minus_sum[lanes];  // by lane: - sum of the group's values
    int8_t strided[values];    // plain, but quad u of a lane holds values u, u + 4, u + 8, u + 12 of the group
#endif

    // Of a group of 16, and of the quad that holds value k.
    static constexpr int lane_of(int group) { return TANDEM_AVX2 ? group / 2 + 4 * (group % 2) : group; }
    static constexpr int byte_of(int k) {
        return TANDEM_AVX512 || TANDEM_AVX2 ? 4 * (lanes * (k % 16 / 4) + lane_of(k / 16)) : k;
    }
};

// The record of a row: spans, padded with zero values, then what panels read, in natural order, from these offsets on.
struct ActLayout {
    int64_t spans;
    int64_t natural;       // bytes: plain (AVX2), shifted (AVX-512)
    int64_t scale32;       // float per 32 values
    int64_t sum32, sum16;  // float scale * (sum of q) per 32 and per 16 values
    int64_t bytes;         // an odd number of cache lines, so that rows do not share cache sets

    explicit ActLayout(int64_t cols)
        : spans((cols + ActSpan::values - 1) / ActSpan::values),
          natural(spans * int64_t(sizeof(ActSpan))),
          scale32(natural + spans * ActSpan::values),
          sum32(scale32 + spans * ActSpan::values / 8),
          sum16(sum32 + spans * ActSpan::values / 8),
          bytes((sum16 + spans * ActSpan::values / 4 + 63) / 64 * 64 | 64) {}
};

// The activation rows of one product: n pointers to records (quantized weights) and to floats (float weights).
struct Acts {
    const uint8_t* const* records;
    const float* const* floats;
    int64_t n;
};

constexpr int64_t kDotRows = 8;  // up to here `dot_rows` is used, and a row's result does not depend on the others
constexpr int64_t kPanel = 32;   // weight rows of one `panel_rows`

bool is_float_type(int32_t type);
bool is_known_type(int32_t type);
// Values per block and bytes per block.
int64_t block_values(int32_t type);
int64_t block_bytes(int32_t type);

// x [cols] -> record; cols a multiple of 32.
void quantize_row(const float* x, int64_t cols, uint8_t* record);

// Only values begin .. end of a row of cols, given as x[0..]; both multiples of 32. The part that ends at cols also
// writes the padding. A record is complete once all its parts are written.
void quantize_part(const float* x, int64_t cols, int64_t begin, int64_t end, uint8_t* record);

// One row of blocks as floats; cols a multiple of the block.
void unpack_row(int32_t type, const uint8_t* blocks, int64_t cols, float* out);

// out[r * ld + i - row_begin] = scale * <weight row i, activation r>, for i in row_begin..row_end; acts.n <= kDotRows.
void dot_rows(const Weight& w, int64_t expert, int64_t row_begin, int64_t row_end, const Acts& acts, float* out,
              int64_t ld);

// The same for any number of activations and at most kPanel weight rows; out is [acts.n][kPanel].
// scratch: 64-byte aligned, panel_scratch_bytes() long.
void panel_rows(const Weight& w, int64_t expert, int64_t row_begin, int64_t row_end, const Acts& acts, float* out,
                uint8_t* scratch);
size_t panel_scratch_bytes();

enum Activation : int32_t { kSilu = 0, kGeluTanh = 1 };
// gate[i] = activation(gate[i]) * up[i]
void activate(int32_t activation, float* gate, const float* up, int64_t n);

}  // namespace tandem
