// Gated DeltaNet: the short convolution over time and the gated delta rule, both advancing a sequence's state.
// State [Hv][Dk][Dv]; threads share heads and blocks of value columns, which do not depend on each other.
#include "ops/share.h"
#include "ops/simd_math.h"

using namespace tandem;
using simd::F;
using simd::repeat;

struct ShortConvArgs {
    const float* x;       // [T, channels]
    const float* weight;  // [width, channels], last tap newest
    float* out;
    int32_t channels, width, layer, reserved;
};

namespace {

constexpr int64_t kConvGrain = 64;
constexpr int kMaxPast = 15;

// Channels [begin, end) of a segment, V vectors at a time (a part of one, with V = 1); P past inputs, or `past` if P < 0.
template <int P, int V>
void convolve(const ShortConvArgs& args, const Segment& segment, float* tail, int64_t c, int count) {
    const int64_t n = args.channels, past = P < 0 ? args.width - 1 : P;
    constexpr int kPast = P < 0 ? kMaxPast : P;
    F taps[kPast + 1][V], inputs[kPast + 1][V];
    const float* x = args.x + segment.row_begin * n + c;
    float* out = args.out + segment.row_begin * n + c;
    for (int v = 0; v < V; v++) {
        const int64_t at = c + v * simd::kLanes;
        for (int64_t j = 0; j <= past; j++) taps[j][v] = simd::load_some(args.weight + j * n + at, count);
        for (int64_t j = 0; j < past; j++) inputs[j][v] = simd::load_some(tail + j * n + at, count);
    }
    for (int64_t row = 0; row < segment.rows; row++, x += n, out += n) {
        for (int v = 0; v < V; v++) {
            inputs[past][v] = simd::load_some(x + v * simd::kLanes, count);
            F y = inputs[0][v] * taps[0][v];
            for (int64_t j = 1; j <= past; j++) y = simd::fma(inputs[j][v], taps[j][v], y);
            simd::store_some(out + v * simd::kLanes, simd::silu(y), count);
            for (int64_t j = 0; j < past; j++) inputs[j][v] = inputs[j + 1][v];
        }
    }
    for (int v = 0; v < V; v++)
        for (int64_t j = 0; j < past; j++) simd::store_some(tail + j * n + c + v * simd::kLanes, inputs[j][v], count);
}

template <int P>
void convolve_channels(const ShortConvArgs& args, const Segment& segment, float* tail, Range channels) {
    constexpr int kVectors = 2;
    int64_t c = channels.begin;
    for (; c + kVectors * simd::kLanes <= channels.end; c += kVectors * simd::kLanes)
        convolve<P, kVectors>(args, segment, tail, c, simd::kLanes);
    for (; c < channels.end; c += simd::kLanes)
        convolve<P, 1>(args, segment, tail, c, int(std::min<int64_t>(simd::kLanes, channels.end - c)));
}

}  // namespace

TANDEM_OP(short_conv, ShortConvArgs) {
    const Range channels = share(args.channels, kConvGrain, 1024, team);
    for (int s = 0; s < step.n_segments; s++) {
        const Segment& segment = step.segments[s];
        float* tail = static_cast<const DeltaView*>(segment.layer_state[args.layer])->conv;
        if (args.width == 4) convolve_channels<3>(args, segment, tail, channels);
        else convolve_channels<-1>(args, segment, tail, channels);
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

// One step of the rule on V vectors of columns, or on one of `part` lanes: reads the state twice, writes it once.
template <int V>
void advance(float* state, int64_t stride, int64_t dim, int part, const Change& c) {
    const auto load = [&](const float* x) { return V == 1 ? simd::load_some(x, part) : simd::load(x); };
    const auto store = [&](float* x, F value) { simd::store_some(x, value, V == 1 ? part : simd::kLanes); };
    F sums[V], outs[V];
    repeat<V>([&](auto j) { sums[j] = outs[j] = simd::set1(0); });
    const float* read = state;
    for (int64_t i = 0; i < dim; i++, read += stride) {
        const F k = simd::set1(c.k[i]);
        repeat<V>([&](auto j) { sums[j] = simd::fma(k, load(read + j * simd::kLanes), sums[j]); });
    }
    const F decay = simd::set1(c.decay), beta = simd::set1(c.beta);
    repeat<V>([&](auto j) { sums[j] = beta * simd::neg_fma(decay, sums[j], load(c.v + j * simd::kLanes)); });
    float* line = state;
    for (int64_t i = 0; i < dim; i++, line += stride) {
        const F k = simd::set1(c.k[i]), q = simd::set1(c.q[i]);
        repeat<V>([&](auto j) {
            const F next = simd::fma(k, sums[j], decay * load(line + j * simd::kLanes));
            store(line + j * simd::kLanes, next);
            outs[j] = simd::fma(q, next, outs[j]);
        });
    }
    repeat<V>([&](auto j) { store(c.out + j * simd::kLanes, outs[j]); });
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
