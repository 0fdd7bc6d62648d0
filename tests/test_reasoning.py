"""Reasoning and answer are told apart however the stream is cut, and nothing but tags and space is lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.text.reasoning import ReasoningSplitter, prompt_end


def _split(pieces, end="none"):
    splitter, found = ReasoningSplitter(end), {"reasoning": "", "answer": ""}
    kinds = []
    for piece in [p for text in pieces for p in splitter.push(text)] + splitter.flush():
        assert piece.text
        found[piece.kind] += piece.text
        kinds.append(piece.kind)
    assert kinds == sorted(kinds, reverse=True)
    return found["reasoning"], found["answer"]


_CASES = [
    ("none", "<think>\nhm, 2 < 3\n</think>\n\nYes.\n", ("hm, 2 < 3", "Yes.\n")),
    ("none", "\n<think></think>Yes", ("", "Yes")),
    ("none", "  Yes, <think> is a tag</think>", ("", "  Yes, <think> is a tag</think>")),
    ("none", "<thin line", ("", "<thin line")),
    ("none", "<thi", ("", "<thi")),
    ("none", "<think>cut off\n", ("cut off", "")),
    ("open", "hm\n\nhm\n</think>\n\nYes </think> <think>", ("hm\n\nhm", "Yes </think> <think>")),
    ("open", "</think>\n\nYes", ("", "Yes")),
    ("open", "a </thin b </think>c", ("a </thin b", "c")),
    ("closed", "\n\nYes\n\nand <think>no</think>", ("", "Yes\n\nand <think>no</think>")),
    ("none", "", ("", "")),
]


@pytest.mark.parametrize("end, text, expected", _CASES)
def test_every_cut_gives_the_same_parts(end, text, expected):
    reasoning, answer = _split([text], end)
    assert (reasoning.strip(), answer) == expected
    for pieces in [list(text), *([text[:cut], text[cut:]] for cut in range(len(text)))]:
        parts = _split(pieces, end)
        assert (parts[0].strip(), parts[1]) == expected


@given(st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "think", ">", "a", " ", "\n"]), max_size=12), st.data())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_no_word_is_lost(words, data):
    text = "".join(words)
    end = data.draw(st.sampled_from(["none", "open", "closed"]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    reasoning, answer = _split(pieces, end)
    whole = "".join(text.split())
    opened = end == "open" or end == "none" and whole.startswith("<think>")
    if end == "none" and opened:
        whole = whole.removeprefix("<think>")
    if opened and "</think>" in text:
        whole = whole.replace("</think>", "", 1)
    assert "".join((reasoning + answer).split()) == whole


def test_the_end_of_the_prompt_tells_where_the_answer_begins():
    assert prompt_end("<|im_start|>assistant\n<think>\n") == "open"
    assert prompt_end("<|im_start|>assistant\n<think>\n\n</think>\n\n") == "closed"
    assert prompt_end("<start_of_turn>model\n") == "none"
