// Gated DeltaNet: the short convolution over time and the gated delta rule, both advancing a sequence's state.
// State [Hv][Dk][Dv]; threads share heads and blocks of value columns, which do not depend on each other.
#include "ops/share.h"
#include "ops/simd_math.h"

using namespace tandem;
using simd::F;

struct ShortConvArgs {
    const float* x;       // [T, channels]
    const float* weight;  // [width, channels], last tap newest
    float* out;
    int32_t channels, width, layer, reserved;
};

namespace {

constexpr int64_t kConvGrain = 64;  // channels: one cache line of bits to spare between threads
constexpr int kMaxTaps = 16;

void convolve(const ShortConvArgs& args, const Segment& segment, const DeltaView& view, Range channels) {
    const int64_t n = args.channels, past = args.width - 1;
    simd::over(channels.end - channels.begin, [&](int64_t at, int count) {
        const int64_t c = channels.begin + at;
        F taps[kMaxTaps], inputs[kMaxTaps];
        for (int64_t j = 0; j <= past; j++) taps[j] = simd::load_some(args.weight + j * n + c, count);
        for (int64_t j = 0; j < past; j++) inputs[j] = simd::load_some(view.conv + j * n + c, count);
        const float* x = args.x + segment.row_begin * n + c;
        float* out = args.out + segment.row_begin * n + c;
        for (int64_t row = 0; row < segment.rows; row++, x += n, out += n) {
            inputs[past] = simd::load_some(x, count);
            F y = inputs[0] * taps[0];
            for (int64_t j = 1; j <= past; j++) y = simd::fma(inputs[j], taps[j], y);
            simd::store_some(out, simd::silu(y), count);
            for (int64_t j = 0; j < past; j++) inputs[j] = inputs[j + 1];
        }
        for (int64_t j = 0; j < past; j++) simd::store_some(view.conv + j * n + c, inputs[j], count);
    });
}

}  // namespace

TANDEM_OP(short_conv, ShortConvArgs) {
    const Range channels = share(args.channels, kConvGrain, 1024, team);
    for (int s = 0; s < step.n_segments; s++) {
        const Segment& segment = step.segments[s];
        convolve(args, segment, *static_cast<const DeltaView*>(segment.layer_state[args.layer]), channels);
    }
}

struct DeltaRuleArgs {
    const float* qkv;           // [T, (2 * k_heads + v_heads) * dim]
    const float *alpha, *beta;  // [T, v_heads], before softplus and sigmoid
    const float *a, *dt_bias;   // [v_heads]
    float* out;                 // [T, v_heads * dim]
    int32_t k_heads, v_heads, dim, layer;
    float eps;
    int32_t reserved;
};

namespace {

constexpr int kColumns = 8 * simd::kLanes;  // value columns of one register block

// What one row does to one head.
struct Change {
    const float *k, *q;  // [dim], normalised
    const float* v;
    float* out;
    float decay, beta;
};

// One step of the rule on V vectors of columns (the last one of `last` lanes): reads the state twice, writes it once.
template <int V>
void advance(float* state, int64_t stride, int64_t dim, int last, const Change& c) {
    F sums[V], outs[V];
    for (int j = 0; j < V; j++) sums[j] = outs[j] = simd::set1(0);
    const auto lanes = [&](int j) { return j == V - 1 ? last : simd::kLanes; };
    const float* read = state;
    for (int64_t i = 0; i < dim; i++, read += stride) {
        const F k = simd::set1(c.k[i]);
        for (int j = 0; j < V; j++) sums[j] = simd::fma(k, simd::load_some(read + j * simd::kLanes, lanes(j)), sums[j]);
    }
    const F decay = simd::set1(c.decay), beta = simd::set1(c.beta);
    for (int j = 0; j < V; j++)
        sums[j] = beta * simd::neg_fma(decay, sums[j], simd::load_some(c.v + j * simd::kLanes, lanes(j)));
    float* line = state;
    for (int64_t i = 0; i < dim; i++, line += stride) {
        const F k = simd::set1(c.k[i]), q = simd::set1(c.q[i]);
        for (int j = 0; j < V; j++) {
            const F next = simd::fma(k, sums[j], decay * simd::load_some(line + j * simd::kLanes, lanes(j)));
            simd::store_some(line + j * simd::kLanes, next, lanes(j));
            outs[j] = simd::fma(q, next, outs[j]);
        }
    }
    for (int j = 0; j < V; j++) simd::store_some(c.out + j * simd::kLanes, outs[j], lanes(j));
}

void advance_columns(float* state, int64_t stride, int64_t dim, int64_t columns, const Change& c) {
    if (columns == kColumns) return advance<8>(state, stride, dim, simd::kLanes, c);
    Change part = c;
    for (int64_t at = 0; at < columns;) {
        part.v = c.v + at;
        part.out = c.out + at;
        if (columns - at >= 4 * simd::kLanes) {
            advance<4>(state + at, stride, dim, simd::kLanes, part);
            at += 4 * simd::kLanes;
        } else {
            advance<1>(state + at, stride, dim, int(std::min<int64_t>(simd::kLanes, columns - at)), part);
            at += simd::kLanes;
        }
    }
}

// x / sqrt(sum x^2 + eps) * factor
void l2_normalise(const float* x, int64_t n, float eps, float factor, float* out) {
    const F scale = simd::set1(factor / std::sqrt(simd::dot(x, x, n) + eps));
    simd::over(n, [&](int64_t i, int count) { simd::store_some(out + i, simd::load_some(x + i, count) * scale, count); });
}

float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// All rows of a segment on columns [begin, end) of one head.
void run_head(const DeltaRuleArgs& args, const Segment& segment, int64_t head, Range columns, float* scratch) {
    const int64_t dim = args.dim, k_heads = args.k_heads, width = (2 * k_heads + args.v_heads) * dim;
    const DeltaView& view = *static_cast<const DeltaView*>(segment.layer_state[args.layer]);
    float* state = view.state + head * dim * dim + columns.begin;
    float *q = scratch, *k = scratch + dim;
    for (int64_t row = segment.row_begin; row < segment.row_begin + segment.rows; row++) {
        const float* qkv = args.qkv + row * width;
        l2_normalise(qkv + head % k_heads * dim, dim, args.eps, 1.0f / std::sqrt(float(dim)), q);
        l2_normalise(qkv + (k_heads + head % k_heads) * dim, dim, args.eps, 1.0f, k);
        const int64_t gate = row * args.v_heads + head, value = head * dim + columns.begin;
        const Change change{k, q, qkv + 2 * k_heads * dim + value, args.out + row * args.v_heads * dim + value,
                            std::exp(args.a[head] * softplus(args.alpha[gate] + args.dt_bias[head])),
                            1.0f / (1.0f + std::exp(-args.beta[gate]))};
        advance_columns(state, dim, dim, columns.end - columns.begin, change);
    }
}

}  // namespace

TANDEM_OP(delta_rule, DeltaRuleArgs) {
    const int64_t blocks = (args.dim + kColumns - 1) / kColumns, items = args.v_heads * blocks;
    float* scratch = reinterpret_cast<float*>(team.scratch(2 * args.dim * sizeof(float)));
    team.loop(step.n_segments * items, 1, [&](int64_t begin, int64_t) {
        const int64_t head = begin % items / blocks, column = begin % blocks * kColumns;
        const Range columns{column, std::min<int64_t>(column + kColumns, args.dim)};
        run_head(args, step.segments[begin / items], head, columns, scratch);
    });
}
