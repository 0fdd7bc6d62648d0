// The cache as attention reads and writes it: rows of halves, floats or q8_0 blocks, position p in slot p % capacity.
#pragma once
#include "ops/norm.h"
#include "ops/rope.h"
#include "ops/share.h"

namespace tandem {

struct AttentionArgs {
    const float *q, *k, *v;        // [T, heads * dim], [T, kv_heads * dim], [T, kv_heads * value_dim]
    float* out;                    // [T, heads * value_dim]
    float* partial;                // [kRowBatch, heads, kMaxChunks, value_dim + kTotals]
    const float* turns;            // table of rope.h by which heads of q and k are rotated first, or null
    const float *q_norm, *k_norm;  // [dim] weights of the RMS norm that they get before, or null
    int32_t layer, heads, kv_heads, dim, value_dim;
    int32_t window;              // 0: none
    float scale, softcap;        // softcap 0: none
    int32_t pairs, interleaved;  // of the rotation
    float eps;                   // of the norms
    int32_t reserved;
};

namespace {

using simd::F;

constexpr int64_t kPrefetchBytes = 8192;  // ahead of the row being read: beyond the block of rows that is worked on

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

inline bool prepares_q(const AttentionArgs& args) { return args.turns || args.q_norm; }

// A head of q or k of that row as attention uses it: normed and rotated into out, or x itself if there is nothing to
// do.
const float* prepare_head(const AttentionArgs& args, const float* x, const float* norm, int64_t row, float* out) {
    if (norm) rms_normalise(x, norm, args.dim, args.eps, out);
    if (!args.turns) return norm ? out : x;
    const float* turns = args.turns + row * turn_width(args.pairs, args.interleaved);
    rotate_head(norm ? out : x, turns, args.dim, args.pairs, args.interleaved, out);
    return out;
}

// Key and value of one head of row i of the segment into the cache; scratch [dim].
void store_head(const AttentionArgs& args, const Segment& segment, int64_t i, int64_t head, float* scratch) {
    const KvView& cache = *static_cast<const KvView*>(segment.layer_state[args.layer]);
    const int64_t row = segment.row_begin + i, slot = head * cache.capacity + (segment.start_pos + i) % cache.capacity;
    const float* k = prepare_head(args, args.k + (row * args.kv_heads + head) * args.dim, args.k_norm, row, scratch);
    const float* v = args.v + (row * args.kv_heads + head) * args.value_dim;
    store_row(k, cache.k + slot * row_bytes(cache.type, args.dim), cache.type, args.dim);
    store_row(v, cache.v + slot * row_bytes(cache.type, args.value_dim), cache.type, args.value_dim);
}

void store_segment(const AttentionArgs& args, const Segment& segment, Team& team) {
    const Range parts = share(int64_t(segment.rows) * args.kv_heads, 1, 8, team);
    float* scratch = reinterpret_cast<float*>(team.scratch(args.dim * sizeof(float)));
    for (int64_t part = parts.begin; part < parts.end; part++)
        store_head(args, segment, part / args.kv_heads, part % args.kv_heads, scratch);
}

inline void prefetch(const void* row, int64_t bytes) {
    const char* at = static_cast<const char*>(row) + kPrefetchBytes;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i);
}
// Halves are read from the cache itself; floats nearly always from a small buffer of unpacked rows.
inline void prefetch_rows(const uint16_t* row, int64_t n) { prefetch(row, n * 2); }
inline void prefetch_rows(const float*, int64_t) {}

// Cache rows worked on at a time, by all heads and columns, so that they stay in the first cache.
constexpr int64_t kUnpackRows = 16;
inline int64_t block_rows(int type, int64_t dim) {
    return type == 8 ? kUnpackRows : std::max<int64_t>(8, 4096 / dim / 8 * 8);
}

// Calls body(rows, first position, count) over blocks of the cache rows of positions [begin, end) of one head, in
// order; rows are halves or floats.
template <class Body>
void over_rows(const KvView& cache, const uint8_t* base, int64_t dim, int64_t head, int64_t begin, int64_t end,
               float* unpacked, Body&& body) {
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

}  // namespace
}  // namespace tandem
