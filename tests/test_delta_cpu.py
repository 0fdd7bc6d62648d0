"""DeltaNet and the state of a sequence on the CPU: against float64, bit-equal for few rows, sizes and snapshots."""

import numpy as np
import pytest
from close import assert_close
from recorded_ops import EXACT, ISAS, DeltaSpec, KvSpec, Sequence, rows_of, weight

from tandem import native
from tandem.errors import SettingError, ShapeError
from tandem.ops import delta
from tandem.ops.base import Delta
from tandem.ops.delta_cpu import record_delta_rule, record_short_conv
from tandem.ops.state_cpu import CpuState, size_bytes


@pytest.fixture(params=ISAS)
def isa(request):
    return native.load(request.param)


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
        results[-1] = np.concatenate(
            [results[-1], sequence.state.recurrent_memory.view(np.float32).reshape(1, -1)], axis=None
        )
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
