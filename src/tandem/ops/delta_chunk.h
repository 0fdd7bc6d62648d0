// The gated delta rule over a chunk of rows of one head by matrix products, for prefill: the state is read and written
// once a chunk. Equal to the recurrence up to rounding.
//
// With G the running sum of log decays in the chunk and M the state before it, the changes D of the state solve
//   D_i = beta_i (v_i - e^G_i M^T k_i) - sum over j < i of beta_i <k_i, k_j> e^(G_i - G_j) D_j
// and  y_i = e^G_i M^T q_i + sum over j <= i of <q_i, k_j> e^(G_i - G_j) D_j,  M <- e^G_last M + sum of e^(G_last -
// G_i) k_i D_i^T.
#pragma once
#include "ops/dot_tile.h"

namespace tandem {
namespace {

using simd::F;
using simd::repeat;

constexpr int kChunk = 16;
constexpr int kTileRows = 4, kTileVectors = simd::kLanes == 16 ? 4 : 2;

// Rows of one chunk for one head; all arrays of one thread. dim is a multiple of simd::kLanes.
struct DeltaChunk {
    float *k, *q;                     // [kChunk][dim], normalised, k before q
    float* late_k;                    // [kChunk][dim], k_i e^(G_last - G_i)
    float* products;                  // [2 * kChunk][dim], M^T k_i, then M^T q_i
    float* changes;                   // [kChunk][dim]
    float *kk, *qk;                   // [kChunk][kChunk], products with k_j, times decays
    float *log_decay, *decay, *beta;  // [kChunk]; the first two summed up from the chunk's start

    static int64_t floats(int64_t dim) { return 6 * kChunk * dim + 2 * kChunk * kChunk + 3 * kChunk; }
    DeltaChunk(int64_t dim, float* at) {
        const auto take = [&](int64_t n) { return at += n, at - n; };
        k = take(kChunk * dim), q = take(kChunk * dim), late_k = take(kChunk * dim), products = take(2 * kChunk * dim);
        changes = take(kChunk * dim), kk = take(kChunk * kChunk), qk = take(kChunk * kChunk);
        log_decay = take(kChunk), decay = take(kChunk), beta = take(kChunk);
    }
};

// kTileRows rows of out = rows times the state, on V vectors of columns.
template <int V>
void multiply_state(const float* rows, const float* state, int64_t dim, float* out) {
    F acc[kTileRows][V];
    repeat<kTileRows>([&](auto i) { repeat<V>([&](auto j) { acc[i][j] = simd::set1(0); }); });
    for (int64_t d = 0; d < dim; d++, state += dim) {
        F m[V];
        repeat<V>([&](auto j) { m[j] = simd::load(state + j * simd::kLanes); });
        repeat<kTileRows>([&](auto i) {
            const F x = simd::set1(rows[i * dim + d]);
            repeat<V>([&](auto j) { acc[i][j] = simd::fma(x, m[j], acc[i][j]); });
        });
    }
    repeat<kTileRows>(
        [&](auto i) { repeat<V>([&](auto j) { simd::store(out + i * dim + j * simd::kLanes, acc[i][j]); }); });
}

// kTileRows rows of the state, on V vectors of columns.
template <int V>
void update_state(const float* late_k, const float* changes, int64_t dim, F decay, float* state) {
    F acc[kTileRows][V];
    repeat<kTileRows>([&](auto i) {
        repeat<V>([&](auto j) { acc[i][j] = decay * simd::load(state + i * dim + j * simd::kLanes); });
    });
    for (int row = 0; row < kChunk; row++, late_k += dim, changes += dim) {
        F c[V];
        repeat<V>([&](auto j) { c[j] = simd::load(changes + j * simd::kLanes); });
        repeat<kTileRows>([&](auto i) {
            const F k = simd::set1(late_k[i]);
            repeat<V>([&](auto j) { acc[i][j] = simd::fma(k, c[j], acc[i][j]); });
        });
    }
    repeat<kTileRows>(
        [&](auto i) { repeat<V>([&](auto j) { simd::store(state + i * dim + j * simd::kLanes, acc[i][j]); }); });
}

// Calls body(first column, constant number of vectors) over all columns.
template <class Body>
void over_columns(int64_t dim, Body&& body) {
    int64_t c = 0;
    for (; c + kTileVectors * simd::kLanes <= dim; c += kTileVectors * simd::kLanes)
        body(c, std::integral_constant<int, kTileVectors>());
    for (; c < dim; c += simd::kLanes) body(c, std::integral_constant<int, 1>());
}

// kk and qk of the chunk times the decays between their rows; 0 above the diagonal.
void weigh_pairs(const DeltaChunk& c, int64_t dim) {
    for (int i = 0; i < kChunk; i += 4)
        for (int j = 0; j <= i; j += 4) {
            dot_tile<float, 4, 4>(c.k + i * dim, c.k + j * dim, dim, c.kk + i * kChunk + j, kChunk);
            dot_tile<float, 4, 4>(c.q + i * dim, c.k + j * dim, dim, c.qk + i * kChunk + j, kChunk);
        }
    for (int i = 0; i < kChunk; i++)
        for (int j = 0; j <= i; j += simd::kLanes) {
            // Lanes past the diagonal may overflow and are never read.
            const F between = simd::exp(simd::set1(c.log_decay[i]) - simd::load(c.log_decay + j));
            float *kk = c.kk + i * kChunk + j, *qk = c.qk + i * kChunk + j;
            simd::store(kk, simd::set1(c.beta[i]) * simd::load(kk) * between);
            simd::store(qk, simd::load(qk) * between);
        }
}

// The changes, row after row, and the results, on V vectors of columns.
template <int V>
void solve(const DeltaChunk& c, int64_t dim, const float* v, int64_t v_stride, float* out, int64_t out_stride,
           int64_t column) {
    const float *k_products = c.products + column, *q_products = k_products + kChunk * dim;
    float* changes = c.changes + column;
    for (int i = 0; i < kChunk; i++, v += v_stride, out += out_stride) {
        const float *kk = c.kk + i * kChunk, *qk = c.qk + i * kChunk;
        const F decay = simd::set1(c.decay[i]), beta = simd::set1(c.beta[i]), last = simd::set1(qk[i]);
        F change[V], y[V];
        repeat<V>([&](auto l) {
            const F expected = decay * simd::load(k_products + i * dim + l * simd::kLanes);
            change[l] = beta * (simd::load(v + column + l * simd::kLanes) - expected);
            y[l] = decay * simd::load(q_products + i * dim + l * simd::kLanes);
        });
        for (int j = 0; j < i; j++) {
            const F kkj = simd::set1(kk[j]), qkj = simd::set1(qk[j]);
            repeat<V>([&](auto l) {
                const F earlier = simd::load(changes + j * dim + l * simd::kLanes);
                change[l] = simd::neg_fma(kkj, earlier, change[l]);
                y[l] = simd::fma(qkj, earlier, y[l]);
            });
        }
        repeat<V>([&](auto l) {
            simd::store(changes + i * dim + l * simd::kLanes, change[l]);
            simd::store(out + column + l * simd::kLanes, simd::fma(last, change[l], y[l]));
        });
    }
}

// One chunk: v and out are rows of [.., dim] with the given strides. c has k, q, log_decay (summed), decay, beta.
void advance_chunk(const DeltaChunk& c, int64_t dim, const float* v, int64_t v_stride, float* out, int64_t out_stride,
                   float* state) {
    over_columns(dim, [&](int64_t column, auto vectors) {
        for (int row = 0; row < 2 * kChunk; row += kTileRows)
            multiply_state<decltype(vectors)::value>(c.k + row * dim, state + column, dim,
                                                     c.products + row * dim + column);
    });
    weigh_pairs(c, dim);
    over_columns(dim, [&](int64_t column, auto vectors) {
        solve<decltype(vectors)::value>(c, dim, v, v_stride, out, out_stride, column);
    });
    for (int i = 0; i < kChunk; i++) {
        const F left = simd::exp(simd::set1(c.log_decay[kChunk - 1] - c.log_decay[i]));
        for (int64_t at = 0; at < dim; at += simd::kLanes)
            simd::store(c.late_k + i * dim + at, simd::load(c.k + i * dim + at) * left);
    }
    const F decay = simd::set1(c.decay[kChunk - 1]);
    over_columns(dim, [&](int64_t column, auto vectors) {
        for (int64_t row = 0; row < dim; row += kTileRows)
            update_state<decltype(vectors)::value>(c.late_k + row, c.changes + column, dim, decay,
                                                   state + row * dim + column);
    });
}

}  // namespace
}  // namespace tandem
