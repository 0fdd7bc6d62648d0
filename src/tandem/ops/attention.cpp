// Causal attention with grouped heads over the cache of each sequence. The step's keys and values
// are stored on the way, and q and k normed and rotated first where asked for.
// Sequences with few rows and with many take different ways; the first is bit-equal for any split of its rows.
#include "ops/attention_few.h"
#include "ops/attention_many.h"

using namespace tandem;

TANDEM_OP(attention, AttentionArgs) {
    const auto many = [&](const Segment& segment) {
        return segment.rows > kRowBatch && args.heads / args.kv_heads <= kQueries;
    };
    bool any = false;
    for (int s = 0; s < step.n_segments; s++)
        if (many(step.segments[s])) store_segment(args, step.segments[s], team), any = true;
    if (any) team.barrier();
    Row batch[kRowBatch];
    int n = 0;
    for (int s = 0; s < step.n_segments; s++) {
        const Segment& segment = step.segments[s];
        if (many(segment)) {
            attend_many(args, segment, team);
            team.barrier();
            continue;
        }
        for (int64_t i = 0; i < segment.rows; i++) {
            batch[n++] = row_of(args, segment, segment.row_begin + i);
            if (n < kRowBatch) continue;
            attend_few(args, batch, n, team);
            team.barrier();
            n = 0;
        }
    }
    if (n) attend_few(args, batch, n, team);
}
