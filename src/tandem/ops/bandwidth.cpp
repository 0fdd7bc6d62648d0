// Reads a block of memory once with all threads and sums it: what RAM can deliver, the ceiling of decode.
#include "program.h"

struct ReadArgs {
    const uint64_t* data;
    uint64_t* sums;  // [threads], so that the reads are used
    int64_t size_bytes;
};

TANDEM_OP(read_bytes, ReadArgs) {
    constexpr int64_t kGrain = 1 << 20;
    uint64_t total = 0;
    team.loop(args.size_bytes, kGrain, [&](int64_t begin, int64_t end) {
        const uint64_t* data = args.data + begin / 8;
        const int64_t n = (end - begin) / 8;
        uint64_t lanes[32] = {};
        for (int64_t i = 0; i + 32 <= n; i += 32)
            for (int lane = 0; lane < 32; lane++) lanes[lane] += data[i + lane];
        for (uint64_t lane : lanes) total += lane;
    });
    args.sums[team.thread] = total;
}
