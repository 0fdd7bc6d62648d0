"""`tandem bench routing`: known figures from hand-made ids, and the ids of the reference ops on a tiny model."""

import json

import numpy as np
import pytest
from test_bench_mtp import call
from tiny_models import loaded, write_tiny

from tandem.bench import routing
from tandem.bench.routing import RoutedModel, spread, spreads
from tandem.engine import Engine
from tandem.errors import RequestError
from tandem.gguf import read_gguf
from tandem.models import model_for
from tandem.ops.reference import ReferenceOps, ReferenceState, ReferenceStep

TEXTS = [np.random.default_rng(seed).integers(0, 320, length).tolist() for seed, length in ((1, 40), (2, 7), (3, 1))]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(write_tiny("qwen35moe", tmp_path_factory.mktemp("routing") / "tiny.gguf", "F32", mtp=True))


def test_hand_made_ids_give_the_known_figures():
    # Expert 0 in every token, a second one that wanders: of 8 experts the busiest two get 6 + 2 of 12.
    ids = np.array([[0, 1], [0, 1], [0, 2], [0, 3], [4, 0], [0, 5]])
    told = spread("3", 8, [ids])
    assert (told.experts, told.used, told.tokens, told.unused) == (8, 2, 6, 2)
    assert told.busiest_quarter == 8 / 12
    assert told.distinct == (2.0, (2 + 3 + 3 + 3 + 3) / 5, (3 + 4 + 4 + 4) / 4, (4 + 5 + 5) / 3, (5 + 6) / 2)
    assert told.even[:2] == (2.0, 8 * (1 - 0.75**2))


def test_windows_do_not_reach_over_the_end_of_a_text():
    told = spread("0", 4, [np.array([[0], [1]]), np.array([[2], [2]])])
    assert told.distinct == (1.0, 1.5, 0.0, 0.0, 0.0) and told.busiest_quarter == 0.5 and told.unused == 1


def test_the_busiest_quarter_of_an_odd_number_of_experts_is_rounded_up():
    assert spread("0", 5, [np.array([[0], [0], [1], [2], [3]])]).busiest_quarter == 3 / 5


class Listening(ReferenceOps):
    """Reference ops that remember what they route."""

    def route(self, x, router, k):
        chosen = super().route(x, router, k)
        self.heard[router.name] = chosen.ids
        return chosen


def reference_ids(path, tokens):
    """Experts of each token in the trunk, int32 [T, k] by the name of the router."""
    model, config, weights = reference_model(path)
    return listen(tokens, model.state(config), lambda ops: model.forward(ops, config, weights))


def reference_mtp_ids(path, tokens, hidden):
    """The same in the MTP block, for the hidden state of each token and the token after it."""
    model, config, weights = reference_model(path)
    head = model.draft_head(config, weights)
    run = lambda ops: model.draft(ops, config, weights, head)  # noqa: E731
    return listen(tokens[1:], model.draft_state(config), run, hidden[:-1])


def listen(tokens, specs, run, hidden=None):
    rows = np.arange(len(tokens), dtype=np.int32)
    step = ReferenceStep(np.array(tokens, np.int32), rows, rows, hidden)
    ops = Listening(step, ReferenceState(specs, len(tokens), "f16"))
    ops.heard = {}
    run(ops)
    return ops.heard


def reference_model(path):
    with read_gguf(path) as file:
        return model_for(file.metadata), *loaded(path)


def test_routed_ids_are_those_of_the_reference_ops(tiny):
    with read_gguf(tiny) as file, RoutedModel(file, 64, 1) as model:
        for tokens in TEXTS:
            routed = model.route(tokens)
            expected = reference_ids(tiny, tokens)
            if len(tokens) > 1:
                expected |= reference_mtp_ids(tiny, tokens, model.trunk.runner.hidden().copy())
                assert list(routed) == list(expected)
            for name, ids in expected.items():
                assert np.array_equal(routed[name], ids), name
        assert len(routed["blk.5.ffn_gate_inp.weight"]) == 0  # a single token has no one after it


def test_shares_are_those_of_the_reference_ops(tiny):
    heard = [reference_ids(tiny, tokens) for tokens in TEXTS]
    with read_gguf(tiny) as file, RoutedModel(file, 64, 1) as model:
        told = spreads(model, TEXTS)
    assert [each.layer for each in told] == ["0", "1", "2", "3", "4", "5 (MTP)"]
    for each, name in zip(told[:-1], heard[0], strict=True):
        assert each == spread(each.layer, 8, [one[name] for one in heard])


def test_a_long_text_in_chunks_is_routed_as_in_one_go(tiny, monkeypatch):
    tokens = TEXTS[0]
    with read_gguf(tiny) as file, RoutedModel(file, 64, 1) as model:
        whole = model.route(tokens)
        monkeypatch.setattr(routing, "_CHUNK", 9)
        parts = model.route(tokens)
    for name, ids in whole.items():
        assert np.array_equal(parts[name], ids), name


def test_a_model_without_experts_is_refused(tmp_path):
    path = write_tiny("llama", tmp_path / "dense.gguf")
    with read_gguf(path) as file, pytest.raises(RequestError, match="has no experts"):
        RoutedModel(file, 64, 1)


def test_task_texts_are_prompts_with_answers_and_file_texts_fit_the_context(tiny, tmp_path):
    with Engine.load(tiny, ctx=2048, threads=1) as engine:
        texts = list(routing.task_texts(engine, 3))
        assert len(texts) == 25 and all(len(text) > 10 for text in texts)
        long = tmp_path / "long.txt"
        long.write_text("the and " * 2000)
        pieces = list(routing.file_texts(engine, [str(long)]))
        assert len(pieces) > 1 and max(map(len, pieces)) <= engine.ctx
        assert [t for piece in pieces for t in piece] == engine.tokenize("the and " * 2000)
        (tmp_path / "bad.txt").write_bytes(b"caf\xe9")
        with pytest.raises(RequestError, match="UTF-8"):
            list(routing.file_texts(engine, [str(tmp_path / "bad.txt")]))


def test_the_command_prints_a_table_and_ends_with_json(monkeypatch, capsys, tiny, tmp_path):
    text = tmp_path / "some.txt"
    text.write_text("in the end and all")
    code, out, err = call(monkeypatch, capsys, "bench", "routing", tiny, "-q", "--threads", 1, "--text", text)
    told = json.loads(out.splitlines()[-1])
    assert (code, err) == (0, "") and told["text"] == "some.txt" and len(told["layers"]) == 6
    assert [row["layer"] for row in told["layers"]][-1] == "5 (MTP)" and "5 (MTP)" in out
    assert all(row["distinct"][0] == 3 for row in told["layers"])
