"""Model files against their tensor tables: published counts, and refusals that name the tensor or key at fault."""

import numpy as np
import pytest
from tiny_models import HYBRIDS, TinyFiles, loaded, retyped, tiny_metadata, unpacked_weights

from tandem.errors import FormatError
from tandem.gguf import read_gguf
from tandem.models import ARCHS, model_for
from tandem.models.base import DeltaState
from tandem.runtime.weights import load_weights


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """tiny(arch, **variations) -> path; the same request is written once."""
    return TinyFiles(tmp_path_factory.mktemp("tiny"))


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
    message = refusal(tiny("llama", edit=retyped(["blk.0.attn_norm"], "Q8_0")))
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


ODD_VALUES = [
    0,
    1,
    2,
    3,
    -1,
    1000,
    1025,
    1 << 31,
    (1 << 64) - 1,
    0.0,
    1.0,
    0.5,
    1e-40,
    3e38,
    float("nan"),
    float("-inf"),
]
ODD_VALUES += [
    True,
    False,
    "",
    "yarn",
    "linear",
    np.array([], np.int32),
    np.array([1, 0, 3]),
    np.array([True] * 5),
    ["a"],
]


@pytest.mark.parametrize("arch", ARCHS)
def test_odd_metadata_is_accepted_or_refused_but_never_crashes(tiny, arch):
    with read_gguf(tiny(arch)) as file:
        metadata, shapes = file.metadata, file.tensors
    own = [key for key in metadata if key.startswith(f"{arch}.")]
    own += [f"{arch}.rope.scaling.{key}" for key in ("type", "factor", "original_context_length", "attn_factor")]
    own += [f"{arch}.{key}" for key in ("attention.sliding_window_pattern", "nextn_predict_layers", "vocab_size")]
    yarn = {f"{arch}.rope.scaling.type": "yarn", f"{arch}.rope.scaling.original_context_length": 64}
    refused = 0
    for extra in ({}, yarn):
        for key in own:
            for value in ODD_VALUES:
                try:
                    config = ARCHS[arch].Config.from_gguf(metadata | extra | {key: value}, shapes)
                except FormatError as error:
                    assert f"{arch}." in str(error) or f"a {arch} model" in str(error)
                    refused += 1
                else:
                    assert len(list(ARCHS[arch].tensors(config))) > len(ARCHS[arch].state(config)) > 0
                    assert list(ARCHS[arch].fused(config))
    assert refused > len(own)


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
