"""CPU ops without state, on each instruction set this machine has, against float64 or the numpy reference."""

import numpy as np
import pytest
from close import assert_close
from recorded_ops import EXACT, ISAS, Recorded, assert_rows_alone_equal, rows_of, weight

from tandem import native
from tandem.errors import ShapeError
from tandem.ops import elementwise_cpu, experts, norm, rope
from tandem.ops.attention_cpu import record_attention
from tandem.ops.base import Attention, Delta, Rope, Weight
from tandem.ops.delta_cpu import record_delta_rule, record_short_conv
from tandem.ops.norm_cpu import record_gated_rms_norm, record_rms_norm
from tandem.ops.program import Program
from tandem.ops.rope_cpu import record_rope, record_rope_table
from tandem.ops.route_cpu import record_route
from tandem.quant import FORMATS, random_blocks, unpack_tensor


@pytest.fixture(params=ISAS)
def isa(request):
    return native.load(request.param)


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
    x = np.concatenate([np.linspace(-120, 120, 4001), np.geomspace(1e-30, 1, 999), [0, -0.0, 87.9, -87.9]]).astype(
        np.float32
    )
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


def test_concat_puts_each_row_of_one_behind_the_same_row_of_the_other(isa):
    rng = np.random.default_rng(3)
    x, y = rows_of(rng, 70, 33), rows_of(rng, 70, 130)
    (out,) = Recorded(isa, 2, (33, 130), elementwise_cpu.record_concat)(x, y)
    assert np.array_equal(out, np.concatenate((x, y), axis=1))


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
        record_attention(program, x, x, x, 0, Attention(5, 1, 20, 12, 0.3))
    with pytest.raises(ShapeError):
        record_short_conv(program, x, weight(np.ones((9, 4))), 0)
    with pytest.raises(ShapeError):
        record_delta_rule(program, x, y, y, weight(np.ones(9)), weight(np.ones(9)), 0, Delta(1, 3, 20, 4, 1e-6))
