"""A reasoning budget closes reasoning when it is used up, not before and not later; two constraints act as one."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_grammar import tokenizer_of

from tandem.errors import RequestError
from tandem.text.budget import MARKERS, MESSAGE, Both, ReasoningBudget, reasoning_budget
from tandem.text.grammar import make_constraint
from tandem.text.tools import AnswerParser, Content, Reasoning

CLOSING = (900, 901)


def of_text(limit, prompt_end, format="none"):
    return reasoning_budget(tokenizer_of("pocket"), limit, prompt_end, format)()


def run(constraint, ids):
    """Feeds ids and, in front of each, whatever is forced; all ids in the order in which they were written."""
    written = []
    for index in ids:
        while forced := list(constraint.forced()):
            for part in forced:
                constraint.accept(part)
            written += forced
        constraint.accept(index)
        written.append(index)
    return written + list(constraint.forced())


def spelled(ids):
    tokenizer = tokenizer_of("pocket")
    return tokenizer.decode(ids, keep_control=True)


@pytest.mark.parametrize("limit", [1, 2, 7, 30])
def test_exactly_the_budget_is_reasoned_and_then_the_message_comes(limit):
    tokenizer = tokenizer_of("pocket")
    thoughts = tokenizer.encode("one two three four five six seven " * 20)
    budget = of_text(limit, "open")
    for index in thoughts[:limit]:
        assert budget.forced() == () and not budget.closed
        budget.accept(index)
    assert budget.closed
    assert spelled(budget.forced()) == f"{MESSAGE}</think>\n\n"


def test_a_budget_of_zero_closes_at_once_without_a_message():
    assert spelled(of_text(0, "open").forced()) == "</think>\n\n"
    budget = of_text(0, "none")
    assert budget.forced() == ()
    budget.accept(tokenizer_of("pocket").token_id("<think>"))
    assert spelled(budget.forced()) == "</think>\n\n"


@pytest.mark.parametrize("prompt_end", ["closed", "none"])
def test_text_outside_of_reasoning_costs_nothing(prompt_end):
    ids = tokenizer_of("pocket").encode("no thoughts at all, only text " * 20)
    assert run(of_text(3, prompt_end), ids) == ids


def test_after_the_forced_close_the_answer_is_free():
    tokenizer = tokenizer_of("pocket")
    thoughts, answer = tokenizer.encode("a b c d e f g h"), tokenizer.encode("Then the answer, which is long. " * 9)
    written = run(of_text(4, "open"), thoughts[:4] + answer)
    assert spelled(written) == spelled(thoughts[:4]) + f"{MESSAGE}</think>\n\n" + spelled(answer)
    parser = AnswerParser("qwen-xml", [], "open")
    deltas = parser.push(spelled(written)) + parser.finish("eos")
    assert "".join(d.text for d in deltas if isinstance(d, Content)) == spelled(answer)
    assert all(isinstance(delta, (Content, Reasoning)) for delta in deltas)


def test_a_model_that_closes_in_time_is_left_alone():
    ids = tokenizer_of("pocket").encode("short\n</think>\n\n" + "a long answer " * 30)
    assert run(of_text(20, "open"), ids) == ids


def test_several_spans_of_reasoning_share_the_budget():
    tokenizer = tokenizer_of("pocket")
    span = tokenizer.encode("<think>a b c</think>x")
    budget = of_text(2 * len(tokenizer.encode("a b c")), "none")
    assert run(budget, span) == span
    written = run(budget, tokenizer.encode("<think>a b c d e f</think>"))
    assert spelled(written).startswith(f"<think>a b c{MESSAGE}</think>\n\n")


def test_a_call_ends_reasoning_and_a_mention_does_not():
    tokenizer = tokenizer_of("pocket")
    call = tokenizer.encode("a<tool_call>\n<function=f>\n" + "<parameter=x>\nvalue\n</parameter>\n" * 20)
    assert run(of_text(12, "open"), call) == call
    mention = tokenizer.encode("a <tool_call> b " + "more words " * 20)
    assert MESSAGE in spelled(run(of_text(12, "open"), mention))


def test_tags_in_any_tokens_are_seen():
    tokenizer = tokenizer_of("small")  # has <think> as a token, but no </think>
    assert tokenizer.token_id("</think>") is None
    make = reasoning_budget(tokenizer, 40, "open")
    ids = tokenizer.encode("some thoughts</think>") + tokenizer.encode("answer " * 60)
    assert run(make(), ids) == ids
    ids = tokenizer.encode("some thoughts " * 20)
    assert tokenizer.decode(run(make(), ids)[40:]).startswith(f"{MESSAGE}</think>\n\n")


def test_a_character_is_not_cut_in_two():
    data = {index: bytes([byte]) for index, byte in enumerate("aü日😀b".encode())}
    for limit in range(1, len(data) + 1):
        budget = ReasoningBudget(limit, CLOSING, data.__getitem__, inside=True)
        written = b""
        for index in data:
            if budget.forced():
                break
            budget.accept(index)
            written += data[index]
        written.decode()
        assert limit <= len(written) < limit + 4


def test_broken_bytes_do_not_hold_the_budget_up():
    budget = ReasoningBudget(2, CLOSING, lambda index: b"\xf0", inside=True)
    count = 0
    while not budget.forced():
        budget.accept(0)
        count += 1
    assert count <= 8


@pytest.mark.parametrize("format", MARKERS)
def test_other_formats_are_closed_in_their_own_way(format):
    def feed(budget, parts):
        for part in parts:
            assert not budget.forced()
            budget.accept(parts.index(part))
        return budget.forced()

    thoughts = {
        "gemma": ["<|channel>", "thought\n", "a", "b"],
        "harmony": ["<|channel|>", "analysis", "<|message|>", "a", "b"],
    }
    parts = thoughts[format]
    names = [part.encode() for part in parts]
    budget = ReasoningBudget(2, CLOSING, names.__getitem__, False, MARKERS[format])
    assert feed(budget, parts) == CLOSING
    parser = AnswerParser(format, [], "none")
    deltas = parser.push("".join(parts) + MARKERS[format].closing + "Yes") + parser.finish("eos")
    assert "".join(delta.text for delta in deltas if isinstance(delta, Content)) == "Yes"
    assert "".join(delta.text for delta in deltas if isinstance(delta, Reasoning)) == "ab"


def test_a_negative_budget_is_refused():
    with pytest.raises(RequestError, match="-1"):
        reasoning_budget(tokenizer_of("pocket"), -1, "open")


class Scripted:
    """A constraint that says what it was told to."""

    def __init__(self, mask=None, forced=()):
        self.mask, self._forced, self.told = mask, forced, []

    def allowed(self):
        return None if self.mask is None else np.array([self.mask], np.uint32)

    def forced(self):
        return self._forced

    def accept(self, token):
        self.told.append(token)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(a=st.none() | st.integers(1, 2**32 - 1), b=st.none() | st.integers(1, 2**32 - 1))
def test_both_allow_what_each_allows(a, b):
    both = Both(Scripted(a), Scripted(b))
    every = 2**32 - 1
    wanted = (every if a is None else a) & (every if b is None else b)
    if wanted == 0:
        with pytest.raises(RequestError, match="both"):
            both.allowed()
    elif a is None and b is None:
        assert both.allowed() is None
    else:
        assert both.allowed().tolist() == [wanted]


def test_the_first_that_forces_is_followed_and_both_are_told():
    first, second = Scripted(forced=(1, 2)), Scripted(forced=(3,))
    assert Both(first, second).forced() == (1, 2)
    assert Both(Scripted(), second).forced() == (3,)
    both = Both(first, second)
    both.accept(1)
    assert first.told == second.told == [1]


def test_a_budget_and_a_schema_together_give_a_closed_thought_and_an_instance():
    tokenizer = tokenizer_of("pocket")
    schema = make_constraint(tokenizer, json_schema={"const": {"a": 1}}, prompt_end="open")
    both = Both(reasoning_budget(tokenizer, 5, "open")(), schema())
    ids, thoughts = [], tokenizer.encode("thinking and thinking and thinking")
    while (
        both.allowed() is None
        or not set(np.flatnonzero(np.unpackbits(both.allowed().view(np.uint8), bitorder="little"))) <= tokenizer.eog_ids
    ):
        forced, mask = both.forced(), both.allowed()
        if forced:
            index = forced[0]
        elif mask is None:
            index = thoughts[len(ids)]
        else:
            index = int(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0])
        both.accept(index)
        ids.append(index)
    text = tokenizer.decode(ids)
    assert text.startswith(tokenizer.decode(thoughts[:5]) + MESSAGE + "</think>\n\n")
    assert json.loads(text.partition("</think>")[2]) == {"a": 1}
