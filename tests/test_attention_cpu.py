"""Attention over the cache on the CPU: against float64, and bit-equal for any split of few rows and any threads."""

import functools

import numpy as np
import pytest
from close import assert_close
from recorded_ops import EXACT, ISAS, MAX_ROWS, KvSpec, Recorded, Sequence, rows_of, weight

from tandem import native
from tandem.ops import attention, norm, rope
from tandem.ops.attention_cpu import record_attention
from tandem.ops.base import Attention, Rope
from tandem.ops.cpu import CpuOps
from tandem.ops.state_cpu import CpuState


@pytest.fixture(params=ISAS)
def isa(request):
    return native.load(request.param)


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
        results.append(
            np.concatenate([sequence.step(*[a[b : b + rows] for a in inputs]) for b in range(4090, 4110, rows)])
        )
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
