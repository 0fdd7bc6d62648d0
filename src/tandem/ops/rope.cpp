// Rotary position embedding: a table of turns for the step's rows, computed once, and the rotation of heads by it.
#include "ops/share.h"
#include "ops/simd_math.h"

using namespace tandem;

// Table row: interleaved pairs: cosines (c0 c0 c1 c1 ..) then signed sines (-s0 s0 -s1 s1 ..), n values each;
// else n/2 cosines then n/2 sines. So both kinds have 2 * pairs or 4 * pairs values.
struct RopeTableArgs {
    const float* inv_freq;  // [pairs]
    float* table;           // [T, interleaved ? 4 * pairs : 2 * pairs]
    int32_t pairs, interleaved;
    float magnitude;
    int32_t reserved;
};

TANDEM_OP(rope_table, RopeTableArgs) {
    const int64_t pairs = args.pairs;
    const Range turns = share(step.rows * pairs, 1, 64, team);
    for (int64_t turn = turns.begin; turn < turns.end; turn++) {
        const int64_t row = turn / pairs, pair = turn % pairs;
        // In double: a float product of a position near 10^5 is off by 0.01 rad.
        const double angle = double(step.positions[row]) * double(args.inv_freq[pair]);
        const float c = float(std::cos(angle) * args.magnitude), s = float(std::sin(angle) * args.magnitude);
        if (args.interleaved) {
            float* out = args.table + row * 4 * pairs + 2 * pair;
            out[0] = out[1] = c;
            out[2 * pairs] = -s;
            out[2 * pairs + 1] = s;
        } else {
            float* out = args.table + row * 2 * pairs + pair;
            out[0] = c;
            out[pairs] = s;
        }
    }
}

struct RopeArgs {
    const float* x;      // [T, width]
    const float* table;  // of rope_table
    float* out;
    int32_t width, head_dim, pairs, interleaved;
};

namespace {

void rotate_interleaved(const float* x, const float* table, float* out, int64_t pairs) {
    const float *c = table, *s = table + 2 * pairs;
    simd::over(2 * pairs, [&](int64_t i, int count) {
        const simd::F value = simd::load_some(x + i, count);
        const simd::F turned = simd::swap_pairs(value) * simd::load_some(s + i, count);
        simd::store_some(out + i, simd::fma(value, simd::load_some(c + i, count), turned), count);
    });
}

void rotate_halves(const float* x, const float* table, float* out, int64_t pairs) {
    const float *cosines = table, *sines = table + pairs;
    simd::over(pairs, [&](int64_t i, int count) {
        const simd::F a = simd::load_some(x + i, count), b = simd::load_some(x + pairs + i, count);
        const simd::F c = simd::load_some(cosines + i, count), s = simd::load_some(sines + i, count);
        simd::store_some(out + i, simd::neg_fma(b, s, a * c), count);
        simd::store_some(out + pairs + i, simd::fma(a, s, b * c), count);
    });
}

}  // namespace

TANDEM_OP(rope, RopeArgs) {
    const int64_t pairs = args.pairs, head_dim = args.head_dim, heads = args.width / head_dim;
    const int64_t table_width = (args.interleaved ? 4 : 2) * pairs;
    const Range parts = share(step.rows * heads, 1, (4096 + head_dim - 1) / head_dim, team);
    for (int64_t part = parts.begin; part < parts.end; part++) {
        const float *x = args.x + part * head_dim, *table = args.table + part / heads * table_width;
        float* out = args.out + part * head_dim;
        if (args.interleaved) rotate_interleaved(x, table, out, pairs);
        else rotate_halves(x, table, out, pairs);
        std::memcpy(out + 2 * pairs, x + 2 * pairs, (head_dim - 2 * pairs) * sizeof(float));
    }
}
