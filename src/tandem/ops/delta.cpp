// Gated DeltaNet: the short convolution over time and the gated delta rule, both advancing a sequence's state.
// State [Hv][Dk][Dv]; threads share heads, and blocks of value columns, which do not depend on each other. Rows go one
// after the other, bit-equal for any split of a sequence; from kChunk rows on, by chunks (delta_chunk.h, 1.5 times
// as fast).
#include "ops/delta_chunk.h"
#include "ops/share.h"

using namespace tandem;

struct ShortConvArgs {
    const float* x;       // [T, channels]
    const float* weight;  // [width, channels], last tap newest
    float* out;
    int32_t channels, width, layer, reserved;
};

namespace {

constexpr int64_t kConvGrain = 64;
constexpr int kMaxPast = 15;

// Channels [begin, end) of a segment, V vectors at a time (a part of one, with V = 1); P past inputs, or as many as the
// weight has if P < 0.
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
    simd::over(n,
               [&](int64_t i, int count) { simd::store_some(out + i, simd::load_some(x + i, count) * scale, count); });
}

float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// What the rule needs of one row and one head.
struct RowGates {
    float log_decay, beta;
};

RowGates gates_of(const DeltaRuleArgs& args, int64_t row, int64_t head) {
    const int64_t at = row * args.v_heads + head;
    return {args.a[head] * softplus(args.alpha[at] + args.dt_bias[head]), 1.0f / (1.0f + std::exp(-args.beta[at]))};
}

// Pointers of one row for one head; k and q are normalised into the given rows.
struct HeadRow {
    const float* v;
    float* out;
};

HeadRow load_row(const DeltaRuleArgs& args, int64_t row, int64_t head, float* k, float* q) {
    const int64_t dim = args.dim, k_heads = args.k_heads;
    const float* qkv = args.qkv + row * (2 * k_heads + args.v_heads) * dim;
    l2_normalise(qkv + head % k_heads * dim, dim, args.eps, 1.0f / std::sqrt(float(dim)), q);
    l2_normalise(qkv + (k_heads + head % k_heads) * dim, dim, args.eps, 1.0f, k);
    return {qkv + (2 * k_heads + head) * dim, args.out + (row * args.v_heads + head) * dim};
}

// Rows [begin, end) of the step, one after the other, on some columns of one head; scratch [2 * dim].
void run_rows(const DeltaRuleArgs& args, int64_t begin, int64_t end, int64_t head, Range columns, float* head_state,
              float* scratch) {
    const int64_t dim = args.dim;
    float *k = scratch, *q = scratch + dim;
    for (int64_t row = begin; row < end; row++) {
        const HeadRow at = load_row(args, row, head, k, q);
        const RowGates gates = gates_of(args, row, head);
        const Change change{k, q, at.v + columns.begin, at.out + columns.begin, std::exp(gates.log_decay), gates.beta};
        advance_columns(head_state + columns.begin, dim, dim, columns.end - columns.begin, change);
    }
}

// Whole chunks of rows from `begin` on, on all columns of one head; returns the first row not done.
int64_t run_chunks(const DeltaRuleArgs& args, int64_t begin, int64_t end, int64_t head, float* head_state,
                   float* scratch) {
    const int64_t dim = args.dim, qkv_width = (2 * args.k_heads + args.v_heads) * dim;
    const DeltaChunk c(dim, scratch);
    for (; begin + kChunk <= end; begin += kChunk) {
        HeadRow first{};
        float log_decay = 0;
        for (int i = 0; i < kChunk; i++) {
            const HeadRow at = load_row(args, begin + i, head, c.k + i * dim, c.q + i * dim);
            if (i == 0) first = at;
            const RowGates gates = gates_of(args, begin + i, head);
            log_decay += gates.log_decay;
            c.log_decay[i] = log_decay;
            c.decay[i] = std::exp(log_decay);
            c.beta[i] = gates.beta;
        }
        advance_chunk(c, dim, first.v, qkv_width, first.out, args.v_heads * dim, head_state);
    }
    return begin;
}

}  // namespace

TANDEM_OP(delta_rule, DeltaRuleArgs) {
    const int64_t dim = args.dim;
    float* scratch = reinterpret_cast<float*>(team.scratch(std::max(2 * dim, DeltaChunk::floats(dim)) * sizeof(float)));
    for (int s = 0; s < step.n_segments; s++) {
        const Segment& segment = step.segments[s];
        float* state = static_cast<const DeltaView*>(segment.layer_state[args.layer])->state;
        const int64_t begin = segment.row_begin, end = begin + segment.rows;
        if (segment.rows >= kChunk && dim % simd::kLanes == 0) {
            team.loop(args.v_heads, 1, [&](int64_t head, int64_t) {
                float* head_state = state + head * dim * dim;
                const int64_t done = run_chunks(args, begin, end, head, head_state, scratch);
                run_rows(args, done, end, head, {0, dim}, head_state, scratch);
            });
        } else {
            const int64_t blocks = (dim + kColumns - 1) / kColumns;
            team.loop(args.v_heads * blocks, 1, [&](int64_t item, int64_t) {
                const int64_t head = item / blocks, column = item % blocks * kColumns;
                const Range columns{column, std::min<int64_t>(column + kColumns, dim)};
                run_rows(args, begin, end, head, columns, state + head * dim * dim, scratch);
            });
        }
        if (team.loops == 8) team.barrier();
    }
}
