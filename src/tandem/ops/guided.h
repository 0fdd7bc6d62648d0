// Dynamic sharing in long consecutive runs: a thread that streams weights wants few breaks in its stream.
#pragma once
#include <algorithm>

#include "ops/program.h"

namespace tandem {

// Shares out [0, n): body(begin, end). Each run is a fixed share of what is left, so the last ones are short.
// Counts as one loop of the team (Team::loop).
template <class F>
void guided_loop(Team& team, int64_t n, F&& body) {
    std::atomic<int64_t>& next = team.counter(team.loops++);
    int64_t begin = next.load(std::memory_order_relaxed);
    for (;;) {
        int64_t count;
        do {
            if (begin >= n) return;
            count = std::max<int64_t>(1, (n - begin) * 2 / (3 * team.threads));
        } while (!next.compare_exchange_weak(begin, begin + count, std::memory_order_relaxed));
        body(begin, begin + count);
        begin = next.load(std::memory_order_relaxed);
    }
}

}  // namespace tandem
