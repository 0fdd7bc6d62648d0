// Fixed shares of an op's work: for ops so small that handing out pieces one by one would cost more than they do.
#pragma once
#include <algorithm>
#include <cstdint>

#include "ops/program.h"

namespace tandem {

struct Range {
    int64_t begin, end;
};

// This thread's part of [0, n), in whole grains; `min_share` items or more per thread, so little work stays on few
// threads.
inline Range share(int64_t n, int64_t grain, int64_t min_share, const Team& team) {
    const int64_t grains = (n + grain - 1) / grain;
    const int64_t useful = std::clamp<int64_t>(n / std::max<int64_t>(min_share, 1), 1, team.threads);
    if (team.thread >= useful) return {0, 0};
    const int64_t begin = grains * team.thread / useful * grain, end = grains * (team.thread + 1) / useful * grain;
    return {begin, std::min(end, n)};
}

}  // namespace tandem
