"""The mixture of experts of the CPU library against float64 with activations rounded to int8."""

import numpy as np
import pytest

from tandem.errors import ShapeError
from tandem.native import ISAS, best_isa, load
from tandem.ops.base import Weight
from tandem.ops.experts_cpu import record_experts
from tandem.ops.program import Pool, Program, StepArgs
from tandem.quant import FORMATS, random_blocks, unpack_tensor

AVAILABLE = ISAS[: ISAS.index(best_isa()) + 1]
POOLS = {}
F32, F16, Q4_0, Q8_0, Q3_K, Q4_K, Q6_K, IQ3_S, IQ4_XS, NVFP4 = 0, 1, 2, 8, 11, 12, 14, 21, 23, 40


def make_weight(ggml_type, shape, seed, scale=None):
    form = FORMATS[ggml_type]
    row_bytes = shape[-1] // form.block_values * form.block_bytes
    n_blocks = shape[0] * shape[1] * row_bytes // form.block_bytes
    blocks = random_blocks(ggml_type, n_blocks, np.random.default_rng(seed)).reshape(*shape[:-1], row_bytes)
    return Weight(f"experts{seed}", shape, ggml_type, blocks, scale)


def make_experts(types, experts=11, cols=512, size=256, hidden=70):
    scale = np.linspace(0.02, 0.07, experts).astype(np.float32) if types[0] == NVFP4 else None
    shapes = (experts, size, cols), (experts, size, cols), (experts, hidden, size)
    return [make_weight(t, shape, i, scale) for i, (t, shape) in enumerate(zip(types, shapes, strict=True))]


def make_input(rows, experts=11, k=3, cols=512):
    rng = np.random.default_rng(rows)
    x = 0.1 * rng.standard_normal((rows, cols), np.float32)
    ids = np.argsort(rng.random((rows, experts)), axis=1)[:, :k].astype(np.int32)
    return x, ids, rng.uniform(0.1, 1, (rows, k)).astype(np.float32)


def run(isa, threads, x, ids, weights, experts):
    if (isa, threads) not in POOLS:
        POOLS[isa, threads] = Pool(load(isa), threads)
    program = Program(load(isa), len(x), 1)
    inputs = [(program.buffer(a.shape[1], a.dtype), a) for a in (x, ids, weights)]
    out = record_experts(program, *(buffer for buffer, _ in inputs), *experts, "silu")
    program.place(keep=(out, *(buffer for buffer, _ in inputs)))
    program.finish()
    program.arena[:] = 0xFF
    for buffer, a in inputs:
        program.rows(buffer, len(x))[:] = a
    program.run_trunk(POOLS[isa, threads], StepArgs(rows=len(x)))
    return program.rows(out, len(x)).copy()


def rounded(x):
    groups = x.astype(np.float32).reshape(*x.shape[:-1], -1, 32)
    scale = np.max(np.abs(groups), axis=-1, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    return (np.rint(groups * inverse).astype(np.float64) * scale).reshape(x.shape)


def expected(x, ids, weights, experts):
    def product(x, weight, expert):
        blocks = np.ascontiguousarray(weight.blocks[expert]).reshape(-1)
        w = unpack_tensor(blocks, weight.ggml_type, weight.shape[1:]).astype(np.float64)
        used = x if weight.ggml_type in (F32, F16) else rounded(x)
        return w @ used * (1 if weight.scale is None else weight.scale[expert])

    out = np.zeros((len(x), experts[2].shape[1]))
    for row in range(len(x)):
        for expert, weight in zip(ids[row], weights[row], strict=True):
            gate, up = product(x[row], experts[0], expert), product(x[row], experts[1], expert)
            with np.errstate(over="ignore"):
                inner = gate / (1 + np.exp(-gate)) * up
            out[row] += weight * product(inner, experts[2], expert)
    return out


@pytest.mark.parametrize(
    "types", [(F32,) * 3, (Q4_K, Q4_K, Q6_K), (IQ4_XS, Q4_0, Q4_0), (NVFP4,) * 3, (Q4_K, Q6_K, F16)]
)
@pytest.mark.parametrize("isa", AVAILABLE)
def test_the_sum_over_chosen_experts_equals_the_definition(isa, types):
    experts = make_experts(types)
    for rows in (1, 5, 8, 9, 50):
        x, ids, weights = make_input(rows)
        found, wanted = run(isa, 2, x, ids, weights, experts), expected(x, ids, weights, experts)
        # Rounding the inner values may fall on the other side of a half when they differ in the last bit.
        bound = 1e-5 if types == (F32,) * 3 else 1e-3
        assert np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2)) < bound


@pytest.mark.parametrize("routing", ["apart", "shared"])
@pytest.mark.parametrize(
    "types", [(Q4_K, Q4_K, Q6_K), (IQ4_XS,) * 3, (IQ3_S, IQ3_S, IQ4_XS), (Q3_K,) * 3, (Q8_0,) * 3, (F16,) * 3]
)
@pytest.mark.parametrize("isa", AVAILABLE)
def test_a_row_has_the_same_bits_alone_and_among_up_to_eight(isa, types, routing):
    experts = make_experts(types)
    x, ids, weights = make_input(8)
    if routing == "shared":
        ids[:] = ids[0]
    alone = [run(isa, 1, x[i : i + 1], ids[i : i + 1], weights[i : i + 1], experts).tobytes() for i in range(8)]
    for rows in range(2, 9):
        together = run(isa, 2, x[:rows], ids[:rows], weights[:rows], experts)
        assert [row.tobytes() for row in together] == alone[:rows]


@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("isa", AVAILABLE)
def test_the_number_of_threads_does_not_change_a_bit(isa, rows):
    experts = make_experts((IQ4_XS, Q4_K, Q6_K))
    x, ids, weights = make_input(rows)
    one = run(isa, 1, x, ids, weights, experts)
    for threads in (2, 3):
        assert run(isa, threads, x, ids, weights, experts).tobytes() == one.tobytes()


def test_all_rows_on_one_expert():
    experts = make_experts((Q4_K, Q4_K, Q6_K))
    x, ids, weights = make_input(33, k=1)
    ids[:] = 10
    found, wanted = run(best_isa(), 2, x, ids, weights, experts), expected(x, ids, weights, experts)
    assert np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2)) < 1e-3


def test_stacks_that_do_not_fit_together_are_refused():
    gate, up, down = make_experts((Q4_K,) * 3)
    program = Program(load("scalar"), 1, 1)
    x, ids, weights = program.buffer(512), program.buffer(3, np.int32), program.buffer(3)
    with pytest.raises(ShapeError, match="experts2"):
        record_experts(program, x, ids, weights, gate, up, make_weight(Q4_K, (10, 70, 256), 2), "silu")
    with pytest.raises(ShapeError, match="12 ids"):
        record_experts(program, x, program.buffer(12, np.int32), weights, gate, up, down, "silu")
