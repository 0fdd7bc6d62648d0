// Ops that move or combine values one by one: embedding rows, sums, scales, caps, gates, the choice of output rows.
#include "ops/matmul.h"
#include "ops/share.h"
#include "ops/simd_math.h"

using namespace tandem;

namespace {

constexpr int64_t kGrain = 64, kMinShare = 8192, kMinShareExp = 1024;

}  // namespace

struct AddArgs {
    const float *x, *y;
    float* out;
    int64_t width;
};

TANDEM_OP(add, AddArgs) {
    const Range r = share(step.rows * args.width, kGrain, kMinShare, team);
    simd::over(r.end - r.begin, [&](int64_t at, int count) {
        const int64_t i = r.begin + at;
        simd::store_some(args.out + i, simd::load_some(args.x + i, count) + simd::load_some(args.y + i, count), count);
    });
}

struct ConcatArgs {
    const float *x, *y;
    float* out;
    int64_t x_width, y_width;
};

TANDEM_OP(concat, ConcatArgs) {
    const int64_t width = args.x_width + args.y_width;
    const Range rows = share(step.rows, 1, (kMinShare + width - 1) / width, team);
    for (int64_t row = rows.begin; row < rows.end; row++) {
        std::memcpy(args.out + row * width, args.x + row * args.x_width, args.x_width * sizeof(float));
        std::memcpy(args.out + row * width + args.x_width, args.y + row * args.y_width, args.y_width * sizeof(float));
    }
}

struct ScaleArgs {
    const float* x;
    float* out;
    int64_t width;
    float factor;
    int32_t reserved;
};

TANDEM_OP(scale, ScaleArgs) {
    const Range r = share(step.rows * args.width, kGrain, kMinShare, team);
    const simd::F factor = simd::set1(args.factor);
    simd::over(r.end - r.begin, [&](int64_t at, int count) {
        const int64_t i = r.begin + at;
        simd::store_some(args.out + i, simd::load_some(args.x + i, count) * factor, count);
    });
}

struct SoftcapArgs {
    const float* x;
    float* out;
    int64_t width;
    float cap;
    int32_t reserved;
};

TANDEM_OP(softcap, SoftcapArgs) {
    const Range r = share(step.rows * args.width, kGrain, kMinShareExp, team);
    const simd::F cap = simd::set1(args.cap), inverse = simd::set1(1.0f / args.cap);
    simd::over(r.end - r.begin, [&](int64_t at, int count) {
        const int64_t i = r.begin + at;
        simd::store_some(args.out + i, cap * simd::tanh(simd::load_some(args.x + i, count) * inverse), count);
    });
}

struct SigmoidGateArgs {
    const float *x, *gate;
    float* out;
    int64_t width;
};

TANDEM_OP(sigmoid_gate, SigmoidGateArgs) {
    const Range r = share(step.rows * args.width, kGrain, kMinShareExp, team);
    simd::over(r.end - r.begin, [&](int64_t at, int count) {
        const int64_t i = r.begin + at;
        const simd::F open = simd::sigmoid(simd::load_some(args.gate + i, count));
        simd::store_some(args.out + i, simd::load_some(args.x + i, count) * open, count);
    });
}

struct SplitGateArgs {
    const float* x;  // [T, heads, 2, head_dim]
    float *values, *gates;
    int32_t heads, head_dim;
};

TANDEM_OP(split_gate, SplitGateArgs) {
    const int64_t n = args.head_dim;
    const Range parts = share(int64_t(step.rows) * args.heads, 1, (kMinShare + n - 1) / n, team);
    for (int64_t part = parts.begin; part < parts.end; part++) {
        std::memcpy(args.values + part * n, args.x + 2 * part * n, n * sizeof(float));
        std::memcpy(args.gates + part * n, args.x + (2 * part + 1) * n, n * sizeof(float));
    }
}

struct AddGatedArgs {
    const float *base, *x, *gate_input;  // [T, width], [T, width], [T, gate_width]
    const float* gate_weight;            // [gate_width]
    float* out;
    int32_t width, gate_width;
    float gate_scale;
    int32_t reserved;
};

TANDEM_OP(add_gated, AddGatedArgs) {
    const Range rows = share(step.rows, 1, 1, team);
    for (int64_t row = rows.begin; row < rows.end; row++) {
        const float score = simd::dot(args.gate_input + row * args.gate_width, args.gate_weight, args.gate_width);
        const simd::F open = simd::sigmoid(simd::set1(score * args.gate_scale));
        const float *base = args.base + row * args.width, *x = args.x + row * args.width;
        float* out = args.out + row * args.width;
        simd::over(args.width, [&](int64_t i, int count) {
            simd::store_some(out + i, simd::fma(open, simd::load_some(x + i, count), simd::load_some(base + i, count)),
                             count);
        });
    }
}

struct OutputRowsArgs {
    const float* x;
    float* out;
    int64_t width;
};

TANDEM_OP(output_rows, OutputRowsArgs) {
    const Range rows = share(step.n_out, 1, (kMinShare + args.width - 1) / args.width, team);
    for (int64_t row = rows.begin; row < rows.end; row++)
        std::memcpy(args.out + row * args.width, args.x + step.out_rows[row] * args.width, args.width * sizeof(float));
}

struct EmbedArgs {
    const uint8_t* table;  // [vocab] rows of row_bytes
    float* out;
    int64_t row_bytes;
    int32_t width, ggml_type;
    float scale;
    int32_t reserved;
};

TANDEM_OP(embed, EmbedArgs) {
    const Range rows = share(step.rows, 1, (kMinShare + args.width - 1) / args.width, team);
    const simd::F scale = simd::set1(args.scale);
    for (int64_t row = rows.begin; row < rows.end; row++) {
        float* out = args.out + row * args.width;
        unpack_row(args.ggml_type, args.table + step.tokens[row] * args.row_bytes, args.width, out);
        if (args.scale != 1.0f)
            simd::over(args.width, [&](int64_t i, int count) {
                simd::store_some(out + i, simd::load_some(out + i, count) * scale, count);
            });
    }
}
