"""The pocket model's recipe in miniature: vocabulary, conversations, streams, training that resumes, export."""

import ast
import json
import lzma
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the recipe trains with PyTorch")
pytest.importorskip("tokenizers", reason="the recipe's vocabulary is made with tokenizers")

POCKET = Path(__file__).parent.parent / "pocket"
sys.path.insert(0, str(POCKET))

import average  # noqa: E402
import chat  # noqa: E402
import evaluate  # noqa: E402
import excerpt  # noqa: E402
import exercises  # noqa: E402
import export  # noqa: E402
import model as recipe_model  # noqa: E402
import streams  # noqa: E402
import tokenize_text  # noqa: E402
import tokenizer as vocabulary  # noqa: E402
import toolcalls  # noqa: E402
import train  # noqa: E402
import weights_io  # noqa: E402
from optimizer import fake_q3_k  # noqa: E402

import tandem  # noqa: E402

RENDER = chat.renderer()
VOCABULARY = recipe_model.TINY.vocab_size


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def source_documents() -> list[dict]:
    """A few of our own modules and pages, as a corpus has them."""
    root = POCKET.parent
    code = [*sorted(POCKET.glob("*.py")), root / "src" / "tandem" / "gguf.py"]
    documents = [{"kind": "code", "source": "tandem 1", "path": p.name, "text": p.read_text()} for p in code]
    pages = sorted((root / "docs").glob("*.md"))
    return documents + [{"kind": "docs", "source": "tandem 1", "path": p.name, "text": p.read_text()} for p in pages]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """The documents as a corpus part."""
    path = tmp_path_factory.mktemp("corpus") / "train.jsonl.xz"
    with lzma.open(path, "wt", preset=0) as lines:
        for document in source_documents():
            lines.write(json.dumps(document) + "\n")
    return path


@pytest.fixture(scope="module")
def tiny_tokenizer():
    return vocabulary.train((d["text"] for d in source_documents()), VOCABULARY)


@pytest.fixture(scope="module")
def data(tmp_path_factory, corpus, tiny_tokenizer) -> Path:
    """Token streams made by the command itself."""
    folder = tmp_path_factory.mktemp("streams")
    tiny_tokenizer.save(str(folder / "tokenizer.json"))
    arguments = ["--corpus", corpus, "--held", corpus, "--tokenizer", folder / "tokenizer.json", "--out", folder]
    call(tokenize_text, *arguments, "--no-installed", "--practice", 480, "--processes", 1)
    return folder


def call(module, *arguments) -> None:
    """A script's main with these arguments."""
    before, sys.argv = sys.argv, [module.__name__, *map(str, arguments)]
    try:
        module.main()
    finally:
        sys.argv = before


def trained(data: Path, out: Path, steps: int, *more) -> list[dict]:
    """The log of a miniature training."""
    arguments = [
        "--data",
        data,
        "--out",
        out,
        "--state",
        out / "state.pt",
        "--tiny",
        "--cpu",
        "--window",
        64,
        "--delta",
        "torch",
    ]
    call(train, *arguments, "--batch-tokens", 512, "--total-steps", steps, "--eval-batches", 1, *more)
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


# ---- vocabulary


def test_the_same_texts_give_the_same_vocabulary_of_the_size_asked_for(tiny_tokenizer):
    again = vocabulary.train((d["text"] for d in source_documents()), VOCABULARY)
    assert again.to_str() == tiny_tokenizer.to_str() and again.get_vocab_size() == VOCABULARY


def test_every_text_survives_its_tokens_and_marks_are_tokens_of_their_own(tiny_tokenizer):
    for text in ("def f(x):\n\treturn x\n", "naïve 漢字 🙂\r\n", "  \n\n a1b22 "):
        assert tiny_tokenizer.decode(tiny_tokenizer.encode(text).ids, skip_special_tokens=False) == text
    for mark in (*vocabulary.CONTROL, *vocabulary.USER_DEFINED):
        assert len(tiny_tokenizer.encode(mark).ids) == 1


# ---- conversations


def checked(conversation: dict) -> str:
    """The conversation through the template; its turns alternate and its marks are paired."""
    text = RENDER(conversation)
    roles = [m["role"] for m in conversation["messages"] if m["role"] != "system"]
    assert roles[0] == "user" and all(a != b for a, b in zip(roles, roles[1:], strict=False)), roles
    assert "assistant" in roles
    shown = "".join(m["content"] for m in conversation["messages"])  # code about marks may show any of them
    for opening, closing in (("<|im_start|>", "<|im_end|>"), ("<think>", "</think>")):
        framed = [text.count(mark) - shown.count(mark) for mark in (opening, closing)]
        assert framed[0] == framed[1] >= 1
    assert text.endswith("<|im_end|>\n")
    return text


def test_conversations_from_code_and_documentation_are_well_formed_and_repeatable():
    count = 0
    for d in source_documents():
        made = chat.conversations(d["kind"], d["source"], d["path"], d["text"], seed=3)
        assert made == chat.conversations(d["kind"], d["source"], d["path"], d["text"], seed=3)
        for conversation in made:
            checked(conversation)
            count += 1
    assert count > 40


def test_answers_that_show_code_show_code_that_parses_and_does_something():
    shown = 0
    for d in source_documents():
        if d["kind"] != "code":
            continue
        for conversation in chat.conversations("code", d["source"], d["path"], d["text"], seed=5):
            question, answer = (
                next(m["content"] for m in conversation["messages"] if m["role"] == r) for r in ("user", "assistant")
            )
            if (
                answer.count("```") == 2
                and "docstring" not in question
                and "Document" not in question
                and "tools" not in conversation
            ):
                tree = ast.parse(evaluate.code_block(answer))
                assert not all(map(chat._does_nothing, tree.body[0].body))
                shown += 1
    assert shown > 10


def test_functions_without_a_body_are_left_out():
    text = 'def a():\n    """Do a thing."""\n    raise NotImplementedError\n\n\ndef b():\n    """Do it well."""\n    return 1\n'
    assert chat.bare_functions(text) == ['def b():\n    """Do it well."""\n    return 1\n']


def test_practice_mixes_talk_exercises_and_calls_with_and_without_thoughts():
    made = chat.practice(200, seed=1)
    texts = list(map(checked, made))
    assert made == chat.practice(200, seed=1)
    assert any("<tool_call>" in t for t in texts) and any("def " in t for t in texts)
    thoughts = sum("reasoning_content" in m for c in made for m in c["messages"])
    assert 0.2 < thoughts / len(made) < 0.6


def test_tool_calls_come_back_from_the_text_with_name_and_arguments():
    rng, calls = random.Random(2), 0
    for _ in range(300):
        conversation = toolcalls.conversation(rng)
        text = checked(conversation)
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in conversation["tools"]}
        for message in conversation["messages"]:
            for made in message.get("tool_calls", []):
                function = made["function"]
                wanted = {k: v if isinstance(v, str) else json.dumps(v) for k, v in function["arguments"].items()}
                assert evaluate.tool_call(text.partition("assistant\n")[2]) == (function["name"], wanted)
                assert set(wanted) == set(offered[function["name"]]["required"])
                calls += 1
    assert calls > 200


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>",
        "<tool_call>\n<function=f>\nwords\n</function>\n</tool_call>",
        "<tool_call>\n{}\n</tool_call>",
        "f(1)",
    ],
)
def test_a_malformed_call_is_none(text):
    assert evaluate.tool_call(text) is None


def test_tools_and_exercises_for_evaluation_are_never_in_the_training_text():
    rng = random.Random(4)
    kept_tools = {q["name"] for q in toolcalls.questions(80, seed=1) if not q["known"]}
    kept_exercises = {e.name for e in exercises.held_out()}
    assert len(kept_tools) > 20 and len(kept_exercises) > 40
    for _ in range(2000):
        assert not {t["function"]["name"] for t in toolcalls.conversation(rng)["tools"]} & kept_tools
        assert exercises.sample(rng).name not in kept_exercises
    talk = json.dumps(chat.small_talk(500, seed=1))
    assert not [name for name in kept_exercises if re.search(rf"def {name}\(", talk)]


def test_every_exercise_runs_and_its_check_knows_right_from_wrong():
    for e in exercises.exercises():
        names: dict = {}
        exec(e.code(), names)
        for case in e.samples:
            names[e.name](*case)
    e = next(e for e in exercises.held_out() if e.name == "maximum")
    assert evaluate.behaves_alike(e, "def maximum(a, b):\n    return max(a, b)\n")
    assert not evaluate.behaves_alike(e, "def maximum(a, b):\n    return a\n")
    assert not evaluate.behaves_alike(e, "def maximum(a, b:\n")
    assert not evaluate.behaves_alike(e, "def maximum(a, b):\n    while True: pass\n")


def test_an_excerpt_keeps_to_its_limits_and_drops_tests():
    documents = [
        *source_documents(),
        {"kind": "code", "source": "tandem 1", "path": "tests/test_a.py", "text": "x = 1\n" * 50},
    ]
    kept = list(excerpt.chosen(documents, 20_000, 5_000))
    assert kept and all(not d["path"].startswith("tests/") for d in kept)
    assert sum(len(d["text"]) for d in kept if d["kind"] == "code") <= 20_000
    assert kept == list(excerpt.chosen(documents, 20_000, 5_000))


# ---- streams


def test_streams_hold_the_documents_one_after_the_other(data, tiny_tokenizer):
    sizes = json.loads((data / "sizes.json").read_text())
    end = tiny_tokenizer.token_to_id("<|endoftext|>")
    for name in tokenize_text.STREAMS:
        ids = np.fromfile(data / f"{name}.bin", np.uint16)
        assert len(ids) == sizes[name]["tokens"] and ids.max() < VOCABULARY and ids[-1] == end
    texts = {d["text"] for d in source_documents() if d["kind"] == "docs"}
    pages = np.fromfile(data / "docs.bin", np.uint16)
    pieces = np.split(pages, np.flatnonzero(pages == end) + 1)[:-1]
    assert {tiny_tokenizer.decode(p[:-1].tolist(), skip_special_tokens=False) for p in pieces} == texts


def test_windows_of_an_epoch_are_all_different_and_a_position_gives_the_same_ones_again(data):
    stream = streams.Stream(data / "code.bin", "cpu", 1)
    count = len(stream._epoch(64, 0)[0])
    position = [0, 0]
    first = stream.take(count, 64, 2, position, 0, 1)
    assert position == [1, 0] and len({tuple(row.tolist()) for row in first[:, :64]}) > 0.99 * count
    half = [0, count // 2]
    assert torch.equal(stream.take(3, 64, 2, half, 0, 1), first[count // 2 : count // 2 + 3])


def test_ranks_share_a_batch_without_overlap(data):
    stream = streams.Stream(data / "code.bin", "cpu", 1)
    whole = stream.take(8, 64, 2, [0, 0], 0, 1)
    parts = [stream.take(4, 64, 2, [0, 0], rank, 2) for rank in range(2)]
    assert torch.equal(torch.stack(parts, 1).reshape(whole.shape), whole)


# ---- training and export


def test_training_learns_and_a_resumed_one_is_the_same_bit_for_bit(data, tmp_path):
    straight = trained(data, tmp_path / "a", 24, "--recipe", "more")
    kept = weights_io.load(data / "weights")[0]
    losses = [entry["next"] for entry in straight if "next" in entry]
    assert losses[0] == pytest.approx(np.log(VOCABULARY), abs=0.3) and losses[-1] < losses[0] - 0.2
    trained(data, tmp_path / "b", 24, "--recipe", "more", "--stop-after", 9)
    trained(data, tmp_path / "b", 24, "--recipe", "more")
    states = [torch.load(tmp_path / run / "state.pt", weights_only=True) for run in ("a", "b")]
    assert states[0]["counters"]["step"] == states[1]["counters"]["step"] == 24
    assert states[0]["counters"]["positions"] == states[1]["counters"]["positions"]
    for name, master in states[0]["optimizer"]["masters"].items():
        assert torch.equal(master, states[1]["optimizer"]["masters"][name]), name
        assert torch.equal(kept[name], master.to(torch.bfloat16).float())


@pytest.mark.parametrize("recipe", ["fresh", "more"])
def test_a_recipe_covers_all_progress_and_ends_with_rounded_experts_and_two_drafts(recipe):
    found = train.RECIPES[recipe]
    rates = [found.lr_factor(p / 1000) for p in range(1001)]
    assert max(rates) == 1 and rates[-1] == pytest.approx(found.last) and rates[0] < 0.1
    last = found.phase_at(1.0)
    assert last.quantize and len(last.mtp_weights) == 2 and last.mixture["chat"] > found.phase_at(0.0).mixture["chat"]


def weights_of(config, seed: int = 7):
    """Fresh weights with enough noise in them that a swapped tensor shows."""
    weights, rng = recipe_model.init_weights(config, seed), torch.Generator().manual_seed(seed)
    for name, t in weights.items():
        if name.endswith("norm.weight"):
            t += 0.1 * torch.randn(t.shape, generator=rng)
    return weights


def test_the_exported_file_computes_what_pytorch_computes(tiny_tokenizer, tmp_path):
    config = recipe_model.TINY
    weights = weights_of(config)
    export.export(weights, config, tiny_tokenizer, tmp_path / "tiny.gguf", mixed=False)
    ids = tiny_tokenizer.encode(source_documents()[0]["text"]).ids[:200]
    with torch.no_grad():
        logits = recipe_model.Model(config, torch.device("cpu")).logits(weights, torch.tensor([ids]))
    expected = logits[0].double().numpy()
    with tandem.load(tmp_path / "tiny.gguf", ctx=256, threads=1, kv="f32") as engine:
        assert engine.tokenize(source_documents()[0]["text"])[:200] == ids
        found = engine.logits(ids)
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 1e-4


def test_weights_come_back_from_the_file_and_the_average_lies_between(tiny_tokenizer, tmp_path):
    config = recipe_model.TINY
    first, second = weights_of(config, 1), weights_of(config, 2)
    export.export(second, config, tiny_tokenizer, tmp_path / "tiny.gguf", mixed=False)
    read = export.read_gguf(tmp_path / "tiny.gguf", config)
    for name, t in second.items():
        assert torch.allclose(read[name], t, rtol=1e-5, atol=1e-7), name
    half = average.between(first, read, 0.5)
    assert all(torch.allclose(half[n], (first[n] + second[n]) / 2, atol=1e-5) for n in first)
    with pytest.raises(ValueError, match="same tensors"):
        average.between(first, {}, 0.5)


def test_rounding_in_training_is_what_the_file_holds_within_two_percent():
    from tandem.quant import format_by_name, pack_tensor, unpack_tensor

    kind = format_by_name("Q3_K").ggml_type
    exact = 0.02 * torch.randn(4, 512, generator=torch.Generator().manual_seed(1))
    rounded = fake_q3_k(exact)
    stored = torch.from_numpy(unpack_tensor(pack_tensor(rounded.numpy(), kind), kind, (4, 512)))
    assert (stored - rounded).norm() < 0.02 * rounded.norm() and (rounded - exact).norm() > 0.05 * exact.norm()


def test_evaluation_reads_completions_as_python_does():
    bare = 'def f():\n    """Do."""\n'
    assert evaluate.only_docstring(bare) and not evaluate.only_docstring(bare + "    x()\n")
    assert evaluate.function_only("def f():\n", "    a\n\n    b\nc\n") == "def f():\n    a\n\n    b"
    assert evaluate.parses("    def f(): pass") and not evaluate.parses("def f(:")
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]))
    assert evaluate.log_probability(logits, [0, 2]) == pytest.approx(np.log(0.5) + np.log(0.8))
