// A program is a list of op calls recorded once. Every thread of the pool walks it; ops share out their own work
// and the pool puts a barrier after each op. Rows of a step are contiguous per sequence ("segment").
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#define TANDEM_API __attribute__((visibility("default")))

namespace tandem {

// Consecutive rows of one sequence. layer_state[layer] points to that sequence's KvView or DeltaView. Tentative rows
// leave recurrent state as it is and write half `parity` of its log; the first commit_rows rows of the other half are
// applied before this segment's own.
struct Segment {
    int32_t row_begin;
    int32_t rows;
    int32_t start_pos;  // position of the first row
    int32_t commit_rows;
    void* const* layer_state;
    int32_t tentative;
    int32_t parity;
};

// What one run reads: token ids and positions of each row, and the rows whose logits are wanted.
struct Step {
    int32_t rows;
    int32_t n_segments;
    int32_t n_out;
    int32_t reserved;
    const int32_t* tokens;     // [rows]
    const int32_t* positions;  // [rows]
    const int32_t* out_rows;   // [n_out]
    const Segment* segments;   // [n_segments]
};

// Cache of one attention layer of one sequence. Position p lives in slot p % capacity.
// k: [num_kv_heads][capacity][key_dim], v: [num_kv_heads][capacity][value_dim].
// type 1: IEEE half. type 8: q8_0 blocks (half scale, 32 int8) along the head dimension.
struct KvView {
    uint8_t* k;
    uint8_t* v;
    int64_t capacity;
    int32_t type;
    int32_t reserved;
};

// Recurrent state of one DeltaNet layer of one sequence, and the log of tentative rows.
struct DeltaView {
    float* conv;      // [conv_width - 1][channels], oldest first
    float* state;     // [num_v_heads][key_dim][value_dim]
    float* conv_log;  // [log_rows][channels]: inputs of the convolution
    float* rule_log;  // [2][log_rows][num_v_heads][LogRow of delta.cpp]
    int64_t log_rows;
};

class Pool;

// What one thread knows while it runs an op.
struct Team {
    int thread;
    int threads;
    Pool* pool;
    int loops = 0;  // dynamic loops since the last barrier

    void barrier();
    // This thread's private scratch, 64-byte aligned, at least `bytes` long, contents undefined; one live use at a time.
    uint8_t* scratch(size_t bytes);
    // Shared counter of the current dynamic loop.
    std::atomic<int64_t>& counter(int loop);

    // Shares out [0, n) in pieces of `grain`: body(begin, end). No barrier after it.
    // At most 8 loops may stand between two barriers. All threads must call it with the same arguments.
    template <class F>
    void loop(int64_t n, int64_t grain, F&& body) {
        std::atomic<int64_t>& next = counter(loops++);
        for (int64_t begin; (begin = next.fetch_add(grain, std::memory_order_relaxed)) < n;)
            body(begin, begin + grain < n ? begin + grain : n);
    }
};

using OpFn = void (*)(const void* args, const Step& step, Team& team);

struct Call {
    OpFn fn;
    const void* args;
};

}  // namespace tandem

// Defines the C entry `tandem_op_NAME` and the size of its arguments, which Python checks against its own struct.
#define TANDEM_OP(NAME, ARGS)                                                                                   \
    static void NAME##_run(const ARGS& args, const tandem::Step& step, tandem::Team& team);                     \
    extern "C" TANDEM_API void tandem_op_##NAME(const void* a, const tandem::Step& s, tandem::Team& t) {        \
        NAME##_run(*static_cast<const ARGS*>(a), s, t);                                                         \
    }                                                                                                           \
    extern "C" TANDEM_API int64_t tandem_sizeof_##NAME() { return sizeof(ARGS); }                               \
    static void NAME##_run(const ARGS& args, const tandem::Step& step, tandem::Team& team)
