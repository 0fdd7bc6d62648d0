"""From messages to tokens: what is remembered, where prompts part, and models whose templates have other rules."""

import numpy as np
import pytest
from api_server import call_text, tool

from tandem.default_model import default_model
from tandem.gguf import read_gguf
from tandem.requests import GenerationStats, Piece
from tandem.serve.answer import AnswerReader
from tandem.serve.ask import Ask
from tandem.serve.divergence import RecentPrompts
from tandem.serve.events import Finished
from tandem.serve.model import Offer, RememberedTokens, ServedModel
from tandem.serve.prompt import arranged, count, prepare
from tandem.text.tokenizer import Tokenizer

NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ANY_SYSTEM = NO_SYSTEM.replace("{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}", "")
NO_ENDS = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


class NoWorker:
    batch = None


@pytest.fixture(scope="module")
def metadata():
    with read_gguf(default_model()) as file:
        return dict(file.metadata)


@pytest.fixture(scope="module")
def tokenizer(metadata):
    return Tokenizer.from_metadata(metadata)


def served(metadata, tokenizer, template=None, **offer):
    metadata = metadata | ({"tokenizer.chat_template": template} if template else {})
    return ServedModel(Offer("m", ctx=4096, **offer), NoWorker(), metadata, tokenizer)


def texts(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


LATE = (("system", "A"), ("user", "Q"), ("system", "B"), ("user", "R"))


def test_remembered_tokens_are_those_of_the_tokenizer_and_bounded(tokenizer):
    remembered = RememberedTokens(tokenizer, most_chars=2000)
    for _round in range(2):
        for n in range(30):
            text = f"user\ndef function_{n}(a, b):\n    return a + b * {n}  # 漢字 \n" * 2
            assert list(remembered.encode(text)) == tokenizer.encode(text)
            assert remembered._chars <= 2000 and sum(map(len, remembered._kept)) == remembered._chars
    assert remembered.encode("<|im_end|>", parse_special=True) == tokenizer.encode("<|im_end|>", parse_special=True)


def test_a_template_without_a_system_role_gets_it_in_the_first_question(metadata, tokenizer):
    model = served(metadata, tokenizer, NO_SYSTEM)
    assert arranged(model, texts(*LATE)) == texts(("user", "A\n\nB\n\nQ"), ("user", "R"))
    model.close()


def test_a_template_that_takes_late_system_messages_gets_them_where_they_stand(metadata, tokenizer):
    model = served(metadata, tokenizer, ANY_SYSTEM)
    assert arranged(model, texts(*LATE)) == texts(*LATE)
    model.close()
    model = served(metadata, tokenizer, ANY_SYSTEM, hoist_system=True)
    assert arranged(model, texts(*LATE)) == texts(("system", "A\n\nB"), ("user", "Q"), ("user", "R"))
    model.close()


def test_borders_where_the_template_marks_no_ends(metadata, tokenizer):
    model = served(metadata, tokenizer, NO_ENDS)
    prompt = prepare(model, Ask(messages=texts(("user", "Q")))).request.prompt
    assert tokenizer.decode(prompt.ids[: prompt.borders[0]]) == "user: Q\n"
    model.close()


def test_a_count_is_the_length_of_the_prompt_also_where_it_does_not_fit(metadata, tokenizer):
    model = served(metadata, tokenizer)
    ask = Ask(messages=texts(("user", "word " * 50)))
    assert count(model, ask) == len(prepare(model, ask).ids)
    assert count(model, Ask(messages=texts(("user", "word " * 9000)))) > 9000
    model.close()


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("Today is 2026-11-30.", "Today is 2026-12-01.", "date changed"),
        ("It is Monday, all day.", "It is Tuesday, all day.", "date changed"),
        ("Now: 12:30:01 sharp", "Now: 12:31:07 sharp", "time changed"),
        ("session 3fa85f64-5717-4562", "session 9ab85f64-5717-4562", "id changed"),
        ("header cch=aab1;", "header cch=zzq9;", "billing header changed"),
        ("attempt 7 of many", "attempt 8 of many", "number changed"),
        ("you like apples", "you like pears", "text changed"),
        ("<think>\nhm\n</think>\n\nYes", "Yes, go on and on", "reasoning removed"),
    ],
)
def test_why_a_prompt_parts_from_an_earlier_one(tokenizer, old, new, reason):
    recent = RecentPrompts(tokenizer)
    before, after = "You are a helpful person who writes code and explains it well to others.\n", " Go on. " * 5
    ids = [tokenizer.encode(before + text + after, parse_special=True) for text in (old, new)]
    assert recent.seen("one", ids[0]).diverged is None
    record = recent.seen("two", ids[1])
    place, _, found = record.diverged.partition(": ")
    same = int(np.argmax(np.array(ids[0][: min(map(len, ids))]) != np.array(ids[1][: min(map(len, ids))])))
    assert (place, found) == (f"token {same}", reason)


def test_a_prompt_that_goes_on_parts_from_nothing_and_answers_belong_to_the_conversation(tokenizer):
    recent = RecentPrompts(tokenizer)
    ids, answer = list(range(50)), [7, 8, 9]
    recent.answered(recent.seen("one", ids), ids, answer, reused=0)
    record = recent.seen("two", [*ids, *answer, 1, 2])
    assert record.diverged is None and record.shared == 53
    assert recent.seen("three", [*ids, 7, 1, 2, 3]).diverged.startswith("token 51")
    for n in range(100):
        recent.seen(f"more {n}", [1000 + n] * 20)
    assert len(recent.records) == 32 and len(recent._kept) == 16


def test_the_reader_of_an_answer_counts_reasoning_and_names_the_end(metadata, tokenizer):
    from tandem.serve.ask import Thinking

    model = served(metadata, tokenizer)
    prepared = prepare(model, Ask(messages=texts(("user", "Q")), tools=[tool()], thinking=Thinking(True)))
    assert prepared.prompt_end == "open"
    text = "Hm.</think>\n\nLook.\n" + call_text(city="Rome")
    for cut, finish in ((len(text), "tool_calls"), (len(text) - 20, "length"), (19, "stop")):
        reader = AnswerReader(prepared)
        for char in text[:cut]:
            reader.take([Piece(5, char)])
        reason = "stop" if finish != "tool_calls" else "eos"
        _, ended = reader.end(Finished(reason, GenerationStats(9, 0, cut, 0, 0, 0, reason)))
        assert ended.finish == finish and 0 < ended.reasoning_tokens <= len("Hm.</think>\n\n")
        assert (ended.flags == ("partial_tool_call",)) == (finish == "length")
    model.close()
