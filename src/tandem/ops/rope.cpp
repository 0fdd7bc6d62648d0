// Rotary position embedding: a table of turns for the step's rows, computed once, and the rotation of heads by it.
#include "ops/rope.h"
#include "ops/share.h"

using namespace tandem;

struct RopeTableArgs {
    const float* inv_freq;  // [pairs]
    float* table;           // [T, turn_width]; rows as in rope.h
    int32_t pairs, interleaved;
    float magnitude;
    int32_t reserved;
};

TANDEM_OP(rope_table, RopeTableArgs) {
    const int64_t pairs = args.pairs;
    const Range turns = share(step.rows * pairs, 1, 64, team);
    for (int64_t turn = turns.begin; turn < turns.end; turn++) {
        const int64_t row = turn / pairs, pair = turn % pairs;
        // In double: a float product of a position near 10^5 is off by 0.01 rad.
        const double angle = double(step.positions[row]) * double(args.inv_freq[pair]);
        const float c = float(std::cos(angle) * args.magnitude), s = float(std::sin(angle) * args.magnitude);
        if (args.interleaved) {
            float* out = args.table + row * 4 * pairs + 2 * pair;
            out[0] = out[1] = c;
            out[2 * pairs] = -s;
            out[2 * pairs + 1] = s;
        } else {
            float* out = args.table + row * 2 * pairs + pair;
            out[0] = c;
            out[pairs] = s;
        }
    }
}

struct RopeArgs {
    const float* x;      // [T, width]
    const float* table;  // of rope_table
    float* out;
    int32_t width, head_dim, pairs, interleaved;
};

TANDEM_OP(rope, RopeArgs) {
    const int64_t pairs = args.pairs, head_dim = args.head_dim, heads = args.width / head_dim;
    const int64_t table_width = turn_width(pairs, args.interleaved);
    const Range parts = share(step.rows * heads, 1, (4096 + head_dim - 1) / head_dim, team);
    for (int64_t part = parts.begin; part < parts.end; part++) {
        const float *x = args.x + part * head_dim, *turns = args.table + part / heads * table_width;
        rotate_head(x, turns, head_dim, pairs, args.interleaved, args.out + part * head_dim);
    }
}
