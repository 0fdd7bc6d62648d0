"""Several answers over one model: the same text as alone, follow-ups that go on from their conversation, sleep and wake."""

import pytest

import tandem
from tandem.batch import Batch
from tandem.default_model import default_model
from tandem.errors import RequestError, SettingError
from tandem.requests import GenerationRequest, Prompt
from tandem.runtime.decode import DraftSettings

PROMPTS = ["import os\n\n\ndef walk(", "The package provides", "x = [", "class Stack:\n    def push(self, item):\n"]


def load():
    return tandem.load(default_model(), ctx=1024, threads=2, drafts=DraftSettings())


@pytest.fixture(scope="module")
def batch():
    made = Batch(load, max_sequences=4)
    yield made
    made.close_all()


def request(batch, prompt, max_tokens=40, **settings):
    ids = batch.tokenizer.encode(prompt, add_special=True) if isinstance(prompt, str) else prompt
    ends = {token: float("-inf") for token in batch.tokenizer.eog_ids}
    settings = {"temperature": 0.0, "loop_guard": False, "logit_bias": ends, "max_tokens": max_tokens} | settings
    return GenerationRequest(Prompt(list(ids), (), True), batch.engine.sampling(**settings))


def finish(batch, *answers):
    """Runs them to the end together; their token ids."""
    for answer in answers:
        while not answer.prefilled:
            batch.prefill(answer)
    while running := [answer for answer in answers if answer.reason is None]:
        batch.decode(running)
    tokens = [list(answer.text.token_ids) for answer in answers]
    for answer in answers:
        batch.close(answer)
    return tokens


def test_answers_together_are_the_answers_alone(batch):
    alone = [finish(batch, batch.open(request(batch, prompt)))[0] for prompt in PROMPTS]
    batch._pool.clear()
    together = finish(batch, *[batch.open(request(batch, prompt)) for prompt in PROMPTS])
    assert together == alone


def test_a_follow_up_runs_only_what_is_new_also_between_two_conversations(batch):
    batch._pool.clear()
    texts = [batch.tokenizer.encode(prompt) for prompt in PROMPTS[:2]]
    for turn in range(3):
        for number, ids in enumerate(texts):
            answer = batch.open(request(batch, ids, 20))
            (tokens,) = finish(batch, answer)
            if turn:
                assert answer.reused >= len(ids) - 8
            texts[number] = ids + tokens + batch.tokenizer.encode("\n# and now\n")


def test_no_more_answers_than_sequences_and_a_closed_one_makes_room(batch):
    answers = [batch.open(request(batch, prompt)) for prompt in PROMPTS]
    with pytest.raises(RequestError, match="in use"):
        batch.open(request(batch, "more"))
    stats = batch.close(answers.pop())
    assert stats.stop_reason == "cancelled" and stats.completion_tokens == 0
    answers.append(batch.open(request(batch, "more")))
    finish(batch, *answers)


def test_a_prompt_that_does_not_fit_is_refused_and_costs_no_sequence(batch):
    for _ in range(6):
        with pytest.raises(RequestError, match="1024"):
            batch.open(request(batch, [5] * 1024))
        with pytest.raises(SettingError):
            batch.open(request(batch, "a", logit_bias={batch.engine.vocab_size + 5: 1.0}))
    finish(batch, *[batch.open(request(batch, prompt, 3)) for prompt in PROMPTS])


@pytest.mark.parametrize("level", [1, 2])
def test_after_sleep_and_wake_answers_are_as_before(batch, level):
    (before,) = finish(batch, batch.open(request(batch, PROMPTS[0])))
    batch.sleep(level)
    memory = batch.memory()
    assert memory["kv"] == memory["checkpoints"] == 0 and (memory["weights"] == 0) == (level == 2)
    with pytest.raises(RequestError, match="wake"):
        batch.open(request(batch, PROMPTS[0]))
    batch.wake()
    assert finish(batch, batch.open(request(batch, PROMPTS[0]))) == [before]


@pytest.mark.parametrize("level", [1, 2])
def test_conversations_in_a_folder_outlast_sleep(tmp_path, level):
    made = Batch(load, cache_dir=tmp_path)
    ids = made.tokenizer.encode(PROMPTS[0])
    (tokens,) = finish(made, made.open(request(made, ids)))
    made.sleep(level)
    made.wake()
    answer = made.open(request(made, [*ids, *tokens, 5]))
    finish(made, answer)
    made.close_all()
    assert answer.reused >= len(ids) + len(tokens) - 8


def test_conversations_survive_the_process_in_a_folder(tmp_path):
    first = Batch(load, cache_dir=tmp_path)
    ids = first.tokenizer.encode(PROMPTS[0])
    (tokens,) = finish(first, first.open(request(first, ids)))
    first.close_all()
    second = Batch(load, cache_dir=tmp_path)
    answer = second.open(request(second, [*ids, *tokens, 5]))
    finish(second, answer)
    second.close_all()
    assert answer.reused >= len(ids) + len(tokens) - 8


def test_embeddings_are_the_mean_hidden_state_and_leave_answers_alone(batch):
    ids = batch.tokenizer.encode(PROMPTS[1])
    answer = batch.open(request(batch, PROMPTS[0]))
    batch.prefill(answer)
    vector = batch.embed(ids)
    (tokens,) = finish(batch, answer)
    assert tokens == finish(batch, batch.open(request(batch, PROMPTS[0])))[0]
    rows = []
    session = batch.engine.session
    session.clear()
    for token in ids:
        session.append(token)
        rows.append(batch.engine.runner.hidden()[0].copy())
    assert abs(sum(rows) / len(rows) - vector).max() < 0.05 * abs(vector).max()
