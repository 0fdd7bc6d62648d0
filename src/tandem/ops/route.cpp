// The router of a mixture of experts: float32 logits, softmax over all experts, the k most probable, weights
// renormalised. Threads share the experts of each row (the matrix is megabytes), then the rows.
#include "ops/share.h"
#include "ops/simd_math.h"

using namespace tandem;
using simd::F;
using simd::repeat;

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
constexpr int64_t kRowBlock = 32;

// R rows times E experts; every product is one chain of vector sums over the width, whatever R and E are.
template <int R, int E>
void products(const RouteArgs& args, int64_t row, int64_t expert) {
    F acc[R][E];
    repeat<R>([&](auto r) { repeat<E>([&](auto e) { acc[r][e] = simd::set1(0); }); });
    const int64_t n = args.width;
    const float *x = args.x + row * n, *w = args.router + expert * n;
    simd::over(n, [&](int64_t i, int count) __attribute__((always_inline)) {
        F xs[R];
        repeat<R>([&](auto r) { xs[r] = simd::load_some(x + r * n + i, count); });
        repeat<E>([&](auto e) {
            const F we = simd::load_some(w + e * n + i, count);
            repeat<R>([&](auto r) { acc[r][e] = simd::fma(xs[r], we, acc[r][e]); });
        });
    });
    repeat<R>([&](auto r) {
        repeat<E>(
            [&](auto e) { args.logits[(row + r) * args.experts + expert + e] = simd::sum(acc[r][e]) * args.scale; });
    });
}

template <int E>
void all_rows(const RouteArgs& args, int64_t row, int64_t end, int64_t expert) {
    for (; row + 4 <= end; row += 4) products<4, E>(args, row, expert);
    for (; row + 2 <= end; row += 2) products<2, E>(args, row, expert);
    if (row < end) products<1, E>(args, row, expert);
}

void expert_tile(const RouteArgs& args, int64_t row, int64_t rows, int64_t expert, int64_t experts) {
    // Eight chains at once only for a single row: more rows bring their own.
    if (rows == 1 && experts == kExpertTile) return products<1, kExpertTile>(args, row, expert);
    for (; experts >= 4; experts -= 4, expert += 4) all_rows<4>(args, row, row + rows, expert);
    for (; experts > 0; experts--, expert++) all_rows<1>(args, row, row + rows, expert);
}

void softmax(float* x, int64_t n) {
    float top = x[0];
    for (int64_t i = 1; i < n; i++) top = x[i] > top ? x[i] : top;
    const simd::F shift = simd::set1(top);
    simd::F total = simd::set1(0);
    simd::over(n, [&](int64_t i, int count) {
        simd::store_some(x + i, simd::exp(simd::load_some(x + i, count) - shift), count);
    });
    simd::over(n, [&](int64_t i, int count) { total = total + simd::load_some(x + i, count); });
    const simd::F share_of_one = simd::set1(1.0f / simd::sum(total));
    simd::over(
        n, [&](int64_t i, int count) { simd::store_some(x + i, simd::load_some(x + i, count) * share_of_one, count); });
}

// The k largest of p, ties to the lower index; takes the chosen out of p. With NaN the choice is any k different
// indices.
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
    // Few rows: threads share the experts, for the matrix is megabytes. Many: blocks of rows, which stay in the second
    // cache.
    const int64_t block = step.rows <= 4 * team.threads ? step.rows : kRowBlock;
    const int64_t expert_items = (args.experts + kExpertTile - 1) / kExpertTile;
    const int64_t grain = block == step.rows ? 1 : expert_items;
    team.loop((step.rows + block - 1) / block * expert_items, grain, [&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; item++) {
            const int64_t row = item / expert_items * block, rows = std::min<int64_t>(block, step.rows - row);
            const int64_t expert = item % expert_items * kExpertTile;
            expert_tile(args, row, rows, expert, std::min<int64_t>(kExpertTile, args.experts - expert));
        }
    });
    team.barrier();
    const Range rows = share(step.rows, 1, 1, team);
    for (int64_t row = rows.begin; row < rows.end; row++) {
        float* p = args.logits + row * args.experts;
        softmax(p, args.experts);
        choose(p, args.experts, args.k, args.ids + row * args.k, args.weights + row * args.k);
    }
}
