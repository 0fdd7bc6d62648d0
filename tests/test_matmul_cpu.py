"""Matrix products of the CPU library against float64 products of int8 activations, on every instruction set."""

import ctypes
import mmap

import numpy as np
import pytest

from tandem.errors import FormatError, SettingError, ShapeError
from tandem.native import ISAS, best_isa, load
from tandem.ops.base import Weight
from tandem.ops.matmul_cpu import hand_over_grids, record_gate_up, record_matmul, record_matmul_add
from tandem.ops.program import Pool, Program, StepArgs
from tandem.quant import FORMATS, random_blocks, unpack_tensor

AVAILABLE = ISAS[: ISAS.index(best_isa()) + 1]
FLOATS = (0, 1, 30)
POOLS = {}


def pool(native, threads):
    if (native.isa, threads) not in POOLS:
        POOLS[native.isa, threads] = Pool(native, threads)
    return POOLS[native.isa, threads]


def make_weight(ggml_type, shape, seed=0, spare_bytes=0, scale=None):
    """A random weight; its rows lie spare_bytes apart, with 0xFF (NaN in every float type) between and around them."""
    form = FORMATS[ggml_type]
    rng = np.random.default_rng(seed)
    row_bytes = shape[-1] // form.block_values * form.block_bytes
    n_rows = int(np.prod(shape[:-1]))
    padded = np.full((n_rows + 2, row_bytes + spare_bytes), 0xFF, np.uint8)
    blocks = padded[1:-1].reshape(*shape[:-1], row_bytes + spare_bytes)[..., :row_bytes]
    blocks[...] = random_blocks(ggml_type, n_rows * row_bytes // form.block_bytes, rng).reshape(blocks.shape)
    return Weight(f"w{ggml_type}", tuple(shape), ggml_type, blocks, scale)


def values(weight):
    blocks = np.ascontiguousarray(weight.blocks).reshape(-1)
    return unpack_tensor(blocks, weight.ggml_type, weight.shape).astype(np.float64)


def rounded(x):
    groups = x.reshape(*x.shape[:-1], -1, 32)
    scale = np.max(np.abs(groups), axis=-1, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    return (np.rint(groups * inverse).astype(np.float64) * scale).reshape(x.shape)


def inputs(rows, cols, seed=1):
    return np.random.default_rng(seed).standard_normal((rows, cols), np.float32)


def run(native, threads, xs, record):
    """Results of a program whose inputs are float32 rows; the arena is NaN before the run."""
    program = Program(native, len(xs[0]), 1)
    buffers = [program.buffer(x.shape[1]) for x in xs]
    outs = record(program, *buffers)
    program.place(keep=(*buffers, *outs))
    program.finish()
    program.arena.view(np.uint8)[:] = 0xFF
    rows = len(xs[0])
    for buffer, x in zip(buffers, xs, strict=True):
        program.rows(buffer, rows)[:] = x
    program.run_trunk(pool(native, threads), StepArgs(rows=rows))
    return [program.rows(out, rows).copy() for out in outs]


def matmul(native, x, *weights, threads=1):
    return run(native, threads, [x], lambda program, buffer: record_matmul(program, buffer, list(weights)))


def expected(x, weight, *, exact=False):
    used = x.astype(np.float64) if exact or weight.ggml_type in FLOATS else rounded(x)
    product = used @ values(weight).T
    return product if weight.scale is None else product * weight.scale


def assert_near(found, wanted, weight, x):
    """Within 4e-6 of the largest sum of magnitudes that the float32 additions can have passed through."""
    size = np.abs(x).astype(np.float64) @ np.abs(values(weight)).T
    bound = 4e-6 * np.max(size) * (1 if weight.scale is None else abs(weight.scale[0]))
    assert np.all(np.isfinite(found))
    assert np.max(np.abs(found - wanted)) <= bound


def awkward_cols(ggml_type):
    block = FORMATS[ggml_type].block_values
    return [k for k in (32, 96, 256, 576, 640, 768, 2304) if k % block == 0]


@pytest.mark.parametrize("ggml_type", FORMATS, ids=lambda t: FORMATS[t].name)
@pytest.mark.parametrize("isa", AVAILABLE)
def test_rows_of_blocks_unpack_to_what_numpy_says(isa, ggml_type):
    native = load(isa)
    hand_over_grids(native)
    cols = 768
    weight = make_weight(ggml_type, (4, cols))
    found = np.full((4, cols), np.nan, np.float32)
    for row, out in zip(np.ascontiguousarray(weight.blocks), found, strict=True):
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (row, out)]
        native.lib.tandem_unpack_row(ggml_type, pointers[0], ctypes.c_int64(cols), pointers[1])
    wanted = values(weight)
    assert np.max(np.abs(found - wanted)) <= 1e-6 * np.max(np.abs(wanted))


@pytest.mark.parametrize("ggml_type", FORMATS, ids=lambda t: FORMATS[t].name)
@pytest.mark.parametrize("isa", AVAILABLE)
def test_products_equal_float64_products_of_the_rounded_input(isa, ggml_type):
    native = load(isa)
    for cols in awkward_cols(ggml_type):
        for n, rows in ((1, 3), (3, 1), (17, 9), (65, 2), (65, 33)):
            weight = make_weight(ggml_type, (n, cols), seed=n, spare_bytes=n % 2 * 6)
            x = inputs(rows, cols)
            (found,) = matmul(native, x, weight)
            assert_near(found, expected(x, weight), weight, x)


@pytest.mark.parametrize("ggml_type", FORMATS, ids=lambda t: FORMATS[t].name)
@pytest.mark.parametrize("isa", AVAILABLE)
def test_products_are_near_those_of_the_unrounded_input(isa, ggml_type):
    native = load(isa)
    weight, x = make_weight(ggml_type, (33, 2304)), inputs(11, 2304)
    (found,) = matmul(native, x, weight)
    wanted = expected(x, weight, exact=True)
    assert np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2)) < (1e-6 if ggml_type in FLOATS else 0.02)


@pytest.mark.parametrize("ggml_type", FORMATS, ids=lambda t: FORMATS[t].name)
@pytest.mark.parametrize("isa", AVAILABLE)
def test_a_row_has_the_same_bits_alone_and_anywhere_among_eight(isa, ggml_type):
    native = load(isa)
    for cols in (576, 768) if FORMATS[ggml_type].block_values < 256 else (768,):
        weight, x = make_weight(ggml_type, (19, cols)), inputs(8, cols)
        alone = np.concatenate([matmul(native, row[None], weight)[0] for row in x])
        for rows in range(2, 9):
            (together,) = matmul(native, x[:rows], weight)
            assert together.tobytes() == alone[:rows].tobytes()
            neighbours = np.full_like(x[:rows], np.nan)
            neighbours[rows - 1] = x[0]
            assert matmul(native, neighbours, weight)[0][rows - 1].tobytes() == alone[0].tobytes()


@pytest.mark.parametrize("isa", AVAILABLE)
def test_values_are_rounded_alike_in_whole_spans_and_in_the_rest_of_a_row(isa):
    native = load(isa)
    for name in ("Q4_1", "Q5_0", "Q8_0"):
        ggml_type = next(t for t, form in FORMATS.items() if form.name == name)
        whole, x = make_weight(ggml_type, (19, 512)), inputs(8, 512)
        x[:, 480:] = 0
        x[1] *= 1e-41
        x[2, :32] = 0
        short_bytes = 480 // 32 * FORMATS[ggml_type].block_bytes
        short = Weight(name, (19, 480), ggml_type, np.ascontiguousarray(whole.blocks[:, :short_bytes]))
        for rows in (1, 8):
            in_spans, in_rest = matmul(native, x[:rows], whole)[0], matmul(native, x[:rows, :480], short)[0]
            assert in_spans.tobytes() == in_rest.tobytes()


def at_the_end_of_readable_memory(weight):
    """The same weight, with the last byte of its blocks right before a page that cannot be read."""
    libc = ctypes.CDLL(None, use_errno=True)
    page = mmap.PAGESIZE
    pages = mmap.mmap(-1, (-(-weight.blocks.nbytes // page) + 1) * page)
    memory = np.frombuffer(pages, np.uint8)
    end = len(memory) - page
    assert libc.mprotect(ctypes.c_void_p(memory.ctypes.data + end), ctypes.c_size_t(page), 0) == 0
    blocks = memory[end - weight.blocks.nbytes : end].reshape(weight.blocks.shape)
    blocks[:] = weight.blocks
    return Weight(weight.name, weight.shape, weight.ggml_type, blocks)


@pytest.mark.parametrize("ggml_type", FORMATS, ids=lambda t: FORMATS[t].name)
@pytest.mark.parametrize("isa", AVAILABLE)
def test_nothing_past_the_last_block_is_read(isa, ggml_type):
    native = load(isa)
    for cols in awkward_cols(ggml_type)[:4]:
        weight = make_weight(ggml_type, (33, cols))
        guarded, x = at_the_end_of_readable_memory(weight), inputs(9, cols)
        for rows in (1, 9):
            assert matmul(native, x[:rows], guarded)[0].tobytes() == matmul(native, x[:rows], weight)[0].tobytes()


@pytest.mark.parametrize("rows", [1, 3, 9, 65])
@pytest.mark.parametrize("isa", AVAILABLE)
def test_the_number_of_threads_does_not_change_a_bit(isa, rows):
    native = load(isa)
    weights = [make_weight(t, (n, 512), seed=n) for t, n in ((12, 300), (14, 33), (0, 5), (8, 64))]
    x = inputs(rows, 512)
    one = matmul(native, x, *weights)
    for threads in (2, 3):
        for a, b in zip(one, matmul(native, x, *weights, threads=threads), strict=True):
            assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("isa", AVAILABLE)
def test_extreme_codes_do_not_saturate(isa):
    native = load(isa)
    # Where the codes of each type lie in its block.
    codes = {"Q8_0": (2, 34), "Q6_K": (0, 192), "Q5_1": (4, 24), "IQ4_NL": (2, 18), "Q4_K": (16, 144)}
    extremes = ("Q8_0", 0x80), ("Q8_0", 0x7F), ("Q6_K", 0xFF), ("Q5_1", 0xFF), ("IQ4_NL", 0x00), ("Q4_K", 0xFF)
    for name, fill in extremes:
        ggml_type = next(t for t, form in FORMATS.items() if form.name == name)
        weight = make_weight(ggml_type, (33, 256))
        blocks = weight.blocks.reshape(-1, FORMATS[ggml_type].block_bytes)
        blocks[:, slice(*codes[name])] = fill
        weight = Weight("w", weight.shape, ggml_type, blocks.reshape(weight.shape[0], -1))
        for rows in (1, 9):
            for sign in (1, -1):
                x = np.full((rows, 256), sign * 1.5, np.float32)
                (found,) = matmul(native, x, weight)
                assert_near(found, expected(x, weight), weight, x)


@pytest.mark.parametrize("rows", [2, 40])
@pytest.mark.parametrize("isa", AVAILABLE)
def test_residual_scale_and_gated_activation(isa, rows):
    native = load(isa)
    x, residual = inputs(rows, 320), inputs(rows, 70, seed=2)
    weight = make_weight(40, (70, 320), scale=np.array([0.37], np.float32))
    (found,) = run(native, 2, [x, residual], lambda p, a, b: [record_matmul_add(p, a, weight, b)])
    assert_near(found - residual, expected(x, weight), weight, x)

    gate, up = make_weight(2, (70, 320), seed=3), make_weight(3, (70, 320), seed=4)
    for activation in ("silu", "gelu_tanh"):
        (found,) = run(native, 2, [x], lambda p, a, name=activation: [record_gate_up(p, a, gate, up, name)])
        g, u = expected(x, gate), expected(x, up)
        with np.errstate(over="ignore"):
            if activation == "silu":
                wanted = g / (1 + np.exp(-g)) * u
            else:
                wanted = 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) * u
        assert np.max(np.abs(found - wanted)) <= 1e-5 * np.max(np.abs(g)) * np.max(np.abs(u))


@pytest.mark.parametrize("isa", AVAILABLE)
def test_zero_tiny_and_huge_inputs(isa):
    native = load(isa)
    weight = make_weight(12, (40, 256))
    x = inputs(12, 256)
    x[0], x[1], x[2] = 0, x[1] * 1e-41, x[2] * 1e30
    (found,) = matmul(native, x, weight)
    assert np.all(found[0] == 0) and np.all(np.abs(found[1]) < 1e-36)
    assert_near(found[2:3], expected(x[2:3], weight), weight, x[2:3])


def test_wrong_shapes_and_types_are_refused_with_the_tensor_named():
    native = load("scalar")
    program = Program(native, 1, 1)
    x = program.buffer(256)
    with pytest.raises(ShapeError, match="w12.*512"):
        record_matmul(program, x, [make_weight(12, (4, 512))])
    with pytest.raises(FormatError, match="w.*99"):
        record_matmul(program, x, [Weight("w", (4, 256), 99, np.zeros((4, 256), np.uint8))])
    with pytest.raises(ShapeError, match="144"):
        record_matmul(program, x, [Weight("w", (4, 256), 12, np.zeros((4, 100), np.uint8))])
    with pytest.raises(SettingError, match="silu"):
        record_gate_up(program, x, make_weight(12, (4, 256)), make_weight(12, (4, 256)), "sillu")
