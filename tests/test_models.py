"""Models against `transformers` with the same weights, variants of files against their canonical form.

`logits_of` runs a file on a backend; the tests that compare logits run on all BACKENDS.
"""

import numpy as np
import oracle
import pytest
from backends import BACKENDS, logits_of
from oracle import relative_error
from tiny_models import HYBRIDS, TinyFiles, loaded, retyped

from tandem.models import ARCHS

TOKENS = np.random.default_rng(0).integers(0, 256, 70)
CHUNKINGS = {
    "prefill": [TOKENS],
    "decode": list(TOKENS.reshape(-1, 1)),
    "prefill then decode": [TOKENS[:33], *TOKENS[33:].reshape(-1, 1)],
    "two prefills": [TOKENS[:5], TOKENS[5:]],
}
TOLERANCE = 1e-4  # relative RMS error to transformers with F32 weights
SHALLOW = {"block_count": 1}
SHALLOW_HYBRID = {"block_count": 2, "full_attention_interval": 2}  # one layer of each kind


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """tiny(arch, **variations) -> path; the same request is written once."""
    return TinyFiles(tmp_path_factory.mktemp("tiny"))


def same_as_transformers(backend, path, chunks=None, **config_changes):
    got = logits_of(backend, path, chunks or CHUNKINGS["prefill then decode"])
    assert oracle.check(got, path, TOKENS, **config_changes) < TOLERANCE


# --- against transformers ---


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("arch", ARCHS)
def test_logits_equal_transformers(tiny, backend, arch, chunking):
    same_as_transformers(backend, tiny(arch), CHUNKINGS[chunking])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", HYBRIDS)
@pytest.mark.parametrize(("k_heads", "v_heads"), [(2, 6), (4, 4), (2, 8)])
def test_value_heads_find_their_key_head(tiny, backend, arch, k_heads, v_heads):
    sizes = {"ssm.group_count": k_heads, "ssm.time_step_rank": v_heads, "ssm.inner_size": 32 * v_heads}
    same_as_transformers(backend, tiny(arch, metadata=sizes))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_linear_rope_scaling(tiny, backend, arch):
    path = tiny(arch, metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "rope.freq_base": 1e4})
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    same_as_transformers(backend, path, rope_parameters=rope)
    old = tiny(arch, metadata={"rope.scale_linear": 4.0, "rope.freq_base": 1e4})
    np.testing.assert_array_equal(*(logits_of(backend, p, [TOKENS]) for p in (path, old)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ["llama", "qwen3", *HYBRIDS])
def test_yarn_rope_scaling(tiny, backend, arch):
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 512}
    path = tiny(
        arch, metadata={f"rope.scaling.{key}": value for key, value in scaling.items()} | {"rope.freq_base": 1e4}
    )
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 1e4}
    if arch in HYBRIDS:
        rope |= {"partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    same_as_transformers(backend, path, rope_parameters=rope)


@pytest.mark.parametrize("backend", BACKENDS)
def test_llama_rope_factors(tiny, backend):
    """The file carries what Llama 3.1's frequency rule divides each pair by; transformers applies the rule itself."""
    rule = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    turns = 64 * 1e4 ** (-np.arange(0, 32, 2) / 32) / (2 * np.pi)
    kept = np.clip((turns - 1) / (4 - 1), 0, 1)
    path = tiny("llama", extra={"rope_freqs.weight": 1 / (kept + (1 - kept) / 8)})
    same_as_transformers(backend, path, rope_parameters=rule | {"rope_type": "llama3", "rope_theta": 1e4})
    assert relative_error(logits_of(backend, path, [TOKENS]), logits_of(backend, tiny("llama"), [TOKENS])) > 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
def test_llama_head_dim_apart_from_hidden_size(tiny, backend):
    sizes = {"attention.key_length": 64, "attention.value_length": 64, "rope.dimension_count": 64}
    same_as_transformers(backend, tiny("llama", metadata=sizes))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gemma3_scales_the_rope_of_global_layers_only(tiny, backend):
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base_swa": 5000.0}
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    }
    same_as_transformers(backend, tiny("gemma3", metadata=scaling), rope_parameters=ropes)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "changes",
    [
        {"final_logit_softcapping": 2.0},
        {"attention.sliding_window": 1},
        {"attention.sliding_window": 512},
        {"attention.sliding_window_pattern": 2},
        {"attention.sliding_window_pattern": [True, False, False, True, True, True, False]},
        {"attention.sliding_window": None},
    ],
    ids=str,
)
def test_gemma3_options(tiny, backend, changes):
    same_as_transformers(backend, tiny("gemma3", metadata=changes))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gemma3_27b_scales_queries_by_hidden_size_per_head(tiny, backend):
    path = tiny("gemma3", metadata={"block_count": 62, "embedding_length": 32, "feed_forward_length": 32})
    same_as_transformers(backend, path, query_pre_attn_scalar=32 // 4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gemma3_attention_softcap_bounds_scores(tiny, backend):
    plain, wide, narrow = (
        logits_of(backend, tiny("gemma3", metadata={"attn_logit_softcapping": cap}), [TOKENS])
        for cap in (None, 1e4, 0.5)
    )
    assert relative_error(wide, plain) < 1e-4
    assert relative_error(narrow, plain) > 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv", ["f16", "q8_0"])
@pytest.mark.parametrize("arch", ARCHS)
def test_cache_types_change_logits_only_a_little(tiny, backend, arch, kv):
    exact = logits_of("reference", tiny(arch), [TOKENS], kv="f32")
    error = relative_error(logits_of(backend, tiny(arch), CHUNKINGS["prefill then decode"], kv=kv), exact)
    assert 1e-6 < error < {"f16": 1e-3, "q8_0": 4e-2}[kv]


# --- every variant of a file means what its canonical form means ---


def copy_head_from_embedding(tensors):
    tensors["output.weight"] = tensors["token_embd.weight"]


def per_block(value, hole=0, *, trunk=5, mtp=0):
    """An array with a value for every 4th trunk block and the MTP block, and `hole` for the others."""
    return [value if (i + 1) % 4 == 0 or i >= trunk else hole for i in range(trunk + mtp)]


ATTENTION_ONLY = [True, True, True, False, True]
VARIANTS = {
    "MTP block counted in block_count": (HYBRIDS, {"mtp": True}),
    "MTP block with its own embedding and head": (
        HYBRIDS,
        {
            "mtp": True,
            "extra": {
                f"blk.5.nextn.{name}.weight": np.ones((320, 64)) for name in ("embed_tokens", "shared_head_head")
            },
        },
    ),
    "MTP block without its last norm": (
        HYBRIDS,
        {"mtp": True, "edit": lambda tensors: tensors.pop("blk.5.nextn.shared_head_norm.weight")},
    ),
    "MTP block's router in BF16": (
        ("qwen35moe",),
        {"mtp": True, "edit": retyped(["blk.5.ffn_gate_inp"], "BF16")},
    ),
    "nextn_predict_layers of 0": (HYBRIDS, {"metadata": {"nextn_predict_layers": 0}}),
    "recurrent_layers in place of an interval": (
        HYBRIDS,
        {"metadata": {"attention.recurrent_layers": ATTENTION_ONLY, "full_attention_interval": None}},
    ),
    "recurrent_layers beat the interval": (
        HYBRIDS,
        {"metadata": {"attention.recurrent_layers": ATTENTION_ONLY, "full_attention_interval": 2}},
    ),
    "recurrent_layers with an MTP block": (
        HYBRIDS,
        {"mtp": True, "metadata": {"attention.recurrent_layers": [*ATTENTION_ONLY, False]}},
    ),
    "rope sections of 3 entries": (HYBRIDS, {"metadata": {"rope.dimension_sections": [2, 1, 1]}}),
    "no rope sections": (HYBRIDS, {"metadata": {"rope.dimension_sections": None}}),
    "fused gate and up of experts": (("qwen35moe",), {"fuse": ("gate_up_exps",)}),
    "fused attention q, k, v": (tuple(ARCHS), {"fuse": ("attn_qkv",)}),
    "everything fused, with MTP": (HYBRIDS, {"fuse": ("attn_qkv", "gate_up_exps"), "mtp": True}),
    "scale companions": (tuple(ARCHS), {"scales": True}),
    "scale companions of MTP blocks": (HYBRIDS, {"scales": True, "mtp": True}),
    "input_scale companions": (
        tuple(ARCHS),
        {"extra": {"blk.0.ffn_gate.input_scale": [2.0], "output.input_scale": [3.0]}},
    ),
    "head counts as arrays": (
        HYBRIDS,
        {"metadata": {"attention.head_count": [4] * 5, "attention.head_count_kv": per_block(2)}},
    ),
    "head counts as arrays, with MTP": (
        HYBRIDS,
        {
            "mtp": True,
            "metadata": {
                "attention.head_count": per_block(4, mtp=1),
                "attention.head_count_kv": per_block(2, 7, mtp=1),
            },
        },
    ),
    "expert sizes as an array": (("qwen35moe",), {"metadata": {"expert_feed_forward_length": [64] * 5}}),
    "feed-forward sizes as an array": (("qwen35",), {"metadata": {"feed_forward_length": [128] * 5}}),
    "feed_forward_length of 0 beside experts": (("qwen35moe",), {"metadata": {"feed_forward_length": 0}}),
    "gating named": (
        ("qwen35moe",),
        {"metadata": {"expert_gating_func": 1, "expert_weights_norm": True, "expert_weights_scale": 1.0}},
    ),
    "shared expert's gate with two dims": (
        ("qwen35moe",),
        {"edit": retyped(["ffn_gate_inp_shexp"], shape=(1, 64))},
    ),
    "conv weight with three dims": (HYBRIDS, {"edit": retyped(["ssm_conv1d"], shape=(256, 1, 4))}),
    "rope scaling of type none": (tuple(ARCHS), {"metadata": {"rope.scaling.type": "none"}}),
    "vocab_size key": (tuple(ARCHS), {"metadata": {"vocab_size": 320}}),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("arch", "variant"), [(arch, name) for name, (archs, _) in VARIANTS.items() for arch in archs])
def test_variant_gives_the_logits_of_the_canonical_form(tiny, backend, arch, variant):
    got, expected = (
        logits_of(backend, path, [TOKENS[:40], TOKENS[40:41]])
        for path in (tiny(arch, **VARIANTS[variant][1]), tiny(arch))
    )
    assert relative_error(got, expected) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ARCHS)
def test_a_file_without_a_head_uses_its_embedding(tiny, backend, arch):
    tied, copied = tiny(arch, tied=True), tiny(arch, edit=copy_head_from_embedding)
    np.testing.assert_array_equal(*(logits_of(backend, path, [TOKENS]) for path in (tied, copied)))
    assert loaded(tied)[1]["output.weight"].name == "token_embd.weight"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("router_type", ["F16", "BF16"])
def test_routers_may_be_half_precision(tiny, backend, router_type):
    half = {"edit": retyped(["ffn_gate_inp"], router_type)}

    def rounded(tensors):
        retyped(["ffn_gate_inp"], router_type)(tensors)
        retyped(["ffn_gate_inp"], "F32")(tensors)

    paths = tiny("qwen35moe", **half), tiny("qwen35moe", edit=rounded)
    assert relative_error(*(logits_of(backend, path, [TOKENS]) for path in paths)) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_expert_sizes_may_differ_between_blocks(tiny, backend):
    sizes = [64, 32, 128, 64, 96]
    path = tiny("qwen35moe", metadata={"expert_feed_forward_length": sizes})
    config, weights = loaded(path)
    assert [weights[f"blk.{i}.ffn_down_exps.weight"].shape[2] for i in range(5)] == sizes
    assert np.isfinite(logits_of(backend, path, [TOKENS])).all()


@pytest.mark.parametrize("format_name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ4_XS"])
@pytest.mark.parametrize("arch", ["llama", "qwen35moe"])
def test_quantized_files_give_the_logits_of_their_own_numbers(tiny, arch, format_name):
    packed, plain = (tiny(arch, formats=format_name, edit=edit) for edit in (None, retyped([".weight"], "F32")))
    assert relative_error(*(logits_of("reference", path, [TOKENS]) for path in (packed, plain))) < 1e-6


@pytest.mark.parametrize("format_name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ4_XS"])
@pytest.mark.parametrize("arch", ARCHS)
def test_a_device_differs_on_quantized_files_by_nothing_but_its_int8_activations(tiny, arch, format_name):
    """One token at a time through few layers, and the median: a value next to a tie may round the other way."""
    path = tiny(arch, formats=format_name, metadata=SHALLOW_HYBRID if arch in HYBRIDS else SHALLOW)
    errors = [
        relative_error(logits_of("cpu", path, [[token]]), logits_of("int8", path, [[token]])) for token in TOKENS[:7]
    ]
    assert np.median(errors) < 1e-5


@pytest.mark.parametrize("format_name", ["F32", "Q4_K"])
@pytest.mark.parametrize("arch", ARCHS)
def test_up_to_8_rows_at_once_are_bit_equal_to_one_row_at_a_time(tiny, arch, format_name):
    path = tiny(arch, formats=format_name)
    expected = logits_of("cpu", path, CHUNKINGS["decode"], kv="f16")
    for rows in (2, 5, 8):
        chunks = [TOKENS[begin : begin + rows] for begin in range(0, len(TOKENS), rows)]
        np.testing.assert_array_equal(logits_of("cpu", path, chunks, kv="f16"), expected)
