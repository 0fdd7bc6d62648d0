// Gated DeltaNet: the short convolution over time and the gated delta rule, both advancing a sequence's state.
// State [Hv][Dk][Dv]; threads share heads, and blocks of value columns, which do not depend on each other. Rows go one
// after the other (delta_rows.h), bit-equal for any split of a sequence; from kChunk rows on, by chunks
// (delta_chunk.h, 1.5 times as fast).
// Rows of a tentative segment leave the state as it was and log what they would have done; the next segment first
// applies the `commit_rows` of them that were accepted, with the bits that running them would have given.
#include "ops/delta_chunk.h"
#include "ops/delta_rows.h"
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

// Channels from c on of a segment, V vectors of them (a part of one, with V = 1); P past inputs, or as many as the
// weight has if P < 0. The log of tentative rows [log_rows][channels] holds their inputs.
template <int P, int V>
void convolve(const ShortConvArgs& args, const Segment& segment, const DeltaView& view, int64_t c, int count) {
    const int64_t n = args.channels, past = P < 0 ? args.width - 1 : P;
    constexpr int kPast = P < 0 ? kMaxPast : P;
    F taps[kPast + 1][V], inputs[kPast + 1][V];
    const float* x = args.x + segment.row_begin * n + c;
    float* out = args.out + segment.row_begin * n + c;
    const auto shift = [&](int v) {
        for (int64_t j = 0; j < past; j++) inputs[j][v] = inputs[j + 1][v];
    };
    const auto keep_tail = [&](int v) {
        float* tail = view.conv + c + v * simd::kLanes;
        for (int64_t j = 0; j < past; j++) simd::store_some(tail + j * n, inputs[j][v], count);
    };
    for (int v = 0; v < V; v++) {
        const int64_t at = c + v * simd::kLanes;
        for (int64_t j = 0; j <= past; j++) taps[j][v] = simd::load_some(args.weight + j * n + at, count);
        for (int64_t j = 0; j < past; j++) inputs[j][v] = simd::load_some(view.conv + j * n + at, count);
        for (int64_t row = 0; row < segment.commit_rows; row++) {
            inputs[past][v] = simd::load_some(view.conv_log + row * n + at, count);
            shift(v);
        }
        if (segment.tentative && segment.commit_rows) keep_tail(v);
    }
    for (int64_t row = 0; row < segment.rows; row++, x += n, out += n) {
        for (int v = 0; v < V; v++) {
            inputs[past][v] = simd::load_some(x + v * simd::kLanes, count);
            if (segment.tentative)
                simd::store_some(view.conv_log + row * n + c + v * simd::kLanes, inputs[past][v], count);
            F y = inputs[0][v] * taps[0][v];
            for (int64_t j = 1; j <= past; j++) y = simd::fma(inputs[j][v], taps[j][v], y);
            simd::store_some(out + v * simd::kLanes, simd::silu(y), count);
            shift(v);
        }
    }
    for (int v = 0; v < V && !segment.tentative; v++) keep_tail(v);
}

template <int P>
void convolve_channels(const ShortConvArgs& args, const Segment& segment, const DeltaView& view, Range channels) {
    constexpr int kVectors = 2;
    int64_t c = channels.begin;
    for (; c + kVectors * simd::kLanes <= channels.end; c += kVectors * simd::kLanes)
        convolve<P, kVectors>(args, segment, view, c, simd::kLanes);
    for (; c < channels.end; c += simd::kLanes)
        convolve<P, 1>(args, segment, view, c, int(std::min<int64_t>(simd::kLanes, channels.end - c)));
}

}  // namespace

TANDEM_OP(short_conv, ShortConvArgs) {
    const Range channels = share(args.channels, kConvGrain, 1024, team);
    for (int s = 0; s < step.n_segments; s++) {
        const Segment& segment = step.segments[s];
        const DeltaView& view = *static_cast<const DeltaView*>(segment.layer_state[args.layer]);
        if (args.width == 4) convolve_channels<3>(args, segment, view, channels);
        else convolve_channels<-1>(args, segment, view, channels);
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

// What one tentative row of one head left in the log: [2 halves][log_rows][v_heads] of these, in lines of 16 floats.
struct LogRow {
    float *k, *change;  // [dim]
    float* decay;
};

LogRow log_row(const DeltaView& view, int64_t half, int64_t row, int64_t v_heads, int64_t head, int64_t dim) {
    const int64_t stride = (2 * dim + 1 + 15) / 16 * 16;
    float* at = view.rule_log + ((half * view.log_rows + row) * v_heads + head) * stride;
    return {at, at + dim, at + 2 * dim};
}

// The accepted rows of the last tentative segment, for one head.
struct Pending {
    Change changes[kChunk];
    int n;

    Pending(const DeltaView& view, int64_t half, int rows, int64_t v_heads, int64_t head, int64_t dim) : n(rows) {
        for (int row = 0; row < rows; row++) {
            const LogRow log = log_row(view, half, row, v_heads, head, dim);
            changes[row] = {log.k, log.change, *log.decay};
        }
    }
};

// Floats of scratch that run_rows needs: k and q of kChunk rows, one change, a copy of the state's columns.
int64_t row_floats(int64_t dim) { return (2 * kChunk + 1 + kColumns) * dim; }

// Rows of a segment, `begin` to at most kChunk later, one after the other, on some columns of one head.
void run_rows(const DeltaRuleArgs& args, const Segment& segment, const DeltaView& view, int64_t begin, int64_t end,
              int64_t head, Range columns, const Pending* pending, float* scratch) {
    const int64_t dim = args.dim;
    DeltaRow rows[kChunk];
    float *k = scratch, *q = k + kChunk * dim, *change = q + kChunk * dim, *copy = change + dim;
    const int n = int(end - begin);
    for (int i = 0; i < n; i++, k += dim, q += dim) {
        const int64_t row = segment.row_begin + begin + i;
        const HeadRow at = load_row(args, row, head, k, q);
        const RowGates gates = gates_of(args, row, head);
        rows[i] = {k, q, at.v, change, at.out, std::exp(gates.log_decay), gates.beta};
        if (!segment.tentative) continue;
        const LogRow log = log_row(view, segment.parity, begin + i, args.v_heads, head, dim);
        rows[i].change = log.change;
        if (columns.begin == 0) {  // the threads of other columns have the same
            std::memcpy(log.k, k, dim * sizeof(float));
            *log.decay = rows[i].decay;
        }
    }
    run_columns(view.state + head * dim * dim, dim, columns.begin, columns.end, pending ? pending->changes : nullptr,
                pending ? pending->n : 0, rows, n, copy, segment.tentative);
}

// All rows of a segment on some columns of one head.
void run_segment(const DeltaRuleArgs& args, const Segment& segment, const DeltaView& view, int64_t head, Range columns,
                 float* scratch) {
    const Pending pending(view, 1 - segment.parity, segment.commit_rows, args.v_heads, head, args.dim);
    for (int64_t begin = 0; begin < segment.rows; begin += kChunk) {
        const int64_t end = std::min<int64_t>(begin + kChunk, segment.rows);
        run_rows(args, segment, view, begin, end, head, columns, begin ? nullptr : &pending, scratch);
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

// All rows of a segment of at least kChunk on one head.
void run_long_segment(const DeltaRuleArgs& args, const Segment& segment, const DeltaView& view, int64_t head,
                      float* scratch) {
    const int64_t dim = args.dim, begin = segment.row_begin, end = begin + segment.rows;
    float* state = view.state + head * dim * dim;
    const Pending pending(view, 1 - segment.parity, segment.commit_rows, args.v_heads, head, dim);
    if (pending.n) apply_changes(state, dim, 0, dim, pending.changes, pending.n);
    const int64_t done = run_chunks(args, begin, end, head, state, scratch) - begin;
    for (int64_t column = 0; column < dim && done < segment.rows; column += kColumns)
        run_rows(args, segment, view, done, segment.rows, head, {column, std::min<int64_t>(column + kColumns, dim)},
                 nullptr, scratch);
}

}  // namespace

TANDEM_OP(delta_rule, DeltaRuleArgs) {
    const int64_t dim = args.dim, floats = std::max(row_floats(dim), DeltaChunk::floats(dim));
    float* scratch = reinterpret_cast<float*>(team.scratch(floats * sizeof(float)));
    for (int s = 0; s < step.n_segments; s++) {
        const Segment& segment = step.segments[s];
        const DeltaView& view = *static_cast<const DeltaView*>(segment.layer_state[args.layer]);
        if (segment.rows >= kChunk && !segment.tentative && dim % simd::kLanes == 0) {
            team.loop(args.v_heads, 1,
                      [&](int64_t head, int64_t) { run_long_segment(args, segment, view, head, scratch); });
        } else {
            const int64_t blocks = (dim + kColumns - 1) / kColumns;
            team.loop(args.v_heads * blocks, 1, [&](int64_t item, int64_t) {
                const int64_t column = item % blocks * kColumns;
                const Range columns{column, std::min<int64_t>(column + kColumns, dim)};
                run_segment(args, segment, view, item / blocks, columns, scratch);
            });
        }
        if (team.loops == 8) team.barrier();
    }
}

// Applies the first `rows` rows of the log's half to the state of one layer, on the calling thread.
extern "C" TANDEM_API void tandem_delta_commit(const DeltaView* view, int32_t v_heads, int32_t dim, int32_t channels,
                                               int32_t width, int32_t rows, int32_t half) {
    for (int64_t head = 0; head < v_heads; head++) {
        const Pending pending(*view, half, rows, v_heads, head, dim);
        apply_changes(view->state + head * dim * dim, dim, 0, dim, pending.changes, rows);
    }
    const int64_t past = width - 1, kept = std::max<int64_t>(past - rows, 0), line = channels * sizeof(float);
    std::memmove(view->conv, view->conv + (past - kept) * channels, kept * line);
    std::memcpy(view->conv + kept * channels, view->conv_log + (rows - (past - kept)) * channels,
                (past - kept) * line);
}
