// Ops over dense weights: several products of one input, with a residual or with a gated activation.
//
// Few rows: each thread rounds the input for itself (no barrier) and takes long runs of weight rows.
// Many rows: the input is rounded once into a shared buffer, then panels of kPanel weight rows are shared out.
#include "ops/matmul.h"

#include <algorithm>

#include "ops/guided.h"
#include "ops/program.h"

namespace tandem {

namespace {

constexpr int kMaxWeights = 8;
constexpr int64_t kUnit = 16;            // rows that are shared out together: a cache line of output
constexpr int64_t kMostAtOnce = 512;     // rows of one gate_up piece: bounds its scratch

// Mirror of MatmulArgs in matmul_cpu.py.
struct MatmulArgs {
    const float* x;
    uint8_t* acts;          // [rows][ActLayout(cols).bytes], written only for many rows
    const float* residual;  // [rows][N] added to the only product, or null
    float* out[kMaxWeights];
    Weight weights[kMaxWeights];
    int32_t n_weights;
    int32_t activation;
};

int64_t align64(int64_t n) { return (n + 63) / 64 * 64; }

struct RowPointers {
    const uint8_t** records;
    const float** floats;
    Acts acts;

    static int64_t bytes(int64_t rows) { return align64(16 * rows); }
    RowPointers(uint8_t* at, const float* x, int64_t cols, const uint8_t* records_at, int64_t rows)
        : records((const uint8_t**)at), floats((const float**)(at + 8 * rows)), acts{records, floats, rows} {
        const int64_t record_bytes = ActLayout(cols).bytes;
        for (int64_t r = 0; r < rows; r++) {
            records[r] = records_at + r * record_bytes;
            floats[r] = x + r * cols;
        }
    }
};

bool any_quantized(const MatmulArgs& args) {
    for (int i = 0; i < args.n_weights; i++)
        if (!is_float_type(args.weights[i].type)) return true;
    return false;
}

// Shares out the rows of the first n_weights weights, in runs of whole units that get shorter towards the end:
// body(weight index, row begin, row end).
template <class F>
void share_rows(const MatmulArgs& args, int n_weights, int64_t unit, bool few, Team& team, F&& body) {
    int64_t total = 0, first[kMaxWeights + 1];
    for (int i = 0; i < n_weights; i++) {
        first[i] = total;
        total += (args.weights[i].rows + unit - 1) / unit;
    }
    first[n_weights] = total;
    auto run = [&](int64_t begin, int64_t end) {
        for (int i = 0; i < n_weights; i++) {
            const int64_t from = std::max(begin, first[i]), to = std::min(end, first[i + 1]);
            if (from < to) body(i, (from - first[i]) * unit, std::min((to - first[i]) * unit, args.weights[i].rows));
        }
    };
    if (few) guided_loop(team, total, run);
    else team.loop(total, 1, run);
}

// Rounds the input where the weights need it: for itself into `own` (few rows), or together into args.acts.
const uint8_t* round_input(const MatmulArgs& args, int64_t rows, uint8_t* own, Team& team) {
    const int64_t cols = args.weights[0].cols, record_bytes = ActLayout(cols).bytes;
    if (!any_quantized(args)) return own;
    if (rows <= kDotRows) {
        for (int64_t r = 0; r < rows; r++) quantize_row(args.x + r * cols, cols, own + r * record_bytes);
        return own;
    }
    team.loop(rows, 8, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) quantize_row(args.x + r * cols, cols, args.acts + r * record_bytes);
    });
    team.barrier();
    return args.acts;
}

void add_rows(float* out, const float* residual, int64_t rows, int64_t ld, int64_t begin, int64_t end) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = begin; i < end; i++) out[r * ld + i] += residual[r * ld + i];
}

}  // namespace

TANDEM_OP(matmul, MatmulArgs) {
    const int64_t rows = step.rows, cols = args.weights[0].cols;
    const bool few = rows <= kDotRows;
    const int64_t own_bytes = few ? align64(rows * ActLayout(cols).bytes) : 0;
    const int64_t tile_bytes = few ? 0 : rows * kPanel * 4;
    uint8_t* scratch = team.scratch(size_t(RowPointers::bytes(rows) + own_bytes + tile_bytes) + panel_scratch_bytes());
    uint8_t* own = scratch + RowPointers::bytes(rows);
    float* tile = (float*)(own + own_bytes);
    const RowPointers input(scratch, args.x, cols, round_input(args, rows, own, team), rows);

    share_rows(args, args.n_weights, few ? kUnit : kPanel, few, team, [&](int i, int64_t begin, int64_t end) {
        const Weight& w = args.weights[i];
        float* out = args.out[i];
        if (few) {
            dot_rows(w, 0, begin, end, input.acts, out + begin, w.rows);
        } else {
            panel_rows(w, 0, begin, end, input.acts, tile, own + own_bytes + tile_bytes);
            for (int64_t r = 0; r < rows; r++)
                std::copy(tile + r * kPanel, tile + r * kPanel + end - begin, out + r * w.rows + begin);
        }
        if (args.residual) add_rows(out, args.residual, rows, w.rows, begin, end);
    });
}

// out[0] = activation(x weights[0]^T) * (x weights[1]^T); both weights have the same shape.
TANDEM_OP(gate_up, MatmulArgs) {
    const int64_t rows = step.rows, cols = args.weights[0].cols, width = args.weights[0].rows;
    const bool few = rows <= kDotRows;
    const int64_t most = few ? std::min(kMostAtOnce, (width + kUnit - 1) / kUnit * kUnit) : kPanel;
    const int64_t own_bytes = few ? align64(rows * ActLayout(cols).bytes) : 0;
    const int64_t tile_bytes = align64(rows * most * 4);
    uint8_t* scratch =
        team.scratch(size_t(RowPointers::bytes(rows) + own_bytes + 2 * tile_bytes) + panel_scratch_bytes());
    uint8_t* own = scratch + RowPointers::bytes(rows);
    float* gate = (float*)(own + own_bytes);
    float* up = (float*)(own + own_bytes + tile_bytes);
    uint8_t* panel = own + own_bytes + 2 * tile_bytes;
    const RowPointers input(scratch, args.x, cols, round_input(args, rows, own, team), rows);

    auto piece = [&](int64_t begin, int64_t end) {
        float* parts[2] = {gate, up};
        for (int i = 0; i < 2; i++) {
            if (few) dot_rows(args.weights[i], 0, begin, end, input.acts, parts[i], most);
            else panel_rows(args.weights[i], 0, begin, end, input.acts, parts[i], panel);
        }
        for (int64_t r = 0; r < rows; r++) {
            activate(args.activation, gate + r * most, up + r * most, end - begin);
            std::copy(gate + r * most, gate + r * most + end - begin, args.out[0] + r * width + begin);
        }
    };
    share_rows(args, 1, few ? kUnit : kPanel, few, team, [&](int, int64_t begin, int64_t end) {
        for (; begin < end; begin += most) piece(begin, std::min(begin + most, end));
    });
}

}  // namespace tandem
