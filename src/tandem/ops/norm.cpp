// RMS norm over the parts of rows, plain and gated. Each part is summed by one thread in an order fixed by its width.
#include "ops/norm.h"
#include "ops/share.h"

using namespace tandem;

namespace {

constexpr int64_t kMinShare = 4096;  // values per thread: below, one more barrier arrival costs more than it saves

}  // namespace

struct RmsNormArgs {
    const float* x;         // [T, heads * n]
    const float* weight;    // [n]
    const float* residual;  // [T, heads * n] added to the result, or null
    float* out;
    int32_t width, heads;
    float eps;
    int32_t reserved;
};

TANDEM_OP(rms_norm, RmsNormArgs) {
    const int64_t n = args.width / args.heads;
    const Range parts = share(int64_t(step.rows) * args.heads, 1, (kMinShare + n - 1) / n, team);
    for (int64_t part = parts.begin; part < parts.end; part++) {
        const float* x = args.x + part * n;
        float* out = args.out + part * n;
        if (args.residual) add_rms_normalised(args.residual + part * n, x, args.weight, n, args.eps, out);
        else rms_normalise(x, args.weight, n, args.eps, out);
    }
}

struct GatedRmsNormArgs {
    const float* x;       // [T, heads * n]
    const float* gate;    // [T, heads * n]
    const float* weight;  // [n]
    float* out;
    int32_t width, heads;
    float eps;
    int32_t reserved;
};

TANDEM_OP(gated_rms_norm, GatedRmsNormArgs) {
    const int64_t n = args.width / args.heads;
    const Range parts = share(int64_t(step.rows) * args.heads, 1, (kMinShare / 4 + n - 1) / n, team);
    for (int64_t part = parts.begin; part < parts.end; part++) {
        const float *x = args.x + part * n, *gate = args.gate + part * n;
        float* out = args.out + part * n;
        const simd::F factor = simd::set1(inverse_rms(x, n, args.eps));
        simd::over(n, [&](int64_t i, int count) {
            const simd::F normed = simd::load_some(x + i, count) * factor * simd::load_some(args.weight + i, count);
            simd::store_some(out + i, normed * simd::silu(simd::load_some(gate + i, count)), count);
        });
    }
}
