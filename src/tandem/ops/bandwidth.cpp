// Reads a block of memory once with all threads and sums it: what RAM can deliver, the ceiling of decode.
#include "program.h"

struct ReadArgs {
    const uint64_t* data;
    uint64_t* sums;  // [threads], so that the reads are used
    int64_t size_bytes;
};

// Long runs and a page of prefetch, as the matrix products read: with short pieces the hardware prefetcher falls behind.
TANDEM_OP(read_bytes, ReadArgs) {
    constexpr int64_t kLine = 64, kRun = 256, kPrefetchBytes = 4096;
    const int64_t share = args.size_bytes / team.threads / kRun * kRun;
    const int64_t begin = team.thread * share;
    const int64_t end = team.thread == team.threads - 1 ? args.size_bytes : begin + share;
    uint64_t lanes[kRun / 8] = {};
    int64_t at = begin;
    for (; at + kRun <= end; at += kRun) {
        const uint64_t* data = args.data + at / 8;
        for (int64_t line = 0; line < kRun; line += kLine) __builtin_prefetch((const char*)data + kPrefetchBytes + line);
        for (int64_t lane = 0; lane < kRun / 8; lane++) lanes[lane] += data[lane];
    }
    uint64_t total = 0;
    for (; at < end; at += 8) total += args.data[at / 8];
    for (uint64_t lane : lanes) total += lane;
    args.sums[team.thread] = total;
}
