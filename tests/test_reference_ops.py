"""Properties of the reference ops that hold whatever the numbers: they are what the C++ twins are tested against."""

import gguf
import numpy as np
import pytest

from tandem.errors import RequestError, SettingError
from tandem.models.base import DeltaState, KvState
from tandem.ops import delta, experts, norm
from tandem.ops.attention import as_stored, attend
from tandem.ops.base import Attention, Delta, Rope, Weight
from tandem.ops.matmul import Unpacked
from tandem.ops.reference import ReferenceOps, ReferenceState, ReferenceStep
from tandem.ops.rope import inv_frequencies, rotate, yarn
from tandem.quant import format_by_name


def rng(seed=0):
    return np.random.default_rng(seed)


def normal(*shape, seed=0):
    return rng(seed).standard_normal(shape, np.float32)


def weight(values, format_name="F32", scale=None):
    quant = format_by_name(format_name)
    blocks = quant.pack(values.reshape(-1, quant.block_values)).reshape(*values.shape[:-1], -1)
    return Weight("w", values.shape, quant.ggml_type, blocks, scale)


def ops_for(rows, specs=(), start=0, state=None, out_rows=None, **state_args):
    state = state or ReferenceState(specs, 4096, **state_args)
    positions = np.arange(start, start + rows, dtype=np.int32)
    out_rows = np.arange(rows, dtype=np.int32) if out_rows is None else out_rows
    return ReferenceOps(ReferenceStep(np.zeros(rows, np.int32), positions, out_rows), state)


def assert_close(got, expected, tolerance=1e-5):
    error = np.sqrt(np.mean(np.square(got - expected)) / np.mean(np.square(expected)))
    assert error < tolerance, f"relative RMS error {error:.2e}"


def delta_inputs(rows, k_heads, v_heads, dim, dtype=np.float64):
    r = rng(rows)
    q, k = (norm.l2_norm(r.standard_normal((rows, k_heads, dim)), 1e-6).astype(dtype) for _ in range(2))
    v = r.standard_normal((rows, v_heads, dim)).astype(dtype)
    log_decay = -r.exponential(0.5, (rows, v_heads)).astype(dtype)
    beta = norm.sigmoid(r.standard_normal((rows, v_heads))).astype(dtype)
    return q, k, v, log_decay, beta, r.standard_normal((v_heads, dim, dim)).astype(dtype)


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 150])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 1e-5)])
def test_chunked_delta_rule_equals_the_recurrence(rows, dtype, tolerance):
    *inputs, state = delta_inputs(rows, 2, 6, 16, dtype)
    stepped, chunked = state.copy(), state.copy()
    assert_close(delta.delta_chunks(*inputs, chunked), delta.delta_steps(*inputs, stepped), tolerance)
    assert_close(chunked, stepped, tolerance)


def test_chunked_delta_rule_survives_decays_that_vanish():
    q, k, v, log_decay, beta, state = delta_inputs(130, 2, 2, 16, np.float32)
    log_decay *= 400
    stepped, chunked = state.copy(), state.copy()
    expected = delta.delta_steps(q, k, v, log_decay, beta, stepped)
    assert_close(delta.delta_chunks(q, k, v, log_decay, beta, chunked), expected)
    assert_close(chunked, stepped)


def test_delta_rule_stores_and_recalls_a_value_with_beta_one_and_no_decay():
    key = np.zeros((1, 1, 8))
    key[..., 3] = 1
    value, state = normal(1, 1, 8).astype(np.float64), np.zeros((1, 8, 8))
    zero, one = np.zeros((1, 1)), np.ones((1, 1))
    delta.delta_steps(key, key, normal(1, 1, 8, seed=1).astype(np.float64), zero, one, state)
    assert_close(delta.delta_steps(key, key, value, zero, one, state), value)


def test_value_head_j_reads_key_head_j_modulo_key_heads():
    q, k, v, log_decay, beta, state = delta_inputs(5, 2, 6, 8)
    alone = []
    for head in range(6):
        own_keys = (part[:, [head % 2]] for part in (q, k))
        own_values = (part[:, [head]] for part in (v, log_decay, beta))
        alone.append(delta.delta_steps(*own_keys, *own_values, state[[head]].copy()))
    assert_close(delta.delta_steps(q, k, v, log_decay, beta, state.copy()), np.concatenate(alone, axis=1))


@pytest.mark.parametrize("cuts", [[1, 2, 3], [1], [2, 3, 64]])
def test_short_conv_does_not_depend_on_how_rows_are_cut_into_steps(cuts):
    x, taps = normal(70, 10), normal(10, 4, seed=1)
    whole, tail = delta.short_conv(x, taps, np.zeros((3, 10), np.float32))
    state, parts = np.zeros((3, 10), np.float32), []
    for part in np.split(x, cuts):
        y, state = delta.short_conv(part, taps, state)
        parts.append(y)
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    np.testing.assert_array_equal(state, tail)


def test_last_conv_tap_multiplies_the_newest_input():
    taps = np.zeros((1, 4), np.float32)
    taps[0, 3] = 2
    y, tail = delta.short_conv(np.array([[1], [5]], np.float32), taps, np.zeros((3, 1), np.float32))
    np.testing.assert_allclose(y, norm.silu(np.array([[2], [10]], np.float32)), rtol=1e-6)
    np.testing.assert_array_equal(tail, [[0], [1], [5]])


def test_delta_rule_op_gives_the_same_rows_in_one_step_and_token_by_token():
    spec = Delta(2, 4, 32, 4, 1e-6)
    layer = DeltaState(4, 32, 32, (2 * 2 + 4) * 32, 4)
    qkv, alpha, beta = normal(65, 256), normal(65, 4, seed=1), normal(65, 4, seed=2)
    a, dt = weight(-np.exp(normal(4, seed=3))), weight(normal(4, seed=4))
    whole = ops_for(65, [layer]).delta_rule(qkv, alpha, beta, a, dt, 0, spec)
    state = ReferenceState([layer], 100)
    one_by_one = [
        ops_for(1, start=t, state=state).delta_rule(qkv[t : t + 1], alpha[t : t + 1], beta[t : t + 1], a, dt, 0, spec)
        for t in range(65)
    ]
    assert_close(np.concatenate(one_by_one), whole)


def attention_by_loops(q, k, v, spec, positions):
    out = np.zeros((len(q), spec.num_heads, spec.value_dim))
    for t, p in enumerate(positions):
        for h in range(spec.num_heads):
            kv_head = h // (spec.num_heads // spec.num_kv_heads)
            first = 0 if spec.window is None else max(0, p - spec.window + 1)
            seen = slice(first, p + 1)
            query = q[t].reshape(spec.num_heads, -1)[h]
            scores = k.reshape(len(k), spec.num_kv_heads, -1)[seen, kv_head] @ query * spec.scale
            if spec.softcap:
                scores = spec.softcap * np.tanh(scores / spec.softcap)
            powers = np.exp(scores - scores.max())
            out[t, h] = powers @ v.reshape(len(v), spec.num_kv_heads, -1)[seen, kv_head] / powers.sum()
    return out.reshape(len(q), -1)


@pytest.mark.parametrize("window", [None, 1, 7, 64, 1000])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_equals_its_definition(window, softcap):
    spec = Attention(6, 2, 16, 8, 0.25, window, softcap)
    q, k, v = normal(65, 96), normal(73, 32, seed=1), normal(73, 16, seed=2)
    positions = np.arange(8, 73)
    assert_close(attend(q, k, v, positions, spec), attention_by_loops(q, k, v, spec, positions))


def test_attention_blocks_of_queries_change_nothing():
    spec = Attention(1, 1, 8, 8, 1.0)
    q, k, v = normal(600, 8), normal(600, 8, seed=1), normal(600, 8, seed=2)
    assert_close(attend(q, k, v, np.arange(600), spec), attention_by_loops(q, k, v, spec, range(600)))


def test_a_window_that_covers_everything_is_no_window():
    q, k, v = normal(9, 32), normal(9, 32, seed=1), normal(9, 32, seed=2)
    results = [attend(q, k, v, np.arange(9), Attention(2, 2, 16, 16, 0.25, window)) for window in (None, 9)]
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("kv", ["f32", "f16", "q8_0"])
def test_attention_reads_keys_and_values_as_the_cache_stores_them(kv):
    spec = Attention(4, 2, 32, 32, 0.2)
    q, k, v = normal(10, 128), normal(10, 64, seed=1), normal(10, 64, seed=2)
    state = ReferenceState([KvState(2, 32, 32)], 10, kv)
    first = ops_for(7, state=state).attention(q[:7], k[:7], v[:7], 0, spec)
    then = ops_for(3, start=7, state=state).attention(q[7:], k[7:], v[7:], 0, spec)
    expected = attend(q, as_stored(k, kv), as_stored(v, kv), np.arange(10), spec)
    assert_close(np.concatenate([first, then]), expected, 1e-6)


def test_attention_overwrites_a_branch_that_was_left():
    spec, layer = Attention(1, 1, 32, 32, 0.2), [KvState(1, 32, 32)]
    q, k, v = normal(6, 32), normal(6, 32, seed=1), normal(6, 32, seed=2)
    expected = ops_for(6, layer).attention(q, k, v, 0, spec)
    state = ReferenceState(layer, 10)
    ops_for(6, state=state).attention(q, normal(6, 32, seed=3), v, 0, spec)
    np.testing.assert_array_equal(ops_for(6, state=state).attention(q, k, v, 0, spec), expected)


def test_int8_rounding_is_the_q8_0_format():
    x = normal(5, 96) * 3
    x[2, 32:64] = 0
    # Not our own quantizer: it searches for a better scale than the largest value over 127.
    kind = gguf.GGMLQuantizationType.Q8_0
    expected = gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind)
    np.testing.assert_allclose(as_stored(x, "q8_0"), expected, rtol=1e-6, atol=1e-7)


def test_a_position_past_the_context_is_an_error():
    with pytest.raises(RequestError, match="position 10 does not fit a context of 10"):
        ops_for(1, start=10, state=ReferenceState([], 10))


def test_an_unknown_cache_type_is_an_error():
    with pytest.raises(SettingError, match="q8_0"):
        ReferenceState([], 10, "q8")


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_keeps_products_of_rows_at_the_same_distance(interleaved):
    rope = Rope(inv_frequencies(1e4, 32), interleaved)
    q, k = normal(1, 64), normal(1, 64, seed=1)

    def product(at_q, at_k):
        return float((rotate(q, np.array([at_q]), 64, rope) * rotate(k, np.array([at_k]), 64, rope)).sum())

    assert product(9, 4) == pytest.approx(product(1005, 1000), rel=1e-4)
    assert product(9, 4) != pytest.approx(product(9, 5), rel=1e-4)


def test_rope_layouts_differ_by_a_permutation_of_the_dims():
    x, positions = normal(5, 3 * 16), np.array([0, 3, 9, 100, 70000])
    frequencies = inv_frequencies(1e4, 16)
    halves = rotate(x, positions, 16, Rope(frequencies))
    pairs_first = np.arange(16).reshape(2, 8).T.ravel()  # dims (i, i + 8) side by side
    permuted = x.reshape(5, 3, 16)[..., pairs_first].reshape(5, -1)
    interleaved = rotate(permuted, positions, 16, Rope(frequencies, interleaved=True))
    np.testing.assert_array_equal(interleaved.reshape(5, 3, 16), halves.reshape(5, 3, 16)[..., pairs_first])


def test_rope_passes_the_dims_past_its_pairs_through():
    x = normal(4, 2 * 64)
    turned = rotate(x, np.arange(4) + 5, 64, Rope(inv_frequencies(1e4, 16))).reshape(4, 2, 64)
    np.testing.assert_array_equal(turned[..., 16:], x.reshape(4, 2, 64)[..., 16:])
    assert np.abs(turned[..., :16] - x.reshape(4, 2, 64)[..., :16]).min() > 0


def test_rope_magnitude_scales_only_the_rotated_dims():
    x, positions = normal(3, 32), np.arange(3)
    plain = rotate(x, positions, 32, Rope(inv_frequencies(1e4, 16)))
    scaled = rotate(x, positions, 32, Rope(inv_frequencies(1e4, 16), magnitude=1.5))
    np.testing.assert_allclose(scaled[:, :16], 1.5 * plain[:, :16], rtol=1e-6)
    np.testing.assert_array_equal(scaled[:, 16:], plain[:, 16:])


def test_yarn_keeps_fast_pairs_and_slows_the_slowest_by_the_factor():
    frequencies = inv_frequencies(1e4, 128)
    slowed, magnitude = yarn(frequencies, 1e4, 4.0, 4096)
    np.testing.assert_array_equal(slowed[:8], frequencies[:8])
    np.testing.assert_allclose(slowed[-8:], frequencies[-8:] / 4, rtol=1e-6)
    assert np.all(np.diff(slowed) < 0)
    assert magnitude == pytest.approx(1 + 0.1 * np.log(4))


def test_rms_norm_of_heads_is_rms_norm_of_each_part():
    x, gain = normal(5, 4 * 8), normal(8, seed=1)
    parts = [norm.rms_norm(part, gain, 1e-6) for part in np.split(x, 4, axis=1)]
    np.testing.assert_allclose(norm.rms_norm(x, gain, 1e-6, 4), np.concatenate(parts, axis=1), rtol=1e-6)


def test_activations_are_finite_at_the_ends_of_float32():
    ends = np.array([-3e38, -1e4, -90, 0, 90, 1e4, 3e38], np.float32)
    with np.errstate(over="raise", invalid="raise"):
        np.testing.assert_allclose(norm.sigmoid(ends), [0, 0, 8.194e-40, 0.5, 1, 1, 1], rtol=1e-3)
        np.testing.assert_allclose(norm.silu(ends)[1:], [0, -7.4e-38, 0, 90, 1e4, 3e38], rtol=1e-2)


def test_experts_are_chosen_by_probability_and_ties_go_to_the_lower_id():
    logits = np.array([[1, 3, 3, 0, 3], [0, 0, 0, 0, 0]], np.float32)
    ids, weights = experts.choose(logits, 2)
    np.testing.assert_array_equal(ids, [[1, 2], [0, 1]])
    np.testing.assert_allclose(weights, 0.5, rtol=1e-6)


def test_expert_weights_are_the_renormalised_softmax():
    logits = normal(7, 16) * 3
    ids, weights = experts.choose(logits, 5)
    powers = np.exp(logits.astype(float))
    for row in range(7):
        order = np.argsort(-logits[row])[:5]
        np.testing.assert_array_equal(ids[row], order)
        np.testing.assert_allclose(weights[row], powers[row, order] / powers[row, order].sum(), rtol=1e-5)


def test_experts_op_equals_one_dense_feed_forward_per_choice():
    gate, up, down = normal(6, 8, 32), normal(6, 8, 32, seed=1), normal(6, 32, 8, seed=2)
    x, router = normal(9, 32, seed=3), normal(6, 32, seed=4)
    ops = ops_for(9)
    routing = ops.route(x, weight(router), 3)
    expected = np.zeros_like(x)
    for t in range(9):
        for e, w in zip(routing.ids[t], routing.weights[t], strict=True):
            expected[t] += w * (down[e] @ (norm.silu(gate[e] @ x[t]) * (up[e] @ x[t])))
    assert_close(ops.experts(x, routing, weight(gate), weight(up), weight(down), "silu"), expected)


def test_scale_companions_multiply_the_products_of_each_expert():
    gate, up, down = normal(4, 8, 32), normal(4, 8, 32, seed=1), normal(4, 32, 8, seed=2)
    x, router, factors = normal(5, 32, seed=3), weight(normal(4, 32, seed=4)), np.array([0.5, 2, 3, 0.1], np.float32)
    ops = ops_for(5)
    routing = ops.route(x, router, 2)
    scaled = ops.experts(x, routing, weight(gate, scale=factors), weight(up), weight(down, scale=factors[:1]), "silu")
    folded = ops.experts(
        x, routing, weight(gate * factors[:, None, None]), weight(up), weight(down * factors[0]), "silu"
    )
    assert_close(scaled, folded)
    matrix = weight(gate[0], scale=factors[2:3])
    assert_close(ops.matmul(x, matrix)[0], 3 * x @ gate[0].T)


def test_split_gate_takes_values_and_gates_head_by_head():
    x = np.arange(12, dtype=np.float32).reshape(1, 12)
    values, gates = ops_for(1).split_gate(x, 3)
    np.testing.assert_array_equal(values, [[0, 1, 2, 6, 7, 8]])
    np.testing.assert_array_equal(gates, [[3, 4, 5, 9, 10, 11]])


def test_embed_takes_the_rows_of_the_tokens():
    table, tokens = normal(11, 64), np.array([3, 10, 3], np.int32)
    step = ReferenceStep(tokens, np.arange(3, dtype=np.int32), np.array([2]))
    ops = ReferenceOps(step, ReferenceState([], 8))
    np.testing.assert_allclose(ops.embed(weight(table), 2.0), 2 * table[tokens], rtol=1e-6)
    np.testing.assert_array_equal(ops.output_rows(table[:3]), table[2:3])


def test_rounded_activations_change_quantized_products_only():
    x, matrix = normal(3, 64), normal(5, 64, seed=1)
    step = ReferenceStep(np.zeros(3, np.int32), np.arange(3), np.arange(3))
    exact = ReferenceOps(step, ReferenceState([], 8))
    rounded = ReferenceOps(step, ReferenceState([], 8), quantize_activations=True)
    np.testing.assert_array_equal(*(ops.matmul(x, weight(matrix))[0] for ops in (exact, rounded)))
    products = [ops.matmul(x, weight(matrix, "Q8_0"))[0] for ops in (exact, rounded)]
    assert np.abs(products[0] - products[1]).max() > 0
    assert_close(products[1], products[0], 0.02)


def test_unpacked_weights_stay_within_their_byte_limit():
    unpacked = Unpacked(limit_bytes=3 * 4 * 64)
    weights = [weight(normal(64, seed=seed)) for seed in range(5)]
    for w in weights * 2:
        np.testing.assert_array_equal(unpacked.get(w), w.blocks.view(np.float32))
        assert unpacked.size_bytes <= unpacked.limit_bytes
