// The router of a mixture of experts: float32 logits, softmax over all experts, the k most probable, weights renormalised.
// Threads share the experts of each row (the matrix is megabytes), then the rows.
#include "ops/share.h"
#include "ops/simd_math.h"

using namespace tandem;

struct RouteArgs {
    const float* x;       // [T, width]
    const float* router;  // [experts, width]
    float* logits;        // [T, experts], overwritten by the probabilities
    int32_t* ids;         // [T, k]
    float* weights;       // [T, k]
    int32_t width, experts, k;
    float scale;
};

namespace {

constexpr float kMinWeightSum = 6.1e-5f;  // smallest normal half: keeps the renormalisation finite
constexpr int kExpertTile = 8;

// R rows times E experts; every product is one chain of vector sums over the width, whatever R and E are.
template <int R, int E>
void products(const RouteArgs& args, int64_t row, int64_t expert) {
    simd::F acc[R][E];
    for (auto& line : acc)
        for (auto& a : line) a = simd::set1(0);
    const int64_t n = args.width;
    const float *x = args.x + row * n, *w = args.router + expert * n;
    simd::over(n, [&](int64_t i, int count) {
        simd::F xs[R];
        for (int r = 0; r < R; r++) xs[r] = simd::load_some(x + r * n + i, count);
        for (int e = 0; e < E; e++) {
            const simd::F we = simd::load_some(w + e * n + i, count);
            for (int r = 0; r < R; r++) acc[r][e] = simd::fma(xs[r], we, acc[r][e]);
        }
    });
    for (int r = 0; r < R; r++)
        for (int e = 0; e < E; e++) args.logits[(row + r) * args.experts + expert + e] = simd::sum(acc[r][e]) * args.scale;
}

template <int E>
void all_rows(const RouteArgs& args, int64_t rows, int64_t expert) {
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) products<4, E>(args, row, expert);
    for (; row + 2 <= rows; row += 2) products<2, E>(args, row, expert);
    if (row < rows) products<1, E>(args, row, expert);
}

void softmax(float* x, int64_t n) {
    float top = x[0];
    for (int64_t i = 1; i < n; i++) top = x[i] > top ? x[i] : top;
    const simd::F shift = simd::set1(top);
    simd::F total = simd::set1(0);
    simd::over(n, [&](int64_t i, int count) { simd::store_some(x + i, simd::exp(simd::load_some(x + i, count) - shift), count); });
    simd::over(n, [&](int64_t i, int count) { total = total + simd::load_some(x + i, count); });
    const simd::F share_of_one = simd::set1(1.0f / simd::sum(total));
    simd::over(n, [&](int64_t i, int count) { simd::store_some(x + i, simd::load_some(x + i, count) * share_of_one, count); });
}

// The k largest of p, ties to the lower index; takes the chosen out of p. With NaN the choice is any k different indices.
void choose(float* p, int64_t n, int k, int32_t* ids, float* weights) {
    float total = 0;
    for (int slot = 0; slot < k; slot++) {
        int64_t best = -1;
        float top = -1;
        for (int64_t i = 0; i < n; i++)
            if (p[i] > top) top = p[i], best = i;
        for (int64_t i = 0; best < 0; i++)
            if (p[i] != -1) best = i, top = p[i];
        p[best] = -1;
        ids[slot] = int32_t(best);
        weights[slot] = top;
        total += top;
    }
    const float divisor = total < kMinWeightSum ? kMinWeightSum : total;
    for (int slot = 0; slot < k; slot++) weights[slot] /= divisor;
}

}  // namespace

TANDEM_OP(route, RouteArgs) {
    team.loop(args.experts, kExpertTile, [&](int64_t begin, int64_t end) {
        int64_t e = begin;
        // Eight chains at once only for few rows: more rows bring their own.
        if (end - begin == kExpertTile && step.rows == 1) return products<1, kExpertTile>(args, 0, begin);
        for (; e + 4 <= end; e += 4) all_rows<4>(args, step.rows, e);
        for (; e < end; e++) all_rows<1>(args, step.rows, e);
    });
    team.barrier();
    const Range rows = share(step.rows, 1, 1, team);
    for (int64_t row = rows.begin; row < rows.end; row++) {
        float* p = args.logits + row * args.experts;
        softmax(p, args.experts);
        choose(p, args.experts, args.k, args.ids + row * args.k, args.weights + row * args.k);
    }
}
