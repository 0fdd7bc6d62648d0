// Mixture of experts: each distinct expert of the batch is read once for all rows that chose it.
//
// First part: gate, up and activation of (expert, piece of its inner rows); the results are rounded on the spot.
// Second part: pieces of output columns over all experts; each row's sum runs in routing order.
// Rows that chose an expert are contiguous "slots"; a pair is (row, choice) = row * k + choice.
#include <algorithm>

#include "ops/guided.h"
#include "ops/matmul.h"
#include "ops/program.h"

namespace tandem {

namespace {

constexpr int64_t kFewPerExpert = 4;       // up to here the dot product beats unpacking panels
constexpr int64_t kScratchFloats = 32768;  // of one array of products
constexpr int64_t kMostAtOnce = 512;       // columns of one piece

// Mirror of ExpertsArgs in experts_cpu.py.
struct ExpertsArgs {
    const float* x;
    const int32_t* ids;    // [rows][k]
    const float* weights;  // [rows][k]
    float* out;            // [rows][hidden]
    float* inner;          // [rows * k][expert_size], used only when down is a float type
    uint8_t* acts;         // [rows] records of x
    uint8_t* inner_acts;   // [rows * k] records, by slot
    Weight gate, up, down;
    int64_t num_experts;
    int32_t k;
    int32_t activation;
};

int64_t align64(int64_t n) { return (n + 63) / 64 * 64; }

// Carves arrays out of a thread's scratch.
struct Carver {
    uint8_t* at = nullptr;
    int64_t used = 0;
    template <class T>
    T* take(int64_t n) {
        T* here = (T*)(at + used);
        used += align64(n * int64_t(sizeof(T)));
        return here;
    }
};

// Everything a thread needs beside the arguments. Each thread works out the same slots for itself.
struct Work {
    int32_t* first;    // [num_experts + 1] first slot of each expert
    int32_t* pair_of;  // [pairs] pair of each slot
    int32_t* slot_of;  // [pairs] slot of each pair
    int32_t* used;     // experts that some row chose
    int32_t n_used;
    const uint8_t** records;  // [pairs] input record of each slot, then
    const float** floats;
    uint8_t* own_acts;
    int64_t inner_ld, outer_ld;  // most columns of a piece of either part
    float* gate;                 // [rows][inner_ld]
    float* up;
    float* sums;  // [pairs][outer_ld]
    uint8_t* panel;

    int64_t carve(Carver carver, const ExpertsArgs& args, int64_t rows) {
        const int64_t pairs = rows * args.k;
        first = carver.take<int32_t>(args.num_experts + 1);
        pair_of = carver.take<int32_t>(pairs);
        slot_of = carver.take<int32_t>(pairs);
        used = carver.take<int32_t>(std::min(pairs, args.num_experts));
        records = carver.take<const uint8_t*>(pairs);
        floats = carver.take<const float*>(pairs);
        own_acts = carver.take<uint8_t>(rows <= kDotRows ? rows * ActLayout(args.gate.cols).bytes : 0);
        inner_ld = rows <= kDotRows ? most_columns(rows) : kPanel;
        outer_ld = rows <= kDotRows ? most_columns(pairs) : kPanel;
        gate = carver.take<float>(rows * inner_ld);
        up = carver.take<float>(rows * inner_ld);
        sums = carver.take<float>(pairs * outer_ld);
        panel = carver.take<uint8_t>(int64_t(panel_scratch_bytes()));
        return carver.used;
    }

    static int64_t most_columns(int64_t rows) {
        return std::clamp(kScratchFloats / rows / kPanel * kPanel, kPanel, kMostAtOnce);
    }

    void sort_pairs(const ExpertsArgs& args, int64_t rows) {
        const int64_t pairs = rows * args.k;
        std::fill(first, first + args.num_experts + 1, 0);
        for (int64_t p = 0; p < pairs; p++) first[args.ids[p] + 1]++;
        n_used = 0;
        for (int64_t e = 0; e < args.num_experts; e++) {
            if (first[e + 1]) used[n_used++] = int32_t(e);
            first[e + 1] += first[e];
        }
        for (int64_t p = 0; p < pairs; p++) {
            const int32_t slot = first[args.ids[p]]++;
            slot_of[p] = slot;
            pair_of[slot] = int32_t(p);
        }
        for (int64_t e = args.num_experts; e > 0; e--) first[e] = first[e - 1];
        first[0] = 0;
    }

    Acts acts_of(int32_t expert) const {
        return {records + first[expert], floats + first[expert], first[expert + 1] - first[expert]};
    }
};

// out [acts.n][ld]. Up to kDotRows rows in the batch, always the path whose results do not depend on the others.
void multiply(const Weight& w, int32_t expert, int64_t begin, int64_t end, const Acts& acts, bool few, float* out,
              int64_t ld, uint8_t* panel) {
    if (few || acts.n <= kFewPerExpert) dot_rows(w, expert, begin, end, acts, out, ld);
    else panel_rows(w, expert, begin, end, acts, out, panel);
}

void gate_up_piece(const ExpertsArgs& args, const Work& work, int32_t expert, int64_t begin, int64_t end, bool few) {
    const int64_t size = args.gate.rows, record_bytes = ActLayout(size).bytes;
    const Acts acts = work.acts_of(expert);
    multiply(args.gate, expert, begin, end, acts, few, work.gate, work.inner_ld, work.panel);
    multiply(args.up, expert, begin, end, acts, few, work.up, work.inner_ld, work.panel);
    for (int64_t r = 0; r < acts.n; r++) {
        const int64_t slot = work.first[expert] + r;
        float* values = work.gate + r * work.inner_ld;
        activate(args.activation, values, work.up + r * work.inner_ld, end - begin);
        if (is_float_type(args.down.type)) std::copy(values, values + end - begin, args.inner + slot * size + begin);
        else quantize_part(values, size, begin, end, args.inner_acts + slot * record_bytes);
    }
}

void down_piece(const ExpertsArgs& args, const Work& work, int64_t rows, int64_t begin, int64_t end, bool few) {
    for (int32_t i = 0; i < work.n_used; i++) {
        const int32_t expert = work.used[i];
        float* sums = work.sums + work.first[expert] * work.outer_ld;
        multiply(args.down, expert, begin, end, work.acts_of(expert), few, sums, work.outer_ld, work.panel);
    }
    const int64_t n = end - begin;
    for (int64_t row = 0; row < rows; row++) {
        float* total = args.out + row * args.down.rows + begin;
        std::fill(total, total + n, 0.0f);
        for (int64_t p = row * args.k; p < (row + 1) * args.k; p++) {
            const float* part = work.sums + work.slot_of[p] * work.outer_ld;
            for (int64_t i = 0; i < n; i++) total[i] += args.weights[p] * part[i];
        }
    }
}

// Rounds the rows of x: each thread for itself, or all together behind a barrier.
void round_input(const ExpertsArgs& args, Work& work, int64_t rows, Team& team) {
    const int64_t cols = args.gate.cols, record_bytes = ActLayout(cols).bytes;
    const bool few = rows <= kDotRows;
    uint8_t* acts = few ? work.own_acts : args.acts;
    if (!is_float_type(args.gate.type) || !is_float_type(args.up.type)) {
        auto round = [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; r++) quantize_row(args.x + r * cols, cols, acts + r * record_bytes);
        };
        if (few) round(0, rows);
        else {
            team.loop(rows, 8, round);
            team.barrier();
        }
    }
    for (int64_t slot = 0; slot < rows * args.k; slot++) {
        const int64_t row = work.pair_of[slot] / args.k;
        work.records[slot] = acts + row * record_bytes;
        work.floats[slot] = args.x + row * cols;
    }
}

}  // namespace

TANDEM_OP(experts, ExpertsArgs) {
    const int64_t rows = step.rows, size = args.gate.rows, hidden = args.down.rows;
    const bool few = rows <= kDotRows;
    Work work;
    const int64_t scratch_bytes = work.carve({}, args, rows);
    work.carve({team.scratch(size_t(scratch_bytes)), 0}, args, rows);
    work.sort_pairs(args, rows);
    round_input(args, work, rows, team);

    // A piece is kPanel inner rows of one expert; a run of pieces streams each expert's rows in one go.
    const int64_t pieces = (size + kPanel - 1) / kPanel;
    auto inner_run = [&](int64_t from, int64_t to) {
        while (from < to) {
            const int64_t begin = from % pieces * kPanel;
            const int64_t end = std::min({begin + (to - from) * kPanel, begin + work.inner_ld, size});
            gate_up_piece(args, work, work.used[from / pieces], begin, end, few);
            from += (end - begin + kPanel - 1) / kPanel;
        }
    };
    if (few) guided_loop(team, work.n_used * pieces, inner_run);
    else team.loop(work.n_used * pieces, 1, inner_run);
    team.barrier();

    const int64_t record_bytes = ActLayout(size).bytes;
    for (int64_t slot = 0; slot < rows * args.k; slot++) {
        work.records[slot] = args.inner_acts + slot * record_bytes;
        work.floats[slot] = args.inner + slot * size;
    }
    auto outer_run = [&](int64_t from, int64_t to) {
        const int64_t last = std::min(to * kPanel, hidden);
        for (int64_t begin = from * kPanel; begin < last; begin += work.outer_ld)
            down_piece(args, work, rows, begin, std::min(begin + work.outer_ld, last), few);
    };
    const int64_t columns = (hidden + kPanel - 1) / kPanel;
    if (few) guided_loop(team, columns, outer_run);
    else team.loop(columns, 1, outer_run);
}

}  // namespace tandem
