// Attention of few rows (decode): a row's visible positions are cut into chunks at fixed places; threads share
// (kv head, chunk); each chunk gives its softmax numerator, sum and maximum, combined in chunk order. What a row gets
// depends on its position alone, not on the other rows or the number of threads.
#pragma once
#include "ops/attention_cache.h"
#include "ops/dot_tile.h"

namespace tandem {
namespace {

using simd::repeat;

constexpr int kRowBatch = 8;
constexpr int kTotals = 16;     // after the values of a partial result: sum, maximum, and what keeps the rows aligned
constexpr int kMaxChunks = 33;  // 32, and one more where a window begins inside a chunk
constexpr int64_t kMinChunk = 128;
// Register tiles: heads x keys of scores, heads x vectors of value columns.
constexpr int kMaxTileHeads = simd::kLanes == 16 ? 8 : 4;
constexpr int tile_keys(int heads) { return simd::kLanes == 16 && heads <= 4 ? 4 : 2; }
constexpr int tile_vectors(int heads) { return simd::kLanes == 16 && heads <= 4 ? 4 : 2; }

struct Row {
    const Segment* segment;
    const KvView* cache;
    int64_t row, position, first;  // sees positions first..position
    int64_t chunk;                 // positions per chunk

    int64_t first_chunk() const { return first / chunk; }
    int64_t num_chunks() const { return position / chunk - first / chunk + 1; }
};

Row row_of(const AttentionArgs& args, const Segment& segment, int64_t row) {
    Row r{&segment, static_cast<const KvView*>(segment.layer_state[args.layer]), row, 0, 0, 0};
    r.position = segment.start_pos + (row - segment.row_begin);
    r.first = args.window ? std::max<int64_t>(0, r.position - args.window + 1) : 0;
    const int64_t seen = r.position - r.first + 1;
    r.chunk = kMinChunk * ((seen + kMinChunk * (kMaxChunks - 1) - 1) / (kMinChunk * (kMaxChunks - 1)));
    return r;
}

// scores[h][p] = <q_h, k_p>
template <class T, int H>
void score_heads(const float* q, const T* keys, int64_t n, int64_t dim, float* scores, int64_t stride) {
    constexpr int P = tile_keys(H);
    int64_t p = 0;
    for (; p + P <= n; p += P) {
        prefetch_rows(keys + p * dim, P * dim);
        dot_tile<T, H, P>(q, keys + p * dim, dim, scores + p, stride);
    }
    for (; p < n; p++) dot_tile<T, H, 1>(q, keys + p * dim, dim, scores + p, stride);
}

// Calls body(first head, constant number of heads) over all heads.
template <class Body>
void over_heads(int64_t heads, Body&& body) {
    int64_t h = 0;
    if constexpr (kMaxTileHeads == 8)
        for (; h + 8 <= heads; h += 8) body(h, std::integral_constant<int, 8>());
    for (; h + 4 <= heads; h += 4) body(h, std::integral_constant<int, 4>());
    if (heads - h == 3) body(h, std::integral_constant<int, 3>());
    if (heads - h == 2) body(h, std::integral_constant<int, 2>());
    if (heads - h == 1) body(h, std::integral_constant<int, 1>());
}

template <class T>
void score(const float* q, int64_t heads, const T* keys, int64_t n, int64_t dim, float* scores, int64_t stride) {
    over_heads(heads, [&](int64_t h, auto number) {
        score_heads<T, decltype(number)::value>(q + h * dim, keys, n, dim, scores + h * stride, stride);
    });
}

// sums[h] += sum over p of weights[h][p] * values[p], in order of p; V vectors of columns, or one of `part` lanes if
// part.
template <class T, int H, int V>
void mix_tile(const float* weights, int64_t stride, const T* values, int64_t n, int64_t dim, int part, float* sums,
              int64_t sums_stride) {
    F acc[H][V];
    const auto load = [&](const auto* x) { return V == 1 ? simd::load_some(x, part) : simd::load(x); };
    repeat<H>([&](auto h) { repeat<V>([&](auto j) { acc[h][j] = load(sums + h * sums_stride + j * simd::kLanes); }); });
    for (int64_t p = 0; p < n; p++, values += dim) {
        F v[V];
        prefetch_rows(values, V * simd::kLanes);
        repeat<V>([&](auto j) { v[j] = load(values + j * simd::kLanes); });
        repeat<H>([&](auto h) {
            const F w = simd::set1(weights[h * stride + p]);
            repeat<V>([&](auto j) { acc[h][j] = simd::fma(w, v[j], acc[h][j]); });
        });
    }
    repeat<H>([&](auto h) {
        repeat<V>([&](auto j) {
            simd::store_some(sums + h * sums_stride + j * simd::kLanes, acc[h][j], V == 1 ? part : simd::kLanes);
        });
    });
}

template <class T, int H>
void mix_heads(const float* weights, int64_t stride, const T* values, int64_t n, int64_t dim, float* sums,
               int64_t sums_stride) {
    constexpr int V = tile_vectors(H);
    int64_t c = 0;
    for (; c + V * simd::kLanes <= dim; c += V * simd::kLanes)
        mix_tile<T, H, V>(weights, stride, values + c, n, dim, simd::kLanes, sums + c, sums_stride);
    for (; c < dim; c += simd::kLanes)
        mix_tile<T, H, 1>(weights, stride, values + c, n, dim, int(std::min<int64_t>(simd::kLanes, dim - c)), sums + c,
                          sums_stride);
}

template <class T>
void mix(const float* weights, int64_t stride, int64_t heads, const T* values, int64_t n, int64_t dim, float* sums,
         int64_t sums_stride) {
    over_heads(heads, [&](int64_t h, auto number) {
        mix_heads<T, decltype(number)::value>(weights + h * stride, stride, values, n, dim, sums + h * sums_stride,
                                              sums_stride);
    });
}

// scores -> e^(score - max); returns sum and maximum.
void soften(float* scores, int64_t n, float scale, float softcap, float& total, float& top) {
    F high = simd::set1(-INFINITY);
    simd::over(n, [&](int64_t i, int count) {
        F s = simd::load_some(scores + i, count) * simd::set1(scale);
        if (softcap != 0) s = simd::set1(softcap) * simd::tanh(s * simd::set1(1.0f / softcap));
        simd::store_some(scores + i, s, count);
        if (count == simd::kLanes) high = simd::max(s, high);
    });
    top = simd::maximum(high);
    for (int64_t i = n / simd::kLanes * simd::kLanes; i < n; i++) top = scores[i] > top ? scores[i] : top;
    F sum = simd::set1(0);
    const F shift = simd::set1(top);
    simd::over(n, [&](int64_t i, int count) {
        simd::store_some(scores + i, simd::exp(simd::load_some(scores + i, count) - shift), count);
        sum = sum + simd::load_some(scores + i, count);
    });
    total = simd::sum(sum);
}

// One thread's memory while it works on chunks.
struct ChunkScratch {
    float* unpacked;  // [kUnpackRows][wider of dim and value_dim]
    float* head;      // [dim], a key on its way to the cache
    float* q;         // [group][dim], normed and rotated
    float* scores;    // [group][positions of a chunk]

    static int64_t floats(const AttentionArgs& args, int64_t chunk) {
        const int64_t group = args.heads / args.kv_heads;
        return kUnpackRows * std::max(args.dim, args.value_dim) + (1 + group) * args.dim + group * chunk;
    }
    ChunkScratch(const AttentionArgs& args, float* at)
        : unpacked(at),
          head(unpacked + kUnpackRows * std::max(args.dim, args.value_dim)),
          q(head + args.dim),
          scores(q + args.heads / args.kv_heads * args.dim) {}
};

// The part of row r in its chunk c, counted from position 0, for all query heads of one kv head: into `partial`, or the
// finished result if it is the only chunk.
void attend_chunk(const AttentionArgs& args, const Row& r, int batch_row, int64_t kv_head, int64_t c,
                  const ChunkScratch& s) {
    const int64_t group = args.heads / args.kv_heads, head = kv_head * group, dv = args.value_dim;
    const int64_t begin = std::max(c * r.chunk, r.first), end = std::min((c + 1) * r.chunk, r.position + 1),
                  n = end - begin;
    const float* q = args.q + (r.row * args.heads + head) * args.dim;
    if (prepares_q(args)) {
        for (int64_t h = 0; h < group; h++)
            prepare_head(args, q + h * args.dim, args.q_norm, r.row, s.q + h * args.dim);
        q = s.q;
    }
    over_rows(*r.cache, r.cache->k, args.dim, kv_head, begin, end, s.unpacked,
              [&](const auto* keys, int64_t p, int64_t count) {
                  score(q, group, keys, count, args.dim, s.scores + (p - begin), n);
              });
    const bool only = r.num_chunks() == 1;
    const int64_t stride = only ? dv : kMaxChunks * (dv + kTotals), place = c - r.first_chunk();
    float* sums = only ? args.out + (r.row * args.heads + head) * dv
                       : args.partial + ((batch_row * args.heads + head) * kMaxChunks + place) * (dv + kTotals);
    float totals[2];
    for (int64_t h = 0; h < group; h++) {
        float* scores = s.scores + h * n;
        soften(scores, n, args.scale, args.softcap, totals[0], totals[1]);
        if (only) {
            const F inverse = simd::set1(1.0f / totals[0]);
            simd::over(n, [&](int64_t i, int count) {
                simd::store_some(scores + i, simd::load_some(scores + i, count) * inverse, count);
            });
        } else {
            std::memcpy(sums + h * stride + dv, totals, sizeof totals);
        }
        std::memset(sums + h * stride, 0, dv * sizeof(float));
    }
    over_rows(*r.cache, r.cache->v, dv, kv_head, begin, end, s.unpacked,
              [&](const auto* values, int64_t p, int64_t count) {
                  mix(s.scores + (p - begin), n, group, values, count, dv, sums, stride);
              });
}

void combine(const AttentionArgs& args, const Row& r, int batch_row, int64_t head) {
    const int64_t dv = args.value_dim, chunks = r.num_chunks();
    const float* partial = args.partial + (batch_row * args.heads + head) * kMaxChunks * (dv + kTotals);
    float top = -INFINITY, total = 0, factors[kMaxChunks];
    for (int64_t c = 0; c < chunks; c++) top = std::fmax(top, partial[c * (dv + kTotals) + dv + 1]);
    for (int64_t c = 0; c < chunks; c++) {
        factors[c] = std::exp(partial[c * (dv + kTotals) + dv + 1] - top);
        total += factors[c] * partial[c * (dv + kTotals) + dv];
    }
    for (int64_t c = 0; c < chunks; c++) factors[c] /= total;
    float* out = args.out + (r.row * args.heads + head) * dv;
    simd::over(dv, [&](int64_t i, int count) {
        F sum = simd::set1(0);
        for (int64_t c = 0; c < chunks; c++)
            sum = simd::fma(simd::set1(factors[c]), simd::load_some(partial + c * (dv + kTotals) + i, count), sum);
        simd::store_some(out + i, sum, count);
    });
}

// Whether every row's key lands in the same chunk for all rows that read it: then whoever works on the chunk stores it.
bool same_chunks(const Row* rows, int n) {
    for (int i = 1; i < n; i++)
        if (rows[i].chunk != rows[0].chunk) return false;
    return true;
}

// Stores the keys and values of these rows, at most kRowBatch, and attends.
void attend_few(const AttentionArgs& args, const Row* rows, int n, Team& team) {
    int64_t begin = INT64_MAX, end = 0, longest = 0;
    for (int i = 0; i < n; i++) {
        begin = std::min(begin, rows[i].first_chunk());
        end = std::max(end, rows[i].first_chunk() + rows[i].num_chunks());
        longest = std::max(longest, rows[i].chunk);
    }
    const ChunkScratch s(args,
                         reinterpret_cast<float*>(team.scratch(ChunkScratch::floats(args, longest) * sizeof(float))));
    const bool store_in_chunk = same_chunks(rows, n);
    const auto store = [&](const Row& r, int64_t kv_head) {
        store_head(args, *r.segment, r.row - r.segment->row_begin, kv_head, s.head);
    };
    if (!store_in_chunk) {
        const Range parts = share(n * args.kv_heads, 1, 8, team);
        for (int64_t part = parts.begin; part < parts.end; part++)
            store(rows[part / args.kv_heads], part % args.kv_heads);
        team.barrier();
    }
    team.loop((end - begin) * args.kv_heads, 1, [&](int64_t item, int64_t) {
        const int64_t c = begin + item / args.kv_heads, kv_head = item % args.kv_heads;
        for (int i = 0; store_in_chunk && i < n; i++)
            if (rows[i].position / rows[i].chunk == c) store(rows[i], kv_head);
        for (int i = 0; i < n; i++)
            if (rows[i].first_chunk() <= c && c <= rows[i].position / rows[i].chunk)
                attend_chunk(args, rows[i], i, kv_head, c, s);
    });
    bool pieces = false;
    for (int i = 0; i < n; i++) pieces |= rows[i].num_chunks() > 1;
    if (!pieces) return;
    team.barrier();
    const Range parts = share(int64_t(n) * args.heads, 1, 4, team);
    for (int64_t part = parts.begin; part < parts.end; part++) {
        const Row& r = rows[part / args.heads];
        if (r.num_chunks() > 1) combine(args, r, int(part / args.heads), part % args.heads);
    }
}

}  // namespace
}  // namespace tandem
