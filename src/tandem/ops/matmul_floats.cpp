// Products with F32, F16 and BF16 weights: float activations, lanes along K, tiles of 4 x 4 results.
#include "ops/matmul_kernels.h"

namespace tandem {

namespace {

struct F32Row {
    static constexpr int bytes = 4;
    static Vec load(const uint8_t* p) { return Vec::load((const float*)p); }
    static Vec load(const uint8_t* p, int n) { return Vec::load((const float*)p, n); }
};
struct F16Row {
    static constexpr int bytes = 2;
    static Vec load(const uint8_t* p) { return Vec::load_half((const uint16_t*)p); }
    static Vec load(const uint8_t* p, int n) { return Vec::load_half((const uint16_t*)p, n); }
};
struct BF16Row {
    static constexpr int bytes = 2;
    static Vec load(const uint8_t* p) { return Vec::load_bf16((const uint16_t*)p); }
    static Vec load(const uint8_t* p, int n) { return Vec::load_bf16((const uint16_t*)p, n); }
};

// Every result has its own accumulator and adds along K in order, so it does not depend on the tile it is in.
template <class Row, int N, int R>
void tile(const uint8_t* w, int64_t stride, int64_t cols, const float* const* x, float* out, int64_t ld) {
    Vec sum[N][R];
    for (int i = 0; i < N; i++)
        for (int r = 0; r < R; r++) sum[i][r] = Vec::set(0);
    int64_t k = 0;
    for (; k + Vec::lanes <= cols; k += Vec::lanes) {
        Vec a[R];
        for (int r = 0; r < R; r++) a[r] = Vec::load(x[r] + k);
        for (int i = 0; i < N; i++) {
            // The same place in the rows of the next tile: short streams are over before the hardware sees them.
            if (k * Row::bytes % 64 == 0) __builtin_prefetch(w + (N + i) * stride + k * Row::bytes);
            const Vec b = Row::load(w + i * stride + k * Row::bytes);
            for (int r = 0; r < R; r++) sum[i][r] = fma(a[r], b, sum[i][r]);
        }
    }
    if (const int rest = int(cols - k))
        for (int i = 0; i < N; i++) {
            const Vec b = Row::load(w + i * stride + k * Row::bytes, rest);
            for (int r = 0; r < R; r++) sum[i][r] = fma(Vec::load(x[r] + k, rest), b, sum[i][r]);
        }
    for (int i = 0; i < N; i++)
        for (int r = 0; r < R; r++) out[r * ld + i] = sum[i][r].sum();
}

template <class Row, int N>
void strip(const uint8_t* w, int64_t stride, int64_t cols, const float* const* x, int64_t n_acts, float* out,
           int64_t ld) {
    for (; n_acts >= 4; n_acts -= 4, x += 4, out += 4 * ld) tile<Row, N, 4>(w, stride, cols, x, out, ld);
    if (n_acts == 3) tile<Row, N, 3>(w, stride, cols, x, out, ld);
    if (n_acts == 2) tile<Row, N, 2>(w, stride, cols, x, out, ld);
    if (n_acts == 1) tile<Row, N, 1>(w, stride, cols, x, out, ld);
}

template <class Row>
void rows(const uint8_t* w, int64_t stride, int64_t n, int64_t cols, const float* const* x, int64_t n_acts, float* out,
          int64_t ld) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) strip<Row, 4>(w + i * stride, stride, cols, x, n_acts, out + i, ld);
    for (; i < n; i++) strip<Row, 1>(w + i * stride, stride, cols, x, n_acts, out + i, ld);
}

template <class Row>
void unpack(const uint8_t* p, int64_t cols, float* out) {
    int64_t k = 0;
    for (; k + Vec::lanes <= cols; k += Vec::lanes) Row::load(p + k * Row::bytes).store(out + k);
    if (const int rest = int(cols - k)) Row::load(p + k * Row::bytes, rest).store(out + k, rest);
}

}  // namespace

void float_rows(int32_t type, const uint8_t* w, int64_t stride, int64_t n, int64_t cols, const float* const* x,
                int64_t n_acts, float* out, int64_t ld) {
    if (type == 0) rows<F32Row>(w, stride, n, cols, x, n_acts, out, ld);
    else if (type == 1) rows<F16Row>(w, stride, n, cols, x, n_acts, out, ld);
    else rows<BF16Row>(w, stride, n, cols, x, n_acts, out, ld);
}

void unpack_floats(int32_t type, const uint8_t* blocks, int64_t cols, float* out) {
    if (type == 0) unpack<F32Row>(blocks, cols, out);
    else if (type == 1) unpack<F16Row>(blocks, cols, out);
    else unpack<BF16Row>(blocks, cols, out);
}

}  // namespace tandem
