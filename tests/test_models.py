"""Models against `transformers` with the same weights, variants of files against their canonical form, and refusals.

`logits_of` runs a file on a backend; the tests that compare logits run on all BACKENDS.
"""

import zlib

import numpy as np
import oracle
import pytest
from backends import BACKENDS, logits_of
from oracle import relative_error
from tiny_models import pack, tiny_metadata, unpacked_weights, write_tiny

from tandem.errors import FormatError
from tandem.gguf import read_gguf
from tandem.models import ARCHS, model_for
from tandem.models.base import DeltaState
from tandem.quant import unpack_tensor
from tandem.runtime.weights import load_weights

TOKENS = np.random.default_rng(0).integers(0, 256, 70)
CHUNKINGS = {
    "prefill": [TOKENS],
    "decode": list(TOKENS.reshape(-1, 1)),
    "prefill then decode": [TOKENS[:33], *TOKENS[33:].reshape(-1, 1)],
    "two prefills": [TOKENS[:5], TOKENS[5:]],
}
TOLERANCE = 1e-4  # relative RMS error to transformers with F32 weights
HYBRIDS = ("qwen35", "qwen35moe")
SHALLOW = {"block_count": 1}
SHALLOW_HYBRID = {"block_count": 2, "full_attention_interval": 2}  # one layer of each kind


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """tiny(arch, **variations) -> path; the same request is written once."""
    folder = tmp_path_factory.mktemp("tiny")
    written = {}

    def write(arch, **variations):
        key = arch + repr(variations)
        if key not in written:
            # The oracle knows a file by its name.
            path = write_tiny(arch, folder / f"{arch}-{zlib.crc32(key.encode()):08x}.gguf", **variations)
            # Functions are shown by their address: holding them keeps it from being given to another.
            written[key] = path, variations
        return written[key][0]

    return write


def same_as_transformers(backend, path, chunks=None, **config_changes):
    got = logits_of(backend, path, chunks or CHUNKINGS["prefill then decode"])
    assert oracle.check(got, path, TOKENS, **config_changes) < TOLERANCE


def loaded(path):
    """(config, weights) of a file."""
    with read_gguf(path) as file:
        model = model_for(file.metadata)
        config = model.Config.from_gguf(file.metadata, file.tensors)
        return config, load_weights(file, model, config)


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


def with_blocks(names, ggml_type="F32", shape=None):
    """An edit of a file's tensors: values kept, type and shape changed."""

    def edit(tensors):
        for name in [name for name in tensors if any(part in name for part in names)]:
            old_shape, old_type, packed = tensors[name]
            _, new_type, packed = pack(unpack_tensor(packed, old_type, old_shape), ggml_type)
            tensors[name] = (shape or old_shape, new_type, packed)

    return edit


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
        {"mtp": True, "edit": with_blocks(["blk.5.ffn_gate_inp"], "BF16")},
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
        {"edit": with_blocks(["ffn_gate_inp_shexp"], shape=(1, 64))},
    ),
    "conv weight with three dims": (HYBRIDS, {"edit": with_blocks(["ssm_conv1d"], shape=(256, 1, 4))}),
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
    half = {"edit": with_blocks(["ffn_gate_inp"], router_type)}

    def rounded(tensors):
        with_blocks(["ffn_gate_inp"], router_type)(tensors)
        with_blocks(["ffn_gate_inp"], "F32")(tensors)

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
    packed, plain = (tiny(arch, formats=format_name, edit=edit) for edit in (None, with_blocks([".weight"], "F32")))
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


def test_split_parts_are_views_of_the_mapped_file(tiny):
    path = tiny("qwen35moe", fuse=("gate_up_exps", "attn_qkv"))
    with read_gguf(path) as file:
        model = model_for(file.metadata)
        weights = load_weights(file, model, model.Config.from_gguf(file.metadata, file.tensors))
        for name, whole in (
            ("ffn_up_exps", "ffn_gate_up_exps"),
            ("attn_v", "attn_qkv"),
            ("attn_output", "attn_output"),
        ):
            assert np.shares_memory(weights[f"blk.3.{name}.weight"].blocks, file.blocks(f"blk.3.{whole}.weight"))


# --- tensor tables ---

HYBRID_KEYS = {
    "context_length": 262144,
    "attention.key_length": 256,
    "attention.value_length": 256,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.dimension_count": 64,
    "rope.dimension_sections": np.array([11, 11, 10, 0]),
    "rope.freq_base": 1e7,
    "full_attention_interval": 4,
    "ssm.conv_kernel": 4,
    "ssm.group_count": 16,
    "ssm.state_size": 128,
    "vocab_size": 248320,
}
# Published models: sizes, tensors without and with MTP, billions of parameters without (None: not published).
PUBLISHED = {
    "35B": (
        "qwen35moe",
        (40, 2048, 16, 2, 32),
        {"expert_count": 256, "expert_used_count": 8, "expert": 512},
        (733, 753),
        34.66,
    ),
    "122B": (
        "qwen35moe",
        (48, 3072, 32, 2, 64),
        {"expert_count": 256, "expert_used_count": 8, "expert": 1024},
        (879, 899),
        122.11,
    ),
    "397B": (
        "qwen35moe",
        (60, 4096, 32, 2, 64),
        {"expert_count": 512, "expert_used_count": 10, "expert": 1024},
        (1098, 1118),
        396.35,
    ),
    "9B": ("qwen35", (32, 4096, 16, 4, 32), {"feed_forward_length": 12288}, (427, 442), None),
    "27B": ("qwen35", (64, 5120, 24, 4, 48), {"feed_forward_length": 17408}, (851, 866), None),
}


def published_config(name, mtp):
    arch, (layers, hidden, heads, kv_heads, v_heads), own, _, _ = PUBLISHED[name]
    own = dict(own)
    if size := own.pop("expert", None):
        own |= {"expert_feed_forward_length": size, "expert_shared_feed_forward_length": size}
    keys = (
        HYBRID_KEYS
        | own
        | {
            "block_count": layers + mtp,
            "nextn_predict_layers": int(mtp),
            "embedding_length": hidden,
            "attention.head_count": heads,
            "attention.head_count_kv": kv_heads,
            "ssm.time_step_rank": v_heads,
            "ssm.inner_size": v_heads * 128,
        }
    )
    return ARCHS[arch], ARCHS[arch].Config.from_gguf({f"{arch}.{key}": value for key, value in keys.items()}, {})


@pytest.mark.parametrize("mtp", [False, True])
@pytest.mark.parametrize("name", PUBLISHED)
def test_tables_have_the_tensors_of_the_published_models(name, mtp):
    model, config = published_config(name, mtp)
    specs = [
        spec
        for spec in model.tensors(config)
        if not spec.name.endswith(("embed_tokens.weight", "shared_head_head.weight"))
    ]
    assert len(specs) == PUBLISHED[name][3][mtp]
    assert {spec.role == "mtp" for spec in specs if spec.name.startswith(f"blk.{config.num_layers}.")} == (
        {True} if mtp else set()
    )
    billions = PUBLISHED[name][4]
    if billions and not mtp:
        assert sum(np.prod(spec.shape) for spec in specs) / 1e9 == pytest.approx(billions, abs=0.005)


def test_state_of_the_35b_is_what_the_facts_say():
    model, config = published_config("35B", mtp=True)
    states = model.state(config)
    recurrent = [state for state in states if isinstance(state, DeltaState)]
    assert (len(states), len(recurrent)) == (40, 30)
    assert {(s.num_v_heads, s.key_dim, s.value_dim, s.conv_channels, s.conv_width) for s in recurrent} == {
        (32, 128, 128, 8192, 4)
    }
    assert all(isinstance(state, DeltaState) == ((i + 1) % 4 != 0) for i, state in enumerate(states))


@pytest.mark.parametrize("arch", ARCHS)
def test_tables_name_every_tensor_once_and_with_a_known_role(arch):
    roles = {"embed", "head", "norm", "attention", "recurrent", "ffn", "router", "shared", "expert", "mtp"}
    metadata = {
        k: np.array(v) if isinstance(v, list) else v for k, v in tiny_metadata(arch, mtp=arch in HYBRIDS).items()
    }
    config = ARCHS[arch].Config.from_gguf(metadata, {})
    specs = list(ARCHS[arch].tensors(config))
    assert len({spec.name for spec in specs}) == len(specs)
    assert {spec.role for spec in specs} <= roles
    assert len(ARCHS[arch].state(config)) == config.num_layers
    assert {part for fusion in ARCHS[arch].fused(config) for part in fusion.parts} <= {spec.name for spec in specs}


# --- refusals name what is wrong ---


def refusal(path):
    with pytest.raises(FormatError) as caught:
        loaded(path)
    return str(caught.value)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_missing_tensor_is_named(tiny, arch):
    _, _, arrays = unpacked_weights(tiny(arch))
    for name in list(arrays)[:: 3 if arch in HYBRIDS else 1]:
        if name != "output.weight":
            message = refusal(tiny(arch, edit=lambda tensors, name=name: tensors.pop(name)))
            assert message.startswith(f"{name} is missing") and str(list(arrays[name].shape)) in message


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tiny):
    message = refusal(tiny("llama", edit=lambda t: t.update({"blk.1.ffn_up.weight": t["blk.1.attn_q.weight"]})))
    assert message.startswith("blk.1.ffn_up.weight: the file says [128, 128], the model needs [192, 128]")


def test_a_transposed_tensor_is_refused(tiny):
    def transpose(tensors):
        shape, kind, packed = tensors["blk.0.ffn_down_exps.weight"]
        tensors["blk.0.ffn_down_exps.weight"] = ((8, 128, 32), kind, packed)

    assert "blk.0.ffn_down_exps.weight: the file says [8, 128, 32]" in refusal(tiny("qwen35moe", edit=transpose))


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        ("llama", "blk.0.attn_q_norm.weight"),
        ("llama", "blk.3.attn_norm.weight"),
        ("llama", "output_norm.scale"),
        ("qwen3", "rope_freqs.weight"),
        ("qwen35", "blk.0.attn_q.weight"),
        ("qwen35moe", "blk.5.nextn.eh_proj.weight"),
        ("qwen35moe", "blk.0.ffn_gate_inp.bias"),
    ],
)
def test_a_left_over_tensor_is_named(tiny, arch, name):
    assert name in refusal(tiny(arch, extra={name: [1.0]}))


def test_left_over_tensors_come_with_the_nearest_name_and_their_number(tiny):
    message = refusal(tiny("gemma3", extra={"blk.0.ffn_downn.weight": [1.0], "blk.1.ffn_downn.weight": [1.0]}))
    assert "blk.0.ffn_downn.weight (and 1 more)" in message and "did you mean 'blk.0.ffn_down.weight'" in message


def test_biases_are_refused_by_name(tiny):
    assert "blk.2.attn_q.bias" in refusal(tiny("llama", extra={"blk.2.attn_q.bias": np.zeros(128)}))


def test_a_fused_tensor_beside_its_parts_is_refused(tiny):
    def keep_both(tensors):
        shape, kind, packed = tensors["blk.0.attn_q.weight"]
        tensors["blk.0.attn_qkv.weight"] = ((256, 128), kind, np.zeros(256 * 128 * 4, np.uint8))

    assert "blk.0.attn_qkv.weight and blk.0.attn_q.weight are both in the file" in refusal(
        tiny("llama", edit=keep_both)
    )


def test_a_fused_tensor_of_another_shape_is_named(tiny):
    def shorten(tensors):
        shape, kind, packed = tensors["blk.0.attn_qkv.weight"]
        tensors["blk.0.attn_qkv.weight"] = ((shape[0] - 1, shape[1]), kind, packed[: -shape[1] * 4])

    message = refusal(tiny("llama", fuse=("attn_qkv",), edit=shorten))
    assert message.startswith("blk.0.attn_qkv.weight: the file says [255, 128], the model needs [256, 128]")


def test_types_that_cannot_serve_are_refused_by_name(tiny):
    def integers(tensors):
        shape, _, packed = tensors["blk.0.attn_q.weight"]
        tensors["blk.0.attn_q.weight"] = (shape, 26, packed)

    assert "blk.0.attn_q.weight has type I32" in refusal(tiny("llama", edit=integers))
    message = refusal(tiny("llama", edit=with_blocks(["blk.0.attn_norm"], "Q8_0")))
    assert message.startswith("blk.0.attn_norm.weight has type Q8_0")


@pytest.mark.parametrize("count", [2, 8])
def test_a_scale_of_the_wrong_size_is_refused(tiny, count):
    message = refusal(tiny("llama", extra={"blk.0.ffn_up.scale": np.ones(count)}))
    assert message.startswith(f"blk.0.ffn_up.scale: the file says F32 [{count}]")


@pytest.mark.parametrize("arch", HYBRIDS)
def test_a_file_of_the_mtp_block_only_is_refused_clearly(tiny, arch):
    def drop_trunk(tensors):
        for name in [name for name in tensors if name.startswith("blk.") and not name.startswith("blk.5.")]:
            del tensors[name]

    message = refusal(tiny(arch, mtp=True, edit=drop_trunk))
    assert "multi-token prediction block (blk.5)" in message and "main file" in message


@pytest.mark.parametrize("arch", ARCHS)
def test_every_missing_key_is_named(tiny, arch):
    defaults = {
        "attention.head_count_kv": ("llama", "qwen3", "gemma3"),
        "attention.key_length": ("llama", "qwen3", "gemma3"),
        "attention.value_length": tuple(ARCHS),
        "attention.sliding_window": ("gemma3",),
        "rope.dimension_count": tuple(ARCHS),
        "rope.dimension_sections": HYBRIDS,
        "rope.freq_base": ("llama", "gemma3"),
        "ssm.inner_size": HYBRIDS,
    }
    metadata = {k: np.array(v) if isinstance(v, list) else v for k, v in tiny_metadata(arch).items()}
    keys = [key for key in metadata if key.startswith(f"{arch}.")]
    required = [key for key in keys if arch not in defaults.get(key.removeprefix(f"{arch}."), ())]
    assert len(required) > 5
    for key in required:
        with pytest.raises(FormatError, match=f"metadata key {key} is missing"):
            ARCHS[arch].Config.from_gguf({k: v for k, v in metadata.items() if k != key}, {})


@pytest.mark.parametrize(
    ("arch", "key", "value"),
    [
        ("llama", "block_count", 0),
        ("llama", "block_count", 1 << 30),
        ("llama", "block_count", "3"),
        ("llama", "block_count", True),
        ("llama", "embedding_length", -5),
        ("llama", "embedding_length", 64.5),
        ("llama", "attention.head_count_kv", 3),
        ("llama", "attention.head_count_kv", np.array([2, 2])),
        ("llama", "attention.head_count_kv", np.array([2, 1, 2])),
        ("llama", "attention.layer_norm_rms_epsilon", float("nan")),
        ("llama", "attention.layer_norm_rms_epsilon", "small"),
        ("llama", "expert_count", 8),
        ("llama", "rope.dimension_count", 33),
        ("llama", "rope.dimension_count", 66),
        ("llama", "rope.scaling.type", "longrope"),
        ("llama", "rope.scaling.type", 4),
        ("llama", "rope.freq_base", float("inf")),
        ("gemma3", "rope.dimension_count", 16),
        ("gemma3", "attention.sliding_window_pattern", np.array([True, False])),
        ("gemma3", "attention.sliding_window_pattern", 0),
        ("qwen35", "rope.dimension_sections", np.array([4, 4])),
        ("qwen35", "rope.dimension_sections", 4),
        ("qwen35", "nextn_predict_layers", 5),
        ("qwen35", "ssm.time_step_rank", 3),
        ("qwen35", "ssm.inner_size", 100),
        ("qwen35", "ssm.conv_kernel", 1),
        ("qwen35", "attention.value_length", 64),
        ("qwen35", "attention.recurrent_layers", np.array([True] * 4)),
        ("qwen35moe", "expert_used_count", 9),
        ("qwen35moe", "expert_gating_func", 2),
        ("qwen35moe", "expert_weights_scale", 2.5),
        ("qwen35moe", "expert_weights_norm", False),
        ("qwen35moe", "expert_feed_forward_length", np.array([64, 64])),
    ],
)
def test_a_bad_value_is_refused_by_key(arch, key, value):
    metadata = {k: np.array(v) if isinstance(v, list) else v for k, v in tiny_metadata(arch).items()}
    with pytest.raises(FormatError, match=key.replace(".", r"\.")):
        ARCHS[arch].Config.from_gguf(metadata | {f"{arch}.{key}": value}, {})


def test_a_model_of_recurrent_layers_only_is_refused():
    metadata = {k: np.array(v) if isinstance(v, list) else v for k, v in tiny_metadata("qwen35").items()}
    with pytest.raises(FormatError, match="at least one full attention layer"):
        ARCHS["qwen35"].Config.from_gguf(metadata | {"qwen35.attention.recurrent_layers": np.array([True] * 5)}, {})


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({}, "general.architecture is None"),
        ({"general.architecture": 3}, "general.architecture is 3"),
        ({"general.architecture": "qwen3moe"}, "'qwen3moe' is not supported; did you mean"),
        ({"general.architecture": "zzz"}, "'zzz' is not supported; valid: gemma3, llama, qwen3, qwen35, qwen35moe"),
    ],
)
def test_an_unknown_architecture_is_refused_with_the_nearest(metadata, words):
    with pytest.raises(FormatError, match=words.replace(".", r"\.")):
        model_for(metadata)
