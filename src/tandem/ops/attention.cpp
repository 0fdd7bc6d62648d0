// Causal attention with grouped heads over the cache of each sequence. The step's keys and values are stored first.
//
// Few rows (decode): a row's visible positions are cut into chunks at fixed places; threads share (kv head, chunk);
// each chunk gives its softmax numerator, sum and maximum, combined in chunk order. What a row gets depends on its
// position alone, not on the other rows or the number of threads.
#include <type_traits>

#include "ops/share.h"
#include "ops/simd_math.h"

using namespace tandem;
using simd::F;
using simd::repeat;

struct AttentionArgs {
    const float *q, *k, *v;  // [T, heads * dim], [T, kv_heads * dim], [T, kv_heads * value_dim]
    float* out;              // [T, heads * value_dim]
    float* partial;          // [kRowBatch, heads, kMaxChunks, value_dim + kTotals]
    int32_t layer, heads, kv_heads, dim, value_dim;
    int32_t window;          // 0: none
    float scale, softcap;    // softcap 0: none
};

namespace {

constexpr int kRowBatch = 8;
constexpr int kTotals = 16;      // after the values of a partial result: sum, maximum, and what keeps the rows aligned
constexpr int kMaxChunks = 33;   // 32, and one more where a window begins inside a chunk
constexpr int64_t kMinChunk = 128;
// Register tiles: heads x keys of scores, heads x vectors of value columns.
constexpr int kMaxTileHeads = simd::kLanes == 16 ? 8 : 4;
constexpr int tile_keys(int heads) { return simd::kLanes == 16 && heads <= 4 ? 4 : 2; }
constexpr int tile_vectors(int heads) { return simd::kLanes == 16 && heads <= 4 ? 4 : 2; }
constexpr int64_t kPrefetchBytes = 8192;  // ahead of the row being read: beyond the block of rows that is worked on

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

inline int64_t row_bytes(int type, int64_t dim) { return type == 0 ? 4 * dim : type == 1 ? 2 * dim : dim / 32 * 34; }

// 32 values as one half scale and 32 signed bytes.
void store_q8_0(const float* x, uint8_t* out) {
    float top = 0;
    for (int i = 0; i < 32; i++) top = std::fmax(top, std::fabs(x[i]));
    const float scale = top / 127.0f, inverse = scale > 0 ? 1.0f / scale : 0.0f;
    const uint16_t half = simd::float_to_half(scale);
    std::memcpy(out, &half, 2);
    for (int i = 0; i < 32; i++) out[2 + i] = uint8_t(int8_t(std::nearbyint(x[i] * inverse)));
}

void store_row(const float* x, uint8_t* out, int type, int64_t dim) {
    if (type == 0) {
        std::memcpy(out, x, dim * sizeof(float));
    } else if (type == 1) {
        simd::over(dim, [&](int64_t i, int count) {
            simd::store_some(reinterpret_cast<uint16_t*>(out) + i, simd::load_some(x + i, count), count);
        });
    } else {
        for (int64_t block = 0; block < dim / 32; block++) store_q8_0(x + 32 * block, out + 34 * block);
    }
}

void read_q8_0(const uint8_t* in, float* out, int64_t dim) {
    for (int64_t block = 0; block < dim / 32; block++, in += 34, out += 32) {
        uint16_t half;
        std::memcpy(&half, in, 2);
        const F scale = simd::set1(simd::half_to_float(half));
        for (int i = 0; i < 32; i += simd::kLanes)
            simd::store(out + i, simd::load(reinterpret_cast<const int8_t*>(in + 2 + i)) * scale);
    }
}

void store_rows(const AttentionArgs& args, const Step& step, const Team& team) {
    for (int s = 0; s < step.n_segments; s++) {
        const Segment& segment = step.segments[s];
        const KvView& cache = *static_cast<const KvView*>(segment.layer_state[args.layer]);
        const Range parts = share(int64_t(segment.rows) * args.kv_heads, 1, 8, team);
        const int64_t k_bytes = row_bytes(cache.type, args.dim), v_bytes = row_bytes(cache.type, args.value_dim);
        for (int64_t part = parts.begin; part < parts.end; part++) {
            const int64_t i = part / args.kv_heads, head = part % args.kv_heads, row = segment.row_begin + i;
            const int64_t slot = head * cache.capacity + (segment.start_pos + i) % cache.capacity;
            store_row(args.k + (row * args.kv_heads + head) * args.dim, cache.k + slot * k_bytes, cache.type, args.dim);
            store_row(args.v + (row * args.kv_heads + head) * args.value_dim, cache.v + slot * v_bytes, cache.type,
                      args.value_dim);
        }
    }
}

inline void prefetch(const void* row, int64_t bytes) {
    const char* at = static_cast<const char*>(row) + kPrefetchBytes;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i);
}
// Halves are read from the cache itself; floats nearly always from a small buffer of unpacked rows.
inline void prefetch_rows(const uint16_t* row, int64_t n) { prefetch(row, n * 2); }
inline void prefetch_rows(const float*, int64_t) {}

// scores[h][p] = <q_h, k_p> for H heads and P keys; each product is one chain of vector sums.
template <class T, int H, int P>
void score_tile(const float* q, const T* keys, int64_t dim, float* scores, int64_t stride) {
    constexpr int kSums = (H * P + 3) / 4 * 4;
    F acc[kSums];
    repeat<kSums>([&](auto i) { acc[i] = simd::set1(0); });
    int64_t at = 0;
    for (; at + simd::kLanes <= dim; at += simd::kLanes) {
        F k[P];
        repeat<P>([&](auto p) { k[p] = simd::load(keys + p * dim + at); });
        repeat<H>([&](auto h) {
            const F qh = simd::load(q + h * dim + at);
            repeat<P>([&](auto p) { acc[h * P + p] = simd::fma(qh, k[p], acc[h * P + p]); });
        });
    }
    if (at < dim) {
        repeat<H>([&](auto h) {
            const F qh = simd::load_first(q + h * dim + at, int(dim - at));
            repeat<P>([&](auto p) {
                acc[h * P + p] = simd::fma(qh, simd::load_first(keys + p * dim + at, int(dim - at)), acc[h * P + p]);
            });
        });
    }
    float sums[kSums];
    repeat<kSums / 4>([&](auto i) {
        simd::sum4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3], sums + 4 * i);
    });
    repeat<H>([&](auto h) { std::memcpy(scores + h * stride, sums + h * P, P * sizeof(float)); });
}

template <class T, int H>
void score_heads(const float* q, const T* keys, int64_t n, int64_t dim, float* scores, int64_t stride) {
    constexpr int P = tile_keys(H);
    int64_t p = 0;
    for (; p + P <= n; p += P) {
        prefetch_rows(keys + p * dim, P * dim);
        score_tile<T, H, P>(q, keys + p * dim, dim, scores + p, stride);
    }
    for (; p < n; p++) score_tile<T, H, 1>(q, keys + p * dim, dim, scores + p, stride);
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

// sums[h] += sum over p of weights[h][p] * values[p], in order of p; V vectors of columns, or one of `part` lanes if part.
template <class T, int H, int V>
void mix_tile(const float* weights, int64_t stride, const T* values, int64_t n, int64_t dim, int part, float* sums,
              int64_t sums_stride) {
    F acc[H][V];
    const auto load = [&](const auto* x) { return V == 1 ? simd::load_some(x, part) : simd::load(x); };
    repeat<H>([&](auto h) {
        repeat<V>([&](auto j) { acc[h][j] = load(sums + h * sums_stride + j * simd::kLanes); });
    });
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
void mix_heads(const float* weights, int64_t stride, const T* values, int64_t n, int64_t dim, float* sums, int64_t sums_stride) {
    constexpr int V = tile_vectors(H);
    int64_t c = 0;
    for (; c + V * simd::kLanes <= dim; c += V * simd::kLanes)
        mix_tile<T, H, V>(weights, stride, values + c, n, dim, simd::kLanes, sums + c, sums_stride);
    for (; c < dim; c += simd::kLanes)
        mix_tile<T, H, 1>(weights, stride, values + c, n, dim, int(std::min<int64_t>(simd::kLanes, dim - c)), sums + c, sums_stride);
}

template <class T>
void mix(const float* weights, int64_t stride, int64_t heads, const T* values, int64_t n, int64_t dim, float* sums,
         int64_t sums_stride) {
    over_heads(heads, [&](int64_t h, auto number) {
        mix_heads<T, decltype(number)::value>(weights + h * stride, stride, values, n, dim, sums + h * sums_stride, sums_stride);
    });
}

// Cache rows worked on at a time, by all heads and columns, so that they stay in the first cache.
constexpr int64_t kUnpackRows = 16;
inline int64_t block_rows(int type, int64_t dim) { return type == 8 ? kUnpackRows : std::max<int64_t>(8, 4096 / dim / 8 * 8); }

// Calls body(rows, first position, count) over blocks of the cache rows of positions [begin, end) of one head, in order;
// rows are halves or floats.
template <class Body>
void over_rows(const KvView& cache, const uint8_t* base, int64_t dim, int64_t head, int64_t begin, int64_t end, float* unpacked,
               Body&& body) {
    const int64_t bytes = row_bytes(cache.type, dim), step = block_rows(cache.type, dim);
    while (begin < end) {
        const int64_t slot = begin % cache.capacity, n = std::min(end - begin, cache.capacity - slot);
        const uint8_t* rows = base + (head * cache.capacity + slot) * bytes;
        for (int64_t at = 0; at < n; at += step) {
            const int64_t count = std::min(step, n - at);
            const uint8_t* block = rows + at * bytes;
            if (cache.type == 0) {
                body(reinterpret_cast<const float*>(block), begin + at, count);
            } else if (cache.type == 1) {
                body(reinterpret_cast<const uint16_t*>(block), begin + at, count);
            } else {
                for (int64_t i = 0; i < count; i++) {
                    prefetch(block + i * bytes, bytes);
                    read_q8_0(block + i * bytes, unpacked + i * dim, dim);
                }
                body(static_cast<const float*>(unpacked), begin + at, count);
            }
        }
        begin += n;
    }
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

// One chunk of one row for all query heads of one kv head: into `partial`, or the finished result if it is the only chunk.
void attend_chunk(const AttentionArgs& args, const Row& r, int batch_row, int64_t kv_head, int64_t c, float* scratch) {
    const int64_t group = args.heads / args.kv_heads, head = kv_head * group, dv = args.value_dim;
    const int64_t at = (r.first_chunk() + c) * r.chunk;
    const int64_t begin = std::max(at, r.first), end = std::min(at + r.chunk, r.position + 1), n = end - begin;
    float *unpacked = scratch, *scores = scratch + kUnpackRows * std::max(args.dim, args.value_dim);
    const float* q = args.q + (r.row * args.heads + head) * args.dim;
    over_rows(*r.cache, r.cache->k, args.dim, kv_head, begin, end, unpacked, [&](const auto* keys, int64_t p, int64_t count) {
        score(q, group, keys, count, args.dim, scores + (p - begin), n);
    });
    const bool only = r.num_chunks() == 1;
    const int64_t stride = only ? dv : kMaxChunks * (dv + kTotals);
    float* sums = only ? args.out + (r.row * args.heads + head) * dv
                       : args.partial + ((batch_row * args.heads + head) * kMaxChunks + c) * (dv + kTotals);
    float totals[2];
    for (int64_t h = 0; h < group; h++) {
        soften(scores + h * n, n, args.scale, args.softcap, totals[0], totals[1]);
        if (only) {
            const F inverse = simd::set1(1.0f / totals[0]);
            simd::over(n, [&](int64_t i, int count) {
                simd::store_some(scores + h * n + i, simd::load_some(scores + h * n + i, count) * inverse, count);
            });
        } else {
            std::memcpy(sums + h * stride + dv, totals, sizeof totals);
        }
        std::memset(sums + h * stride, 0, dv * sizeof(float));
    }
    over_rows(*r.cache, r.cache->v, dv, kv_head, begin, end, unpacked, [&](const auto* values, int64_t p, int64_t count) {
        mix(scores + (p - begin), n, group, values, count, dv, sums, stride);
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

void attend_few(const AttentionArgs& args, const Row* rows, int n, Team& team) {
    int64_t chunks = 0, longest = 0;
    for (int i = 0; i < n; i++) {
        chunks = std::max(chunks, rows[i].num_chunks());
        longest = std::max(longest, rows[i].chunk);
    }
    const int64_t group = args.heads / args.kv_heads;
    const int64_t floats = kUnpackRows * std::max(args.dim, args.value_dim) + group * longest;
    float* scratch = reinterpret_cast<float*>(team.scratch(floats * sizeof(float)));
    team.loop(chunks * args.kv_heads, 1, [&](int64_t begin, int64_t) {
        const int64_t c = begin / args.kv_heads, kv_head = begin % args.kv_heads;
        for (int i = 0; i < n; i++)
            if (c < rows[i].num_chunks()) attend_chunk(args, rows[i], i, kv_head, c, scratch);
    });
    if (chunks == 1) return;
    team.barrier();
    const Range parts = share(int64_t(n) * args.heads, 1, 4, team);
    for (int64_t part = parts.begin; part < parts.end; part++) {
        const Row& r = rows[part / args.heads];
        if (r.num_chunks() > 1) combine(args, r, int(part / args.heads), part % args.heads);
    }
}

}  // namespace

TANDEM_OP(attention, AttentionArgs) {
    store_rows(args, step, team);
    team.barrier();
    Row batch[kRowBatch];
    int n = 0;
    for (int s = 0; s < step.n_segments; s++)
        for (int64_t i = 0; i < step.segments[s].rows; i++) {
            batch[n++] = row_of(args, step.segments[s], step.segments[s].row_begin + i);
            const bool last = s == step.n_segments - 1 && i == step.segments[s].rows - 1;
            if (n < kRowBatch && !last) continue;
            attend_few(args, batch, n, team);
            if (!last) team.barrier();
            n = 0;
        }
}
