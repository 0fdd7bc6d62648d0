"""Every CPU op but the matrix products, on each instruction set this machine has, against float64 or the numpy reference."""

import ctypes
import functools
from dataclasses import dataclass

import numpy as np
import pytest
from close import assert_close

from tandem import native
from tandem.errors import SettingError, ShapeError
from tandem.ops import attention, delta, elementwise_cpu, experts, norm, rope
from tandem.ops.attention_cpu import record_attention
from tandem.ops.base import Attention, Delta, Rope, Weight
from tandem.ops.cpu import CpuOps
from tandem.ops.delta_cpu import record_delta_rule, record_short_conv
from tandem.ops.norm_cpu import record_gated_rms_norm, record_rms_norm
from tandem.ops.program import Buffer, Pool, Program, SegmentArgs, StepArgs
from tandem.ops.rope_cpu import record_rope, record_rope_table
from tandem.ops.route_cpu import record_route
from tandem.ops.state_cpu import CpuState, size_bytes
from tandem.quant import FORMATS, pack_tensor, random_blocks, unpack_tensor

ISAS = native.ISAS[: native.ISAS.index(native.best_isa()) + 1]
EXACT = 2e-6  # relative RMS error of float32 arithmetic against float64
MAX_ROWS = 600


@pytest.fixture(params=ISAS)
def isa(request):
    return native.load(request.param)


@dataclass(frozen=True)
class KvSpec:
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None


@dataclass(frozen=True)
class DeltaSpec:
    num_v_heads: int
    key_dim: int
    value_dim: int
    conv_channels: int
    conv_width: int


def weight(values: np.ndarray, ggml_type: int = 0, name: str = "w") -> Weight:
    values = np.ascontiguousarray(values, np.float32)
    blocks = pack_tensor(values, ggml_type).reshape(*values.shape[:-1], -1)
    return Weight(name, values.shape, ggml_type, blocks)


class Recorded:
    """One op between input buffers that the test fills and output buffers that it reads; memory around is NaN."""

    def __init__(self, library, threads: int, widths: tuple[int, ...], record, max_rows: int = MAX_ROWS):
        self.program = Program(library, max_rows, max_rows)
        self.pool = Pool(library, threads)
        self.inputs = [self.program.buffer(w) for w in widths]
        made = record(self.program, *self.inputs)
        self.outputs = [made] if isinstance(made, Buffer) else list(made)
        # Inputs are written before the first call and outputs read after the last.
        for b in self.inputs:
            b.first_call = 0
        self.program.place(tuple(self.outputs))
        self.program.finish()

    def __call__(self, *arrays, positions=None, tokens=None, segments=None, out_rows=None) -> list[np.ndarray]:
        given = arrays[0] if arrays else tokens if tokens is not None else positions
        rows = len(given)
        self.program.arena[:] = 0xFF  # NaN in float32 and half
        # With more than one call, outputs may lie where earlier results did.
        guards = [self.program.rows(b, MAX_ROWS).view(np.uint8) for b in self.outputs if len(self.program.calls) == 1]
        for guard in guards:
            guard[:] = 0x5A
        for buffer, array in zip(self.inputs, arrays, strict=True):
            self.program.rows(buffer, rows)[:] = array
        positions = np.arange(rows, dtype=np.int32) if positions is None else np.asarray(positions, np.int32)
        tokens = np.zeros(rows, np.int32) if tokens is None else np.asarray(tokens, np.int32)
        out = np.asarray([0] if out_rows is None else out_rows, np.int32)
        segments = (SegmentArgs * len(segments))(*segments) if segments else None
        step = StepArgs(
            rows=rows,
            n_segments=len(segments) if segments else 0,
            n_out=len(out),
            tokens=tokens.ctypes.data,
            positions=positions.ctypes.data,
            out_rows=out.ctypes.data,
            segments=ctypes.addressof(segments) if segments else None,
        )
        if self.program.head_start != 0:
            self.program.run_trunk(self.pool, step)
        if self.program.head_start is not None:
            step.rows = rows = len(out)
            self.program.run_head(self.pool, step)
        for guard in guards:
            assert np.all(guard[rows:] == 0x5A), "wrote beyond the step's rows"
        return [self.program.rows(b, rows).copy() for b in self.outputs]


def rows_of(rng, rows: int, width: int, size: float = 1.0) -> np.ndarray:
    return (rng.standard_normal((rows, width)) * size).astype(np.float32)


def assert_rows_alone_equal(library, widths, record, arrays, **step) -> np.ndarray:
    """Runs all rows at once on 3 threads, and each row alone on 1 and 2 threads; all must be equal to the bit."""
    together = Recorded(library, 3, widths, record)(*arrays, **step)
    for threads in (1, 2):
        alone = Recorded(library, threads, widths, record)
        for row in range(min(8, len(arrays[0]))):
            here = {key: value[row : row + 1] for key, value in step.items()}
            for one, many in zip(alone(*[a[row : row + 1] for a in arrays], **here), together, strict=True):
                assert np.array_equal(one[0], many[row], equal_nan=True), (threads, row)
    return together


ROW_OPS = {
    "rms_norm": (1, lambda p, x: record_rms_norm(p, x, weight(np.linspace(-2, 3, x.width)), 1e-6)),
    "add": (2, elementwise_cpu.record_add),
    "scale": (1, lambda p, x: elementwise_cpu.record_scale(p, x, 0.37)),
    "softcap": (1, lambda p, x: elementwise_cpu.record_softcap(p, x, 2.5)),
    "sigmoid_gate": (2, elementwise_cpu.record_sigmoid_gate),
    "gated_rms_norm": (2, lambda p, x, g: record_gated_rms_norm(p, x, g, weight(np.linspace(-2, 3, x.width)), 1e-6, 1)),
}


def row_op_in_float64(name: str, *arrays: np.ndarray) -> np.ndarray:
    x, y = (*(a.astype(np.float64) for a in arrays), None)[:2]
    scale_of = np.linspace(-2, 3, x.shape[1]).astype(np.float32)
    normed = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + 1e-6) * scale_of
    return {
        "rms_norm": lambda: normed,
        "add": lambda: x + y,
        "scale": lambda: x * np.float32(0.37),
        "softcap": lambda: 2.5 * np.tanh(x / 2.5),
        "sigmoid_gate": lambda: x / (1 + np.exp(-y)),
        "gated_rms_norm": lambda: normed * y / (1 + np.exp(-y)),
    }[name]()


@pytest.mark.parametrize("width", [1, 63, 65, 576, 1000])
@pytest.mark.parametrize("name", ROW_OPS)
def test_row_ops_equal_float64_and_do_not_depend_on_the_other_rows(isa, name, width):
    inputs, record = ROW_OPS[name]
    rng = np.random.default_rng(width)
    arrays = [rows_of(rng, 11, width, 4) for _ in range(inputs)]
    (together,) = assert_rows_alone_equal(isa, (width,) * inputs, record, arrays)
    assert_close(together, row_op_in_float64(name, *arrays), EXACT)


def test_functions_are_accurate_over_their_whole_range(isa):
    x = np.concatenate([np.linspace(-120, 120, 4001), np.geomspace(1e-30, 1, 999), [0, -0.0, 87.9, -87.9]]).astype(np.float32)
    ones = np.ones_like(x)
    (sigmoid,) = Recorded(isa, 2, (len(x),) * 2, elementwise_cpu.record_sigmoid_gate)(ones[None], x[None])
    exact = 1 / (1 + np.exp(-x.astype(np.float64)))
    normal = exact > 1e-37
    assert np.max(np.abs(sigmoid[0] / exact - 1)[normal]) < 5e-7
    assert np.all(sigmoid[0][~normal] < 1e-37)
    (capped,) = Recorded(isa, 2, (len(x),), lambda p, b: elementwise_cpu.record_softcap(p, b, 1.0))(x[None])
    exact = np.tanh(x.astype(np.float64))
    assert np.max(np.abs(capped[0] - exact)[x == 0]) == 0
    assert np.max(np.abs(capped[0] / np.where(x == 0, 1, exact) - 1)[x != 0]) < 5e-7


def test_nan_stays_nan(isa):
    x = np.array([[1, np.nan, -1] * 7], np.float32)
    for name, (inputs, record) in ROW_OPS.items():
        (out,) = Recorded(isa, 2, (21,) * inputs, record)(*[x] * inputs)
        assert np.isnan(out[0, 1]), name


@pytest.mark.parametrize("heads,dim", [(3, 65), (16, 128), (1, 63)])
def test_norm_over_heads_equals_reference(isa, heads, dim):
    rng = np.random.default_rng(0)
    x, gate = rows_of(rng, 9, heads * dim), rows_of(rng, 9, heads * dim, 3)
    w = rng.standard_normal(dim).astype(np.float32)
    (plain,) = Recorded(isa, 2, (heads * dim,), lambda p, b: record_rms_norm(p, b, weight(w), 1e-5, heads))(x)
    assert_close(plain, norm.rms_norm(x, w, 1e-5, heads), EXACT)
    record = lambda p, b, g: record_gated_rms_norm(p, b, g, weight(w), 1e-5, heads)  # noqa: E731
    (gated,) = assert_rows_alone_equal(isa, (heads * dim,) * 2, record, [x, gate])
    assert_close(gated, norm.gated_rms_norm(x, gate, w, 1e-5, heads), EXACT)


@pytest.mark.parametrize("ggml_type", [t for t in FORMATS if FORMATS[t].name != "NVFP4"], ids=lambda t: FORMATS[t].name)
def test_embed_gives_the_scaled_rows_of_every_type(isa, ggml_type):
    form, vocab, width = FORMATS[ggml_type], 37, 512
    blocks = random_blocks(ggml_type, vocab * width // form.block_values, np.random.default_rng(3)).reshape(vocab, -1)
    table = unpack_tensor(blocks, ggml_type, (vocab, width))
    tokens = [36, 0, 5, 5, 17]
    record = lambda p: elementwise_cpu.record_embed(p, Weight("t", (vocab, width), ggml_type, blocks), 1.5)  # noqa: E731
    (out,) = Recorded(isa, 2, (), record)(tokens=tokens)
    assert_close(out, table[tokens] * np.float32(1.5), EXACT)


def test_embed_of_a_table_with_gaps_between_rows_reads_the_rows(isa):
    values = rows_of(np.random.default_rng(1), 10, 64)
    blocks = np.full((10, 300), 0xFF, np.uint8)
    blocks[:, :256] = values.view(np.uint8)
    table = Weight("t", (10, 64), 0, blocks[:, :256])
    (out,) = Recorded(isa, 1, (), lambda p: elementwise_cpu.record_embed(p, table))(tokens=[9, 1])
    assert np.array_equal(out, values[[9, 1]])


def test_split_gate_separates_values_and_gates_of_each_head(isa):
    x = rows_of(np.random.default_rng(2), 5, 3 * 2 * 20)
    values, gates = Recorded(isa, 2, (120,), lambda p, b: elementwise_cpu.record_split_gate(p, b, 20))(x)
    heads = x.reshape(5, 3, 2, 20)
    assert np.array_equal(values, heads[:, :, 0].reshape(5, 60))
    assert np.array_equal(gates, heads[:, :, 1].reshape(5, 60))


def test_add_gated_equals_reference(isa):
    rng = np.random.default_rng(4)
    base, x, gate_input = rows_of(rng, 9, 130), rows_of(rng, 9, 130), rows_of(rng, 9, 75)
    w = rng.standard_normal(75).astype(np.float32)
    record = lambda p, b, x, g: elementwise_cpu.record_add_gated(p, b, x, g, weight(w, 1))  # noqa: E731
    (out,) = assert_rows_alone_equal(isa, (130, 130, 75), record, [base, x, gate_input])
    gate = 1 / (1 + np.exp(-(gate_input.astype(np.float64) @ w.astype(np.float16))))
    assert_close(out, base + gate[:, None] * x, EXACT)


def test_output_rows_are_the_chosen_rows_of_the_trunk(isa):
    x = rows_of(np.random.default_rng(5), 70, 33)
    record = lambda p, b: elementwise_cpu.record_scale(p, elementwise_cpu.record_output_rows(p, b), 2.0)  # noqa: E731
    for chosen in ([69], [3, 0, 64]):
        (out,) = Recorded(isa, 2, (33,), record)(x, out_rows=chosen)
        assert np.array_equal(out, 2 * x[chosen])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_dim,pairs,heads", [(64, 32, 9), (256, 32, 2), (20, 7, 3), (128, 64, 1)])
def test_rope_turns_pairs_by_position_and_passes_the_rest(isa, interleaved, head_dim, pairs, heads):
    spec = Rope(rope.inv_frequencies(10000.0, 2 * pairs), interleaved, 1.25)
    x = rows_of(np.random.default_rng(6), 9, heads * head_dim)
    positions = np.array([0, 1, 2, 3, 100, 4096, 131071, 200000, 262143], np.int32)
    record = lambda p, b: record_rope(p, b, head_dim, spec, record_rope_table(p, spec))  # noqa: E731
    (out,) = assert_rows_alone_equal(isa, (heads * head_dim,), record, [x], positions=positions)
    assert_close(out, rope.rotate(x, positions, head_dim, spec), EXACT)


@pytest.mark.parametrize("ggml_type", [0, 1, 30])
@pytest.mark.parametrize("num_experts,k", [(256, 8), (60, 4), (7, 7)])
def test_route_chooses_and_weighs_as_the_reference(isa, ggml_type, num_experts, k):
    rng = np.random.default_rng(7)
    x, router = rows_of(rng, 13, 100), weight(rng.standard_normal((num_experts, 100)) * 0.3, ggml_type)
    record = lambda p, b: (lambda r: (r.ids, r.weights))(record_route(p, b, router, k))  # noqa: E731
    ids, weights = assert_rows_alone_equal(isa, (100,), record, [x])
    table = unpack_tensor(router.blocks, ggml_type, router.shape)
    expected_ids, expected_weights = experts.choose(x @ table.T, k)
    assert np.array_equal(ids, expected_ids)
    assert_close(weights, expected_weights, EXACT)


def test_equal_probabilities_go_to_the_lower_id_and_nan_still_gives_valid_ids(isa):
    router = np.zeros((40, 16), np.float32)
    router[[30, 3, 17]] = 1
    x = np.ones((2, 16), np.float32)
    x[1] = np.nan
    record = lambda p, b: (lambda r: (r.ids, r.weights))(record_route(p, b, weight(router), 5))  # noqa: E731
    ids, _ = Recorded(isa, 2, (16,), record)(x)
    assert ids[0].tolist() == [3, 17, 30, 0, 1]
    assert len(set(ids[1].tolist())) == 5 and ids[1].min() >= 0 and ids[1].max() < 40


class Sequence:
    """A sequence that a stateful op advances, with the reference's view of it."""

    def __init__(self, library, spec, record, widths, threads=2, kv="f16", ctx=2000):
        self.state = CpuState([spec], ctx, kv, MAX_ROWS)
        self.op = Recorded(library, threads, widths, record)
        self.position = 0

    def step(self, *arrays) -> np.ndarray:
        rows = len(arrays[0])
        segment = self.state.segment(0, rows, self.position)
        positions = np.arange(self.position, self.position + rows)
        self.position += rows
        return self.op(*arrays, positions=positions, segments=[segment])[0]


ATTENTION_SHAPES = {
    "grouped": Attention(num_heads=9, num_kv_heads=3, head_dim=64, value_dim=64, scale=0.125),
    "wide": Attention(num_heads=16, num_kv_heads=2, head_dim=256, value_dim=256, scale=1 / 16),
    "odd": Attention(num_heads=5, num_kv_heads=1, head_dim=20, value_dim=12, scale=0.3),
    "many": Attention(num_heads=7, num_kv_heads=1, head_dim=96, value_dim=64, scale=0.1),
    "window": Attention(num_heads=4, num_kv_heads=1, head_dim=64, value_dim=64, scale=0.125, window=100),
    "capped": Attention(num_heads=4, num_kv_heads=4, head_dim=32, value_dim=32, scale=0.5, softcap=3.0),
}


def attention_inputs(spec: Attention, rows: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    widths = (spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * spec.value_dim)
    return [rows_of(rng, rows, width) for width in widths]


def attention_sequence(library, spec: Attention, **how) -> Sequence:
    widths = (spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * spec.value_dim)
    kv = KvSpec(spec.num_kv_heads, spec.head_dim, spec.value_dim, spec.window)
    return Sequence(library, kv, lambda p, q, k, v: record_attention(p, q, k, v, 0, spec), widths, **how)


@functools.cache
def attention_reference(spec: Attention, kv: str, rows: int, seed: int = 0) -> np.ndarray:
    return attention_in_float64(spec, *attention_inputs(spec, rows, seed), kv)


def attention_in_float64(spec: Attention, q, k, v, kv: str) -> np.ndarray:
    def stored(x, dim):
        return attention.as_stored(x.reshape(len(x), -1, dim), kv).reshape(x.shape).astype(np.float64)

    keys, values = stored(k, spec.head_dim), stored(v, spec.value_dim)
    return attention.attend(q.astype(np.float64), keys, values, np.arange(len(q)), spec)


@pytest.mark.parametrize("kv", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("name", ATTENTION_SHAPES)
def test_attention_equals_reference_over_prefill_and_decode(isa, name, kv):
    spec = ATTENTION_SHAPES[name]
    if kv == "q8_0" and (spec.head_dim % 32 or spec.value_dim % 32):
        pytest.skip("q8_0 needs heads of whole 32 values")
    inputs = attention_inputs(spec, 450)
    sequence = attention_sequence(isa, spec, kv=kv)
    bounds = [0, 1, 2, 11, 140, 145, 407, 440, 445, 446, 450]
    got = [sequence.step(*[a[b:e] for a in inputs]) for b, e in zip(bounds, bounds[1:], strict=False)]
    assert_close(np.concatenate(got), attention_reference(spec, kv, 450), 3e-6)


@pytest.mark.parametrize("name", ATTENTION_SHAPES)
def test_attention_of_a_row_does_not_depend_on_its_batch_or_the_threads(isa, name):
    spec = ATTENTION_SHAPES[name]
    inputs = attention_inputs(spec, 290, seed=1)
    results = []
    for threads, rows in ((1, 1), (2, 2), (3, 5), (2, 8)):
        sequence = attention_sequence(isa, spec, threads=threads)
        for begin in (0, 125):
            sequence.step(*[a[begin : begin + 125] for a in inputs])
        # 250.. crosses a border between chunks of positions
        parts = [sequence.step(*[a[b : min(b + rows, 290)] for a in inputs]) for b in range(250, 290, rows)]
        results.append(np.concatenate(parts))
    for result in results[1:]:
        assert np.array_equal(result, results[0])


@pytest.mark.parametrize("name", ["grouped", "odd", "window"])
def test_attention_masks_the_future_wherever_a_prompt_begins(isa, name):
    spec = ATTENTION_SHAPES[name]
    inputs = attention_inputs(spec, 450)
    for start in (61, 62, 63, 64, 65, 126, 161, 162, 163):
        sequence = attention_sequence(isa, spec, kv="f32")
        sequence.step(*[a[:start] for a in inputs])
        got = sequence.step(*[a[start : start + 40] for a in inputs])
        assert_close(got, attention_reference(spec, "f32", 450)[start : start + 40], 3e-6)


def test_attention_over_a_long_context_equals_reference(isa):
    spec = Attention(num_heads=2, num_kv_heads=1, head_dim=32, value_dim=32, scale=0.2)
    inputs = attention_inputs(spec, 6000)
    sequence = attention_sequence(isa, spec, ctx=6000)
    for begin in range(0, 5900, 590):
        sequence.step(*[a[begin : begin + 590] for a in inputs])
    got = [sequence.step(*[a[b : b + 4] for a in inputs]) for b in range(5900, 6000, 4)]
    assert_close(np.concatenate(got), attention_reference(spec, "f16", 6000)[5900:], 3e-6)


def test_rows_on_both_sides_of_a_change_of_chunk_length_equal_single_rows(isa):
    spec = Attention(num_heads=2, num_kv_heads=1, head_dim=16, value_dim=16, scale=0.2)
    inputs = attention_inputs(spec, 4110)
    results = []
    for rows in (1, 5):  # chunks grow at position 4096
        sequence = attention_sequence(isa, spec, ctx=4200)
        for begin in range(0, 4090, 409):
            sequence.step(*[a[begin : begin + 409] for a in inputs])
        results.append(np.concatenate([sequence.step(*[a[b : b + rows] for a in inputs]) for b in range(4090, 4110, rows)]))
    assert np.array_equal(*results)
    assert_close(results[0], attention_reference(spec, "f16", 4110)[4090:], 3e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed,rotated", [(True, True), (False, True), (True, False)])
def test_attention_norms_and_rotates_heads_as_the_single_ops_do(isa, normed, rotated, interleaved):
    spec = Attention(num_heads=6, num_kv_heads=2, head_dim=48, value_dim=32, scale=0.2)
    turn = Rope(rope.inv_frequencies(10000.0, 32), interleaved, 1.1)
    rng = np.random.default_rng(8)
    q_norm, k_norm = (weight(rng.standard_normal(48)) for _ in range(2))
    inputs = attention_inputs(spec, 60)

    def record(p, q, k, v, *, at_once):
        ops = CpuOps(p)
        if normed:
            q, k = ops.rms_norm(q, q_norm, 1e-6, 6), ops.rms_norm(k, k_norm, 1e-6, 2)
        if rotated:
            q, k = ops.rope(q, 48, turn), ops.rope(k, 48, turn)
        if not at_once:
            ops.program.settle(q, k)
        return ops.attention(q, k, v, 0, spec)

    results = []
    for at_once in (False, True):
        widths = tuple(a.shape[1] for a in inputs)
        sequence = Sequence(isa, KvSpec(2, 48, 32), functools.partial(record, at_once=at_once), widths)
        bounds = [0, 40, 41, 49, 60]
        results.append([sequence.step(*[a[b:e] for a in inputs]) for b, e in zip(bounds, bounds[1:], strict=False)])
        assert len(sequence.op.program.calls) == rotated + (1 if at_once else 1 + 2 * normed + 2 * rotated)
    for alone, together in zip(*results, strict=True):
        assert np.array_equal(alone, together)


def test_pending_heads_are_recorded_for_any_other_reader(isa):
    x = rows_of(np.random.default_rng(9), 5, 4 * 32)
    turn = Rope(rope.inv_frequencies(10000.0, 32))
    w = np.linspace(1, 2, 32)

    def record(p, b):
        ops = CpuOps(p)
        return ops.scale(ops.rope(ops.rms_norm(b, weight(w), 1e-6, 4), 32, turn), 2.0)

    (out,) = Recorded(isa, 2, (128,), record)(x)
    expected = rope.rotate(norm.rms_norm(x, w.astype(np.float32), 1e-6, 4), np.arange(5), 32, turn)
    assert_close(out, 2 * expected, EXACT)


def test_an_addition_norms_its_second_argument_as_the_single_ops_do(isa):
    rng = np.random.default_rng(10)
    x, y = rows_of(rng, 9, 130), rows_of(rng, 9, 130, 5)
    w = weight(rng.standard_normal(130))

    def record(p, a, b, *, at_once):
        ops = CpuOps(p)
        normed = ops.rms_norm(b, w, 1e-6)
        if not at_once:
            ops.program.settle(normed)
        total = ops.add(a, normed)
        assert len(p.calls) == 2 - at_once
        return total, ops.scale(normed, 1.0)  # the norm itself may still be read

    results = [Recorded(isa, 2, (130, 130), functools.partial(record, at_once=n))(x, y) for n in (False, True)]
    for alone, together in zip(*results, strict=True):
        assert np.array_equal(alone, together)
    assert_close(results[0][0], x + norm.rms_norm(y, w.blocks.view(np.float32), 1e-6), EXACT)


def test_attention_keeps_sequences_of_a_step_apart(isa):
    spec = ATTENTION_SHAPES["grouped"]
    inputs = attention_inputs(spec, 300)
    together = attention_sequence(isa, spec)
    others = [CpuState([KvSpec(3, 64, 64)], 500, "f16", MAX_ROWS) for _ in range(2)]
    segments = [others[0].segment(0, 200, 0), others[1].segment(200, 97, 0)]
    (first,) = together.op(*[a[:297] for a in inputs], segments=segments)
    segments = [others[1].segment(0, 1, 97), others[0].segment(1, 2, 200)]
    (second,) = together.op(*[a[297:300] for a in inputs], segments=segments)
    orders = ([*range(200), 298, 299], [*range(200, 298)])
    rows = np.concatenate([first, second])
    for order in orders:
        assert_close(rows[order], attention_in_float64(spec, *[a[order] for a in inputs], "f16"), 3e-6)


def test_attention_window_reads_the_ring_after_it_has_wrapped(isa):
    spec = ATTENTION_SHAPES["window"]
    inputs = attention_inputs(spec, 3000)
    sequence = attention_sequence(isa, spec, ctx=3000)
    assert sequence.state.views[0].capacity == 100 + MAX_ROWS + 256
    bounds = [*range(0, 2800, 400), 2800, *range(2801, 3000, 7), 3000]
    got = [sequence.step(*[a[b:e] for a in inputs]) for b, e in zip(bounds, bounds[1:], strict=False)]
    assert_close(np.concatenate(got), attention_reference(spec, "f16", 3000), 3e-6)


DELTA_SHAPES = {
    "qwen": Delta(num_k_heads=2, num_v_heads=4, head_dim=128, conv_width=4, eps=1e-6),
    "odd": Delta(num_k_heads=1, num_v_heads=3, head_dim=20, conv_width=4, eps=1e-6),
    "flat": Delta(num_k_heads=2, num_v_heads=2, head_dim=64, conv_width=4, eps=1e-6),
}


def delta_inputs(spec: Delta, rows: int, seed: int = 0) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    width = (2 * spec.num_k_heads + spec.num_v_heads) * spec.head_dim
    a = -np.exp(rng.standard_normal(spec.num_v_heads)).astype(np.float32)
    bias = rng.standard_normal(spec.num_v_heads).astype(np.float32)
    heads = spec.num_v_heads
    return [rows_of(rng, rows, width), rows_of(rng, rows, heads, 2), rows_of(rng, rows, heads, 2)], a, bias


def delta_sequence(library, spec: Delta, a, bias, threads=2) -> Sequence:
    width = (2 * spec.num_k_heads + spec.num_v_heads) * spec.head_dim
    state = DeltaSpec(spec.num_v_heads, spec.head_dim, spec.head_dim, width, spec.conv_width)

    def record(p, *rows):
        return record_delta_rule(p, *rows, weight(a), weight(bias), 0, spec)

    return Sequence(library, state, record, (width, spec.num_v_heads, spec.num_v_heads), threads)


def delta_reference(spec: Delta, inputs, a, bias) -> np.ndarray:
    qkv, alpha, beta = (x.astype(np.float64) for x in inputs)
    keys = spec.num_k_heads * spec.head_dim
    q, k, v = (part.reshape(len(qkv), -1, spec.head_dim) for part in np.split(qkv, [keys, 2 * keys], axis=1))
    q, k = (x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + spec.eps) for x in (q, k))
    log_decay = a * np.logaddexp(0, alpha + bias)
    state = np.zeros((spec.num_v_heads, spec.head_dim, spec.head_dim))
    y = delta.delta_steps(q / np.sqrt(spec.head_dim), k, v, log_decay, 1 / (1 + np.exp(-beta)), state)
    return y.reshape(len(qkv), -1)


@pytest.mark.parametrize("name", DELTA_SHAPES)
def test_delta_rule_equals_reference_over_prefill_and_decode(isa, name):
    spec = DELTA_SHAPES[name]
    inputs, a, bias = delta_inputs(spec, 330)
    sequence = delta_sequence(isa, spec, a, bias)
    bounds = [0, 1, 66, 67, 75, 275, 290, 329, 330]
    got = [sequence.step(*[x[b:e] for x in inputs]) for b, e in zip(bounds, bounds[1:], strict=False)]
    assert_close(np.concatenate(got), delta_reference(spec, inputs, a, bias), 1e-5)


@pytest.mark.parametrize("gate", [-60.0, 60.0])
def test_delta_rule_in_chunks_stands_any_decay(isa, gate):
    spec = DELTA_SHAPES["flat"]
    inputs, a, bias = delta_inputs(spec, 100)
    inputs[1][::3] += gate  # hardly any decay, or e^-60 and less within a chunk
    got = delta_sequence(isa, spec, a, bias).step(*inputs)
    assert_close(got, delta_reference(spec, inputs, a, bias), 1e-5)


@pytest.mark.parametrize("name", DELTA_SHAPES)
def test_delta_rule_of_few_rows_equals_one_row_at_a_time_to_the_bit(isa, name):
    spec = DELTA_SHAPES[name]
    inputs, a, bias = delta_inputs(spec, 40, seed=1)
    results = []
    for threads, rows in ((1, 1), (2, 3), (3, 8)):
        sequence = delta_sequence(isa, spec, a, bias, threads)
        results.append(np.concatenate([sequence.step(*[x[b : b + rows] for x in inputs]) for b in range(0, 40, rows)]))
        results[-1] = np.concatenate([results[-1], sequence.state.recurrent_memory.view(np.float32).reshape(1, -1)], axis=None)
    for result in results[1:]:
        assert np.array_equal(result, results[0])


@pytest.mark.parametrize("channels,width", [(65, 4), (1000, 4), (32, 3), (8, 1), (130, 16)])
def test_short_conv_equals_reference_and_keeps_its_tail(isa, channels, width):
    rng = np.random.default_rng(9)
    taps = rng.standard_normal((channels, width)).astype(np.float32)
    x = rows_of(rng, 90, channels)
    expected, _ = delta.short_conv(x.astype(np.float64), taps.astype(np.float64), np.zeros((width - 1, channels)))
    results = []
    for threads, bounds in ((1, range(91)), (3, [0, 1, 3, 10, 73, 90])):
        spec = DeltaSpec(1, 1, 1, channels, width)
        record = lambda p, b: record_short_conv(p, b, weight(taps), 0)  # noqa: E731
        sequence = Sequence(isa, spec, record, (channels,), threads)
        got = [sequence.step(x[b:e]) for b, e in zip(bounds, list(bounds)[1:], strict=False)]
        results.append(np.concatenate(got))
    assert_close(results[0], expected, EXACT)
    assert np.array_equal(*results)


def test_recurrent_snapshot_brings_the_sequence_back(isa):
    spec = DELTA_SHAPES["flat"]
    inputs, a, bias = delta_inputs(spec, 30)
    sequence = delta_sequence(isa, spec, a, bias)
    sequence.step(*[x[:20] for x in inputs])
    saved = sequence.state.snapshot()
    first = sequence.step(*[x[20:] for x in inputs])
    assert not np.array_equal(saved, sequence.state.recurrent_memory)
    sequence.state.restore(saved)
    sequence.position = 20
    assert np.array_equal(sequence.step(*[x[20:] for x in inputs]), first)


@pytest.mark.parametrize("kv", ["f32", "f16", "q8_0"])
def test_state_takes_the_bytes_it_says(kv):
    specs = [KvSpec(2, 64, 32), DeltaSpec(3, 16, 16, 100, 4), KvSpec(1, 32, 32, window=50)]
    state = CpuState(specs, 1000, kv, 128)
    per_value = {"f32": 4, "f16": 2, "q8_0": 34 / 32}[kv]
    exact = 1000 * 2 * (64 + 32) * per_value + 434 * 64 * per_value + 4 * (3 * 100 + 3 * 16 * 16)
    assert state.memory.nbytes == state.size_bytes == size_bytes(specs, 1000, kv, 128)
    assert exact <= state.size_bytes < exact + 6 * 64 + 64
    assert state.snapshot().nbytes < 4 * (3 * 100 + 3 * 16 * 16) + 2 * 64


def test_a_ring_can_be_cut_back_as_far_as_it_still_holds_the_window():
    state = CpuState([KvSpec(1, 32, 32, window=100), KvSpec(1, 32, 32)], 4000, "f16", 64)
    assert not state.recurrent
    assert state.can_cut(420, 0)  # nothing has been replaced yet
    assert state.can_cut(1000, 1000 - 320) and not state.can_cut(1000, 1000 - 322)
    # positions up to 1000 have been written, even if the sequence was cut since
    assert not state.can_cut(700, 670)
    state.reset()
    assert state.can_cut(420, 0)


def test_wrong_state_settings_and_positions_are_errors():
    with pytest.raises(SettingError, match="q8_0"):
        CpuState([KvSpec(1, 32, 32)], 10, "q8")
    with pytest.raises(SettingError, match="32"):
        CpuState([KvSpec(1, 48, 48)], 10, "q8_0")
    state = CpuState([KvSpec(1, 32, 32)], 10, "f16", 4)
    for rows, start in ((5, 0), (1, 10), (2, 9), (0, 0), (1, -1)):
        with pytest.raises(ShapeError, match="0..9"):
            state.segment(0, rows, start)


def test_wrong_shapes_are_errors_when_recorded():
    program = Program(native.load("scalar"), 4, 4)
    x, y = program.buffer(8), program.buffer(9)
    with pytest.raises(ShapeError):
        elementwise_cpu.record_add(program, x, y)
    with pytest.raises(ShapeError):
        record_rms_norm(program, x, weight(np.ones(9)), 1e-6)
    with pytest.raises(ShapeError):
        record_route(program, x, weight(np.ones((4, 9))), 2)
    with pytest.raises(ShapeError):
        record_route(program, x, weight(np.ones((4, 8))), 5)
    with pytest.raises(ShapeError):
        record_attention(program, x, x, x, 0, ATTENTION_SHAPES["odd"])
    with pytest.raises(ShapeError):
        record_short_conv(program, x, weight(np.ones((9, 4))), 0)
    with pytest.raises(ShapeError):
        record_delta_rule(program, x, y, y, weight(np.ones(9)), weight(np.ones(9)), 0, DELTA_SHAPES["odd"])
