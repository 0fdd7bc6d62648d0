// The gated delta rule row after row, on some value columns of one head. A sweep over the state applies what one row
// did to it, and adds up that row's result and the next row's product with it, so r rows take r + 1 sweeps. Sums go
// over the state's rows in order: bits do not depend on how rows are split into calls.
//
// A tentative call leaves the state as it was, apart from changes pending from an earlier one, which the first sweep
// applies: the changes of its own rows stay with the caller, who applies those that turn out to count.
#pragma once
#include "ops/simd_math.h"

namespace tandem {
namespace {

using simd::F;
using simd::repeat;

constexpr int kColumns = 8 * simd::kLanes;  // most value columns of one call

// What one row does to the state M [dim][dim] of a head: M <- decay M + k change^T.
struct Change {
    const float *k, *change;  // [dim]
    float decay;
};

// One row of one head: what it brings, and where its change and its result go.
struct DeltaRow {
    const float *k, *q;  // [dim], normalised
    const float* v;      // [dim]
    float *change, *out;
    float decay, beta;
};

// The columns that a call works on.
struct Block {
    float* state;  // [dim][stride], from the first of these columns on
    float* copy;   // [dim][kColumns] of scratch, for tentative rows
    int64_t dim, stride, column;
};

// Applies n changes (N of them if N >= 0) to V vectors of columns, or one of `part` lanes: reads `from`, writes `to`
// unless null, and calls use(line, vector, value) in order of lines.
template <int V, int N, class Use>
__attribute__((always_inline)) inline void sweep(const Block& b, const float* from, int64_t from_stride, float* to,
                                                 int64_t to_stride, int part, const Change* changes, int n, Use&& use) {
    const auto load = [&](const float* x) { return V == 1 ? simd::load_some(x, part) : simd::load(x); };
    const auto store = [&](float* x, F value) { simd::store_some(x, value, V == 1 ? part : simd::kLanes); };
    F change[V];
    const F decay = simd::set1(N == 1 ? changes->decay : 0);
    if constexpr (N == 1)
        repeat<V>([&](auto j) { change[j] = load(changes->change + b.column + j * simd::kLanes); });
    for (int64_t i = 0; i < b.dim; i++, from += from_stride, to += to_stride) {
        if constexpr (N < 0) {
            F m[V];
            repeat<V>([&](auto j) { m[j] = load(from + j * simd::kLanes); });
            for (int c = 0; c < n; c++) {
                const F k = simd::set1(changes[c].k[i]), d = simd::set1(changes[c].decay);
                const float* of_row = changes[c].change + b.column;
                repeat<V>([&](auto j) { m[j] = simd::fma(k, load(of_row + j * simd::kLanes), d * m[j]); });
            }
            repeat<V>([&](auto j) {
                store(to + j * simd::kLanes, m[j]);
                use(i, j, m[j]);
            });
        } else {
            const F k = simd::set1(N == 1 ? changes->k[i] : 0);
            repeat<V>([&](auto j) {
                F m = load(from + j * simd::kLanes);
                if constexpr (N == 1) {
                    m = simd::fma(k, change[j], decay * m);
                    if (to) store(to + j * simd::kLanes, m);
                }
                use(i, j, m);
            });
        }
    }
}

// Applies pending changes, then runs n rows.
template <int V>
void run_vectors(const Block& b, int part, const Change* pending, int n_pending, const DeltaRow* rows, int n,
                 bool tentative) {
    const auto load = [&](const float* x) { return V == 1 ? simd::load_some(x, part) : simd::load(x); };
    const auto store = [&](float* x, F value) { simd::store_some(x, value, V == 1 ? part : simd::kLanes); };
    F sums[V], outs[V];
    const auto clear = [](F* x) { repeat<V>([&](auto j) { x[j] = simd::set1(0); }); };
    clear(sums);
    const auto first = [&](int64_t i, auto j, F m) { sums[j] = simd::fma(simd::set1(rows->k[i]), m, sums[j]); };
    if (n_pending) sweep<V, -1>(b, b.state, b.stride, b.state, b.stride, part, pending, n_pending, first);
    else sweep<V, 0>(b, b.state, b.stride, nullptr, 0, part, nullptr, 0, first);
    for (int t = 0; t < n; t++) {
        const DeltaRow& row = rows[t];
        const F decay = simd::set1(row.decay), beta = simd::set1(row.beta);
        repeat<V>([&](auto j) {
            const int64_t at = b.column + j * simd::kLanes;
            store(row.change + at, beta * simd::neg_fma(decay, sums[j], load(row.v + at)));
        });
        clear(sums);
        clear(outs);
        const bool last = t + 1 == n, copied = tentative && t > 0;
        const float* from = copied ? b.copy : b.state;
        float* to = !tentative ? b.state : last ? nullptr : b.copy;
        const int64_t from_stride = copied ? kColumns : b.stride;
        const int64_t to_stride = !tentative ? b.stride : last ? 0 : kColumns;
        const Change change{row.k, row.change, row.decay};
        const float *q = row.q, *next_k = last ? nullptr : rows[t + 1].k;
        if (last)
            sweep<V, 1>(b, from, from_stride, to, to_stride, part, &change, 1,
                        [&](int64_t i, auto j, F m) { outs[j] = simd::fma(simd::set1(q[i]), m, outs[j]); });
        else
            sweep<V, 1>(b, from, from_stride, to, to_stride, part, &change, 1, [&](int64_t i, auto j, F m) {
                outs[j] = simd::fma(simd::set1(q[i]), m, outs[j]);
                sums[j] = simd::fma(simd::set1(next_k[i]), m, sums[j]);
            });
        repeat<V>([&](auto j) { store(row.out + b.column + j * simd::kLanes, outs[j]); });
    }
}

// Calls body(first column, constant number of vectors, lanes of a lone vector) over columns [begin, end).
template <class Body>
void over_vectors(int64_t begin, int64_t end, Body&& body) {
    constexpr int kMost = simd::kLanes == 16 ? 8 : 4;  // what fits the registers
    int64_t c = begin;
    for (; c + kMost * simd::kLanes <= end; c += kMost * simd::kLanes)
        body(c, std::integral_constant<int, kMost>(), simd::kLanes);
    for (; c + 4 * simd::kLanes <= end; c += 4 * simd::kLanes)
        body(c, std::integral_constant<int, 4>(), simd::kLanes);
    for (; c < end; c += simd::kLanes)
        body(c, std::integral_constant<int, 1>(), int(end - c < simd::kLanes ? end - c : simd::kLanes));
}

// Applies changes to columns [begin, end) of a head's state [dim][dim].
void apply_changes(float* state, int64_t dim, int64_t begin, int64_t end, const Change* changes, int n) {
    over_vectors(begin, end, [&](int64_t column, auto vectors, int part) {
        float* at = state + column;
        const Block b{at, nullptr, dim, dim, column};
        sweep<decltype(vectors)::value, -1>(b, at, dim, at, dim, part, changes, n, [](int64_t, auto, F) {});
    });
}

// Runs rows on columns [begin, end), at most kColumns, of a head's state [dim][dim]; copy: [dim][kColumns] of scratch.
void run_columns(float* state, int64_t dim, int64_t begin, int64_t end, const Change* pending, int n_pending,
                 const DeltaRow* rows, int n, float* copy, bool tentative) {
    over_vectors(begin, end, [&](int64_t column, auto vectors, int part) {
        const Block b{state + column, copy, dim, dim, column};
        run_vectors<decltype(vectors)::value>(b, part, pending, n_pending, rows, n, tentative);
    });
}

}  // namespace
}  // namespace tandem
