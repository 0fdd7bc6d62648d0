// Attention of many rows (prefill): blocks of queries against tiles of keys, softmax carried along (flash attention).
//
// Scores are kept transposed, [keys of the tile][queries of the block]: keys are then read row by row as the cache has
// them, and the softmax over keys runs lane by lane. Threads share (kv head, block of rows).
#pragma once
#include "ops/attention_cache.h"

namespace tandem {
namespace {

using simd::repeat;

constexpr int64_t kQueries = 96, kKeys = 64;  // of a block and of a tile; a query is one head of one row
constexpr bool kWide = simd::kLanes == 16;    // 32 registers instead of 16
// Register tiles: keys x vectors of queries, queries x vectors of value columns.
constexpr int kScoreKeys = kWide ? 8 : 4, kScoreVectors = 3, kMixQueries = 6, kMixVectors = kWide ? 4 : 2;
constexpr int64_t kPanel = kScoreVectors * simd::kLanes;
constexpr float kLowest = -1e30f;  // a maximum over no keys: finite, so that differences to it are
static_assert(kQueries % kPanel == 0 && kKeys % kScoreKeys == 0 && kQueries % kMixQueries == 0, "tiles fill the block");

inline int64_t padded_columns(int64_t dim) { return (dim + simd::kLanes - 1) / simd::kLanes * simd::kLanes; }

// One thread's memory while it works on a block of queries.
struct Block {
    float* queries;                              // [kQueries / kPanel][dim][kPanel], scaled
    float* keys;                                 // [kKeys][dim]
    float* values;                               // [kKeys][columns], zero beyond value_dim
    float* scores;                               // [kKeys][kQueries]; at first, one query on its way to `queries`
    float* sums;                                 // [kQueries][columns]
    float *top, *total, *factor, *first, *last;  // [kQueries]; first and last visible position, relative to the tile

    static int64_t floats(const AttentionArgs& args) {
        const int64_t columns = padded_columns(args.value_dim);
        return (kQueries + kKeys) * (args.dim + columns) + kKeys * kQueries + 5 * kQueries;
    }
    Block(const AttentionArgs& args, float* at) {
        const int64_t columns = padded_columns(args.value_dim);
        const auto take = [&](int64_t n) { return at += n, at - n; };
        scores = take(kKeys * kQueries);
        top = take(kQueries), total = take(kQueries), factor = take(kQueries), first = take(kQueries),
        last = take(kQueries);
        sums = take(kQueries * columns);
        values = take(kKeys * columns);
        queries = take(kQueries * args.dim);
        keys = take(kKeys * args.dim);
    }
};

// Which rows a block holds, and the range of positions that they see together.
struct Span {
    const Segment* segment;
    const KvView* cache;
    int64_t kv_head, row, rows;  // row: within the segment
    int64_t position, queries;   // of the first row; rows * group
};

void load_queries(const AttentionArgs& args, const Span& span, const Block& b) {
    const int64_t group = args.heads / args.kv_heads, used = (span.queries + kPanel - 1) / kPanel * kPanel;
    for (int64_t m = 0; m < used; m++) {
        float* out = b.queries + m / kPanel * kPanel * args.dim + m % kPanel;
        if (m >= span.queries) {
            for (int64_t d = 0; d < args.dim; d++) out[d * kPanel] = 0;
            continue;
        }
        const int64_t row = span.segment->row_begin + span.row + m / group, head = span.kv_head * group + m % group;
        const float* q = args.q + (row * args.heads + head) * args.dim;
        q = prepare_head(args, q, args.q_norm, row, b.scores);
        for (int64_t d = 0; d < args.dim; d++) out[d * kPanel] = q[d] * args.scale;
    }
}

template <class T>
void widen(const T* rows, int64_t n, int64_t dim, float* out, int64_t stride) {
    for (int64_t i = 0; i < n; i++, rows += dim, out += stride)
        simd::over(
            dim, [&](int64_t at, int count) { simd::store_some(out + at, simd::load_some(rows + at, count), count); });
}

// n cache rows from `position` on as floats, the rows `stride` apart.
void load_rows(const KvView& cache, const uint8_t* base, int64_t dim, int64_t head, int64_t position, int64_t n,
               float* out, int64_t stride) {
    const int64_t bytes = row_bytes(cache.type, dim);
    for (int64_t done = 0; done < n;) {
        const int64_t slot = (position + done) % cache.capacity, count = std::min(n - done, cache.capacity - slot);
        const uint8_t* rows = base + (head * cache.capacity + slot) * bytes;
        float* to = out + done * stride;
        if (cache.type == 0) widen(reinterpret_cast<const float*>(rows), count, dim, to, stride);
        else if (cache.type == 1) widen(reinterpret_cast<const uint16_t*>(rows), count, dim, to, stride);
        else
            for (int64_t i = 0; i < count; i++) read_q8_0(rows + i * bytes, to + i * stride, dim);
        done += count;
    }
}

// kScoreKeys keys times one panel of queries.
void score_panel(const float* keys, const float* queries, int64_t dim, float* scores) {
    F acc[kScoreKeys][kScoreVectors];
    repeat<kScoreKeys>([&](auto i) { repeat<kScoreVectors>([&](auto j) { acc[i][j] = simd::set1(0); }); });
    for (int64_t d = 0; d < dim; d++, queries += kPanel) {
        F q[kScoreVectors];
        repeat<kScoreVectors>([&](auto j) { q[j] = simd::load(queries + j * simd::kLanes); });
        repeat<kScoreKeys>([&](auto i) {
            const F k = simd::set1(keys[i * dim + d]);
            repeat<kScoreVectors>([&](auto j) { acc[i][j] = simd::fma(k, q[j], acc[i][j]); });
        });
    }
    repeat<kScoreKeys>([&](auto i) {
        repeat<kScoreVectors>([&](auto j) { simd::store(scores + i * kQueries + j * simd::kLanes, acc[i][j]); });
    });
}

// kMixQueries sums += weights [n][..]^T times values, on V vectors of columns.
template <int V>
void mix_columns(const float* weights, const float* values, int64_t keys, int64_t stride, float* sums) {
    F acc[kMixQueries][V];
    repeat<kMixQueries>(
        [&](auto i) { repeat<V>([&](auto j) { acc[i][j] = simd::load(sums + i * stride + j * simd::kLanes); }); });
    for (int64_t n = 0; n < keys; n++, weights += kQueries, values += stride) {
        F v[V];
        repeat<V>([&](auto j) { v[j] = simd::load(values + j * simd::kLanes); });
        repeat<kMixQueries>([&](auto i) {
            const F w = simd::set1(weights[i]);
            repeat<V>([&](auto j) { acc[i][j] = simd::fma(w, v[j], acc[i][j]); });
        });
    }
    repeat<kMixQueries>(
        [&](auto i) { repeat<V>([&](auto j) { simd::store(sums + i * stride + j * simd::kLanes, acc[i][j]); }); });
}

// Scores of one vector of queries -> their weights, relative to the new maximum; `factor` takes the old sums to it.
void soften_lanes(const Block& b, int64_t m, int64_t keys, float softcap, bool masked) {
    float* scores = b.scores + m;
    const F old_top = simd::load(b.top + m), lowest = simd::set1(-INFINITY);
    const F first = simd::load(b.first + m), last = simd::load(b.last + m);
    F top = old_top;
    for (int64_t n = 0; n < keys; n++) {
        F s = simd::load(scores + n * kQueries);
        if (softcap != 0) s = simd::set1(softcap) * simd::tanh(s * simd::set1(1.0f / softcap));
        if (masked) {
            const F at = simd::set1(float(n));
            s = simd::select_less(at, first, lowest, simd::select_less(last, at, lowest, s));
        }
        if (softcap != 0 || masked) simd::store(scores + n * kQueries, s);
        top = simd::max(top, s);
    }
    const F factor = simd::exp(old_top - top);
    F total = simd::load(b.total + m) * factor;
    for (int64_t n = 0; n < keys; n++) {
        const F weight = simd::exp(simd::load(scores + n * kQueries) - top);
        simd::store(scores + n * kQueries, weight);
        total = total + weight;
    }
    simd::store(b.top + m, top);
    simd::store(b.total + m, total);
    simd::store(b.factor + m, factor);
}

void scale_sums(const Block& b, int64_t queries, int64_t columns) {
    for (int64_t m = 0; m < queries; m++) {
        if (b.factor[m] == 1) continue;
        const F factor = simd::set1(b.factor[m]);
        float* sums = b.sums + m * columns;
        for (int64_t c = 0; c < columns; c += simd::kLanes) simd::store(sums + c, simd::load(sums + c) * factor);
    }
}

void add_tile(const AttentionArgs& args, const Span& span, const Block& b, int64_t begin, int64_t n, bool masked) {
    const int64_t columns = padded_columns(args.value_dim);
    load_rows(*span.cache, span.cache->k, args.dim, span.kv_head, begin, n, b.keys, args.dim);
    for (int64_t panel = 0; panel < span.queries; panel += kPanel)
        for (int64_t key = 0; key < n; key += kScoreKeys)  // some of the last few may be left from before: never read
            score_panel(b.keys + key * args.dim, b.queries + panel * args.dim, args.dim,
                        b.scores + key * kQueries + panel);
    for (int64_t m = 0; m < span.queries; m += simd::kLanes) soften_lanes(b, m, n, args.softcap, masked);
    scale_sums(b, span.queries, columns);
    load_rows(*span.cache, span.cache->v, args.value_dim, span.kv_head, begin, n, b.values, columns);
    for (int64_t m = 0; m < span.queries; m += kMixQueries) {
        float* sums = b.sums + m * columns;
        int64_t c = 0;
        for (; c + kMixVectors * simd::kLanes <= columns; c += kMixVectors * simd::kLanes)
            mix_columns<kMixVectors>(b.scores + m, b.values + c, n, columns, sums + c);
        for (; c < columns; c += simd::kLanes) mix_columns<1>(b.scores + m, b.values + c, n, columns, sums + c);
    }
}

void write_results(const AttentionArgs& args, const Span& span, const Block& b) {
    const int64_t group = args.heads / args.kv_heads, columns = padded_columns(args.value_dim);
    for (int64_t m = 0; m < span.queries; m++) {
        const int64_t row = span.segment->row_begin + span.row + m / group, head = span.kv_head * group + m % group;
        const F inverse = simd::set1(1.0f / b.total[m]);
        float* out = args.out + (row * args.heads + head) * args.value_dim;
        simd::over(args.value_dim, [&](int64_t i, int count) {
            simd::store_some(out + i, simd::load_some(b.sums + m * columns + i, count) * inverse, count);
        });
    }
}

void attend_block(const AttentionArgs& args, const Span& span, const Block& b) {
    const int64_t group = args.heads / args.kv_heads, columns = padded_columns(args.value_dim);
    const int64_t last = span.position + span.rows - 1, window = args.window ? args.window : last + 1;
    load_queries(args, span, b);
    std::fill_n(b.top, kQueries, kLowest);
    std::memset(b.total, 0, kQueries * sizeof(float));
    std::memset(b.sums, 0, kQueries * columns * sizeof(float));
    std::memset(b.values, 0, kKeys * columns * sizeof(float));
    const int64_t start = std::max<int64_t>(0, span.position - window + 1);
    for (int64_t begin = start; begin <= last; begin += kKeys) {
        const bool masked = begin + kKeys - 1 > span.position || begin < last - window + 1;
        if (masked)
            for (int64_t m = 0; m < kQueries; m++) {
                const int64_t position = span.position + std::min(m / group, span.rows - 1);
                b.first[m] = float(std::max<int64_t>(position - window + 1 - begin, 0));
                b.last[m] = float(std::min<int64_t>(position - begin, kKeys));
            }
        add_tile(args, span, b, begin, std::min(kKeys, last + 1 - begin), masked);
    }
    write_results(args, span, b);
}

void attend_many(const AttentionArgs& args, const Segment& segment, Team& team) {
    const int64_t group = args.heads / args.kv_heads, per_block = std::max<int64_t>(1, kQueries / group);
    const int64_t blocks = (segment.rows + per_block - 1) / per_block;
    const Block b(args, reinterpret_cast<float*>(team.scratch(Block::floats(args) * sizeof(float))));
    team.loop(blocks * args.kv_heads, 1, [&](int64_t item, int64_t) {
        // The last rows see the most keys: first, so that no thread is left alone with them.
        const int64_t row = (blocks - 1 - item / args.kv_heads) * per_block,
                      rows = std::min(per_block, segment.rows - row);
        const auto* cache = static_cast<const KvView*>(segment.layer_state[args.layer]);
        attend_block(args, {&segment, cache, item % args.kv_heads, row, rows, segment.start_pos + row, rows * group},
                     b);
    });
}

}  // namespace
}  // namespace tandem
