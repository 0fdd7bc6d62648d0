// The cache as attention reads and writes it: rows of halves, floats or q8_0 blocks, position p in slot p % capacity.
#pragma once
#include "ops/share.h"
#include "ops/simd_math.h"

namespace tandem {

struct AttentionArgs {
    const float *q, *k, *v;  // [T, heads * dim], [T, kv_heads * dim], [T, kv_heads * value_dim]
    float* out;              // [T, heads * value_dim]
    float* partial;          // [kRowBatch, heads, kMaxChunks, value_dim + kTotals]
    int32_t layer, heads, kv_heads, dim, value_dim;
    int32_t window;          // 0: none
    float scale, softcap;    // softcap 0: none
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

}  // namespace
}  // namespace tandem
