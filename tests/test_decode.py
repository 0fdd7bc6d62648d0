"""Drafts change the speed of an answer and nothing else: equal tokens from every source, with every sampler setting."""

from collections import Counter

import numpy as np
import pytest
from tiny_models import write_tiny

import tandem
from tandem.default_model import default_model
from tandem.errors import SettingError
from tandem.requests import GenerationRequest, Prompt
from tandem.runtime.decode import NO_DRAFTS, DraftSettings, decode_round

CODE = 'import os\n\n\ndef fibonacci(n):\n    """Return the n-th Fibonacci number."""\n'
PROSE = "The package provides a command line interface that"
SOURCES = {
    "mtp 1": DraftSettings(("mtp",), 1, adaptive=False),
    "mtp 4": DraftSettings(("mtp",), 4, adaptive=False),
    "ngram 7": DraftSettings(("ngram",), 7, adaptive=False),
    "mtp and ngram, adaptive": DraftSettings(),
}


@pytest.fixture(scope="module")
def plain():
    with tandem.load(default_model(), ctx=2048, threads=2, drafts=NO_DRAFTS) as engine:
        yield engine


@pytest.fixture(scope="module", params=SOURCES)
def drafting(request):
    with tandem.load(default_model(), ctx=2048, threads=2, drafts=SOURCES[request.param]) as engine:
        yield engine


def without_end(engine):
    return {token: float("-inf") for token in engine.tokenizer.eog_ids}


def written(engine, prompt, max_tokens, **settings):
    settings = {"temperature": 0.0, "loop_guard": False, "logit_bias": without_end(engine), **settings}
    answer = engine.generate(prompt, raw=True, max_tokens=max_tokens, **settings)
    answer.text()
    return answer.token_ids, answer.stats


def test_greedy_text_is_the_same_with_drafts_as_without(plain, drafting):
    for prompt in (CODE, PROSE):
        expected, none = written(plain, prompt, 1200)
        got, stats = written(drafting, prompt, 1200)
        assert got == expected and len(got) == 1200
        assert none.drafted == 0 and stats.rounds + stats.accepted + 1 == len(got)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"temperature": 0.8, "dry_multiplier": 0.8, "typical_p": 0.9},
    ],
    ids=str,
)
def test_sampled_text_of_a_seed_is_the_same_with_drafts_as_without(plain, drafting, settings):
    expected, _ = written(plain, CODE, 250, seed=11, **settings)
    assert written(drafting, CODE, 250, seed=11, **settings)[0] == expected


def test_drafts_are_made_and_accepted(drafting):
    _, stats = written(drafting, CODE * 3, 300)
    if not drafting.drafts.adaptive:
        assert stats.accepted > 0.3 * stats.drafted > 0


class Vowels:
    """A constraint: only tokens of `allowed`, and after every fifth token one of `forced` three times."""

    def __init__(self, vocab_size, forced):
        rng = np.random.default_rng(5)
        self.words = rng.integers(0, 1 << 32, -(-vocab_size // 32), dtype=np.uint32)
        self.told, self.queue, self.unit = [], [], forced

    def allowed(self):
        return self.words

    def forced(self):
        return self.queue

    def accept(self, token):
        self.told.append(token)
        if self.queue:
            assert self.queue.pop(0) == token
        elif len(self.told) % 5 == 0:
            self.queue = list(self.unit)


def constrained(engine, count):
    made = []

    def constraint():
        made.append(Vowels(engine.vocab_size, [300, 301, 302]))
        return made[-1]

    sampling = engine.sampling(temperature=0.0, max_tokens=count, loop_guard=False, logit_bias=without_end(engine))
    prompt = Prompt(engine.tokenize(CODE), (), continues=True)
    answer = engine.answer(GenerationRequest(prompt, sampling, constraint))
    while not answer.prefilled:
        answer.prefill()
    while answer.reason is None:
        decode_round(engine.runner, [answer.decoder])
    return answer, made[0]


def test_a_constraint_holds_for_drafts_and_forced_tokens_come_as_they_are(plain, drafting):
    expected, _ = constrained(plain, 150)
    answer, constraint = constrained(drafting, 150)
    assert answer.text.token_ids == expected.text.token_ids == constraint.told
    bits = np.unpackbits(constraint.words.view(np.uint8), bitorder="little")
    free = [t for i, t in enumerate(constraint.told) if t not in (300, 301, 302)]
    assert free and bits[free].all() and constraint.told.count(301) >= 10
    assert answer.decoder.counts.rounds < 150  # forced tokens share a pass with and without drafts


def test_an_answer_that_ends_inside_accepted_drafts_leaves_a_timeline_that_can_go_on(plain, drafting):
    text, _ = written(plain, CODE, 200)
    for limit in (1, 2, 3, 5, 8, 13, 21):
        drafting.session.clear()
        got, _ = written(drafting, CODE, limit)
        assert got == text[:limit] and drafting.session.tokens == drafting.tokenize(CODE) + got[:-1]
        plain.session.clear()
        plain.session.sync(plain.tokenize(CODE))
        expected = [plain.session.append(token) for token in got][-1]
        np.testing.assert_array_equal(drafting.session.append(got[-1]), expected)


def test_the_context_is_filled_to_the_last_token_and_not_beyond(plain):
    with tandem.load(default_model(), ctx=64, threads=2, drafts=SOURCES["mtp 4"]) as engine:
        got, stats = written(engine, CODE, 500)
        assert stats.stop_reason == "context" and len(engine.session.tokens) == 64
        assert got == written(plain, CODE, 500)[0][: len(got)] and stats.prompt_tokens + len(got) == 65


def test_answers_written_together_are_those_written_alone(plain, drafting):
    prompts = [CODE, PROSE, "x = [", "class Stack:\n    def push(self, item):\n"]
    expected = [written(plain, prompt, 90)[0] for prompt in prompts]
    sampling = plain.sampling(temperature=0.0, max_tokens=90, loop_guard=False, logit_bias=without_end(plain))
    answers = []
    for prompt in prompts:
        request = GenerationRequest(Prompt(drafting.tokenizer.encode(prompt, add_special=True), (), True), sampling)
        answers.append(drafting.answer(request, drafting.new_session()))
        while not answers[-1].prefilled:
            answers[-1].prefill()
    while any(answer.reason is None for answer in answers):
        decode_round(drafting.runner, [answer.decoder for answer in answers if answer.reason is None])
    assert [answer.text.token_ids for answer in answers] == expected


def test_a_second_model_drafts_and_the_text_stays(plain):
    with tandem.load(default_model(), ctx=512, threads=1, drafts=NO_DRAFTS) as small:
        settings = DraftSettings(("model",), 3, adaptive=False)
        with tandem.load(default_model(), ctx=512, threads=1, drafts=settings, draft_model=small) as engine:
            got, stats = written(engine, CODE, 200)
    assert got == written(plain, CODE, 200)[0]
    assert stats.accepted >= 0.95 * stats.drafted > 0  # it is the same model


def test_a_second_model_with_another_vocabulary_is_refused(plain, tmp_path):
    path = write_tiny("llama", tmp_path / "llama.gguf", "Q8_0", seed=3)
    with tandem.load(path, ctx=64, threads=1) as small, pytest.raises(SettingError, match="same vocabulary"):
        tandem.load(default_model(), ctx=64, threads=1, draft_model=small)


def test_bad_draft_settings_name_what_is_valid():
    with pytest.raises(SettingError, match="mtp"):
        DraftSettings(("mpt",))
    with pytest.raises(SettingError, match="0 to 7"):
        DraftSettings(longest=8)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = write_tiny("qwen35moe", tmp_path_factory.mktemp("models") / "mtp.gguf", "Q8_0", seed=3, mtp=True)
    with tandem.load(path, ctx=64, threads=1, drafts=DraftSettings(("mtp",), 2, adaptive=False)) as engine:
        yield engine


def test_with_drafts_tokens_follow_the_models_own_distribution(tiny):
    """Chi-square of the second and third token, over many answers, against the probabilities of plain decoding."""
    prompt, answers = [5, 6, 7], 3000
    sampling = {"temperature": 1.5, "top_k": 6}
    seen = Counter()
    for seed in range(answers):
        answer = tiny.generate(prompt, max_tokens=3, seed=seed, loop_guard=False, logit_bias=without_end(tiny), **sampling)
        answer.text()
        seen[tuple(answer.token_ids)] += 1
    expected = _exact(tiny, prompt, 3, tiny.sampling(**sampling, logit_bias=without_end(tiny)))
    assert set(seen) <= set(expected) and abs(sum(expected.values()) - 1) < 1e-9
    cells = [(seen[t], p * answers) for t, p in expected.items() if p * answers >= 5]
    rare = answers - sum(c for c, _ in cells), answers - sum(e for _, e in cells)
    cells += [rare] if rare[1] >= 5 else []
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    freedom = len(cells) - 1
    assert freedom > 20
    # mean `freedom`, deviation sqrt(2 * freedom): four deviations are passed by chance once in 10,000 at most
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)


def _exact(engine, prompt, depth, sampling):
    """Probability of every continuation of `depth` tokens, by plain decoding."""
    from tandem.runtime.sampler import Sampler

    sampler = Sampler(sampling, engine.vocab_size)
    found = {(): 1.0}
    for _ in range(depth):
        grown = {}
        for tokens, probability in found.items():
            logits, _ = engine.session.sync(prompt)
            for token in tokens:
                logits = engine.session.append(token)
            ids, probs = sampler.probabilities(logits)
            grown |= {(*tokens, int(i)): probability * float(p) for i, p in zip(ids, probs, strict=True)}
        found = grown
    return found


def test_drafts_after_a_long_rest_are_as_good_as_before(plain):
    """While drafts rest, the MTP block does not follow every token: it begins anew with the last ones."""
    with tandem.load(default_model(), ctx=2048, threads=2, drafts=SOURCES["mtp 1"]) as engine:
        text, whole = written(engine, CODE, 700)
        session = engine.session
        session.clear()
        session.sync(engine.tokenize(CODE))
        for token in text[:400]:
            session.advance([token])
        assert session.mtp.first > 300
        prompt = engine.tokenize(CODE) + text[:400]
        rest, stats = written(engine, prompt, 300)
        assert rest == text[400:] or stats.reused_tokens == 0
        assert stats.accepted / stats.drafted > 0.8 * whole.accepted / whole.drafted


def test_the_draft_heads_rows_are_the_full_heads_rows_of_its_tokens():
    from tandem.ops.base import Weight
    from tandem.runtime.draft_mtp import DraftHead

    rng = np.random.default_rng(2)
    full = Weight("output.weight", (1000, 8), 8, rng.integers(0, 256, (1000, 34), np.uint8))
    head = DraftHead(full, 100)
    head.read(rng.integers(0, 1000, 300))
    for _ in range(50):
        for token in rng.integers(0, 1000, 20).tolist():
            head.wrote(token)
        assert len(set(head.ids.tolist())) == 100
        np.testing.assert_array_equal(head.weight.blocks, full.blocks[head.ids])
    head.wrote(999)
    assert 999 in head.ids and head.coverage < 0.5
    often = head.ids[:20].tolist()
    for token in [*often * 40, *rng.integers(0, 1000, 60).tolist()]:
        head.wrote(token)
    assert set(often) <= set(head.ids.tolist())


def test_a_text_that_the_cut_head_does_not_cover_is_drafted_with_the_full_head(tmp_path, monkeypatch):
    monkeypatch.setattr("tandem.runtime.draft_mtp.MIN_HEAD_ROWS", 16)
    monkeypatch.setattr("tandem.runtime.draft_mtp.MAX_HEAD_ROWS", 16)
    with tandem.load(default_model(), ctx=512, threads=2, drafts=SOURCES["mtp 1"]) as engine:
        head = engine.drafter.head
        assert len(head.ids) == 16 and not engine.drafter.use_full_head
        _, stats = written(engine, CODE, 200)
        assert engine.drafter.use_full_head and head.coverage < 0.85 and stats.accepted > 0.5 * stats.drafted
