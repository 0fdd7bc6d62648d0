"""Answers become reasoning, text and calls, however they are cut, damaged or hostile."""

import gc
import json
import random
import time

import pytest
from call_fixtures import ANSWERS, TOOLS, Answer
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.errors import RequestError
from tandem.text.tools import (
    FORMATS,
    AnswerParser,
    Content,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)


def read(pieces, format="qwen-xml", prompt_end="none", reason="eos", tools=TOOLS):
    """Deltas of an answer that arrives in these pieces."""
    parser = AnswerParser(format, tools, prompt_end)
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return deltas + parser.finish(reason)


def summary(deltas):
    """What the deltas say, without how they were cut: reasoning, content, calls with their ends, flags, order."""
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
    content = "".join(delta.text for delta in deltas if isinstance(delta, Content))
    flags = tuple(delta.flag for delta in deltas if isinstance(delta, Content) and delta.flag)
    calls = [[delta.name, "", None, delta.flag] for delta in deltas if isinstance(delta, ToolCallStart)]
    for delta in deltas:
        if isinstance(delta, ToolCallArguments):
            calls[delta.index][1] += delta.fragment
        elif isinstance(delta, ToolCallEnd):
            calls[delta.index][2] = delta
    order = []
    for delta in deltas:
        if not order or order[-1] is not type(delta):
            order.append(type(delta))
    return reasoning, content, flags, calls, order


def checked_calls(calls):
    """(name, arguments) of complete calls; asserts what every call must satisfy."""
    for _, fragments, end, _ in calls:
        assert end is not None and end.arguments == fragments
        if end.complete:
            assert isinstance(json.loads(fragments), dict) and end.source == ""
    return tuple((name, json.loads(text)) for name, text, end, _ in calls if end.complete)


def cuts(text, seed):
    """The text in random pieces of up to 9 characters."""
    rng, place, pieces = random.Random(seed), 0, []
    while place < len(text):
        size = rng.randint(1, 9)
        pieces.append(text[place : place + size])
        place += size
    return pieces


@pytest.mark.parametrize("name", ANSWERS)
def test_each_fixture_is_read_as_it_must(name):
    answer = ANSWERS[name]
    reasoning, content, flags, calls, _ = summary(read([answer.text], answer.format, answer.prompt_end))
    assert (reasoning, content, flags) == (answer.reasoning, answer.content, answer.flags)
    assert checked_calls(calls) == answer.calls


@pytest.mark.parametrize("name", ANSWERS)
def test_every_split_gives_the_same_result(name):
    answer = ANSWERS[name]
    whole = summary(read([answer.text], answer.format, answer.prompt_end))
    splits = [list(answer.text), *(cuts(answer.text, seed) for seed in range(8))]
    splits += [[answer.text[:cut], answer.text[cut:]] for cut in range(1, len(answer.text))]
    for pieces in splits:
        assert summary(read(pieces, answer.format, answer.prompt_end)) == whole, pieces


@pytest.mark.parametrize("name", ANSWERS)
def test_a_cut_answer_never_makes_a_wrong_call_and_loses_nothing(name):
    answer = ANSWERS[name]
    for cut in range(len(answer.text)):
        text = answer.text[:cut]
        deltas = read([text], answer.format, answer.prompt_end, reason="length")
        _, _, _, calls, _ = summary(deltas)
        complete = checked_calls(calls)
        assert complete == answer.calls[: len(complete)], text
        for word in ("Zürich", "Hm", "look"):
            if word in text:
                assert word in everything(deltas), text


def everything(deltas):
    """All text in the deltas, arguments also as they were before JSON escaped them."""
    found = []
    for delta in deltas:
        if isinstance(delta, (Reasoning, Content)):
            found.append(delta.text)
        elif isinstance(delta, ToolCallStart):
            found.append(delta.name)
        elif isinstance(delta, ToolCallEnd):
            found += [delta.arguments, delta.source]
    return "\n".join(found)


def test_a_cut_call_is_flagged_and_keeps_its_source():
    text = "I look.\n<tool_call>\n<function=edit>\n<parameter=text>\nhalf a fi"
    deltas = read([text], reason="length")
    end = deltas[-1]
    assert isinstance(end, ToolCallEnd) and not end.complete
    assert end.source == text.removeprefix("I look.\n") and end.arguments == '{"text":"half a fi'
    with pytest.raises(json.JSONDecodeError):
        json.loads(end.arguments)


@pytest.mark.parametrize("reason", ["length", "stop", "cancelled", "loop"])
def test_only_a_finished_answer_may_leave_out_end_tags(reason):
    text = "<tool_call>\n<function=edit>\n<parameter=text>\nx\n</parameter>\n</function>"
    assert read([text], reason=reason)[-1].complete is False
    assert read([text], reason="eos")[-1].complete is True


def test_strings_are_written_as_they_arrive_and_other_values_when_complete():
    parser = AnswerParser("qwen-xml", TOOLS, "none")
    parser.push("<tool_call>\n<function=edit>\n<parameter=text>\n")
    assert parser.push("Hello wor") == [ToolCallArguments(0, "Hello wor")]
    assert parser.push("ld\n") == [ToolCallArguments(0, "ld")]
    assert parser.push("</parameter>\n<parameter=lines>\n[1,") == [ToolCallArguments(0, '\\n"')][:0] + [
        ToolCallArguments(0, '"')
    ]
    assert parser.push("2]") == []
    assert parser.push("\n</parameter>\n</function>") == [ToolCallArguments(0, ',"lines":[1,2]')][:0]
    deltas = parser.push("\n</tool_call>")
    assert deltas == [ToolCallArguments(0, ',"lines":[1,2]}'), ToolCallEnd(0, '{"text":"Hello world","lines":[1,2]}')]


def test_a_call_starts_as_soon_as_its_name_is_known_and_begins_with_no_placeholder():
    parser = AnswerParser("qwen-xml", TOOLS, "none")
    deltas = parser.push("<tool_call>\n<function=edit>\n<parameter=path>")
    assert deltas == [ToolCallStart(0, "call_0", "edit")]
    assert parser.push("\n") + parser.push("a") == [ToolCallArguments(0, '{"path":"'), ToolCallArguments(0, "a")]


def test_ids_come_from_the_factory():
    ids = iter(["a1", "b2"])
    parser = AnswerParser("hermes", TOOLS, "none", new_id=lambda: next(ids))
    deltas = parser.push(ANSWERS["hermes two in one"].text) + parser.finish("eos")
    assert [delta.id for delta in deltas if isinstance(delta, ToolCallStart)] == ["a1", "b2"]


def test_a_function_that_was_not_offered_is_a_call_with_a_flag():
    start = read([ANSWERS["a function that was not offered"].text])[0]
    assert start == ToolCallStart(0, "call_0", "other", "unknown_function")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tools", [None, []])
def test_without_tools_a_call_is_text(format, tools):
    texts = [
        answer.text for answer in ANSWERS.values() if answer.format == format and answer.calls and not answer.reasoning
    ]
    for text in texts:
        _, content, flags, calls, _ = summary(read([text], format, tools=tools))
        assert not calls and not flags
        if format != "harmony":
            assert content == text


@pytest.mark.parametrize("format", FORMATS)
def test_control_tokens_mean_what_their_names_say(format):
    answers = [answer for answer in ANSWERS.values() if answer.format == format and "<" in answer.text]
    for answer in answers:
        parser = AnswerParser(format, TOOLS, answer.prompt_end)
        names = sorted(parser._markers, key=len, reverse=True)
        deltas, text = [], answer.text
        while text:
            name = next((name for name in names if text.startswith(name)), None)
            deltas += parser.push("", control=name) if name else parser.push(text[0])
            text = text.removeprefix(name) if name else text[1:]
        deltas += parser.push("", control="<|some_end|>") + parser.finish("eos")
        assert summary(deltas) == summary(read([answer.text], format, answer.prompt_end))


def test_harmony_text_that_spells_control_tokens_is_text():
    parser = AnswerParser("harmony", TOOLS, "none")
    deltas = parser.push("", "<|channel|>") + parser.push("final") + parser.push("", "<|message|>")
    deltas += parser.push("Use <|end|> and <|call|> here") + parser.push("", "<|return|>") + parser.finish("eos")
    assert summary(deltas)[1] == "Use <|end|> and <|call|> here"


def test_unknown_formats_and_bad_tools_are_named():
    with pytest.raises(RequestError, match="qwen-xml"):
        AnswerParser("qwen-xlm", TOOLS, "none")
    with pytest.raises(RequestError, match=r"tools\[1\]"):
        AnswerParser("hermes", [TOOLS[0], {"type": "function", "function": {}}], "none")


MARKERS = """\
< > </ { } [ ] " ' , : \\ <tool_call> </tool_call> <think> </think> <function= <function=edit> <function=zz>
</function> <parameter= <parameter=text> <parameter=lines> </parameter> <arg_key> </arg_key> <arg_value> </arg_value>
<|tool_call> <tool_call|> call:edit{ <|channel>thought <channel|> <|"|> <|python_tag|> <|channel|> <|message|> <|start|>
<|end|> <|call|> analysis final to=functions.edit edit {"name": "edit" "arguments" "parameters" text lines [1] true
""".split()


@st.composite
def hostile(draw):
    """Markers, blank space and numbered words in any order."""
    parts = draw(st.lists(st.sampled_from(MARKERS) | st.sampled_from([" ", "\n", "\n\n", "word", "ü"]), max_size=24))
    return [f"word{index}" if part == "word" else part for index, part in enumerate(parts)]


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(
    parts=hostile(),
    format=st.sampled_from(sorted(FORMATS)),
    prompt_end=st.sampled_from(["open", "closed", "none"]),
    reason=st.sampled_from(["eos", "length"]),
)
def test_no_input_raises_or_loses_a_word_or_depends_on_the_cut(parts, format, prompt_end, reason):
    text = "".join(parts)
    deltas = read([text], format, prompt_end, reason)
    checked_calls(summary(deltas)[3])
    assert summary(read(list(text), format, prompt_end, reason)) == summary(deltas)
    assert summary(read(parts, format, prompt_end, reason)) == summary(deltas)
    kept = everything(deltas)
    for part in parts:
        if part.startswith("word"):
            assert part in kept


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "unit",
    [
        "word ",
        "<",
        "\n",
        " ",
        "</parameter>\n",
        "<tool_call>",
        '<tool_call>{"a": "',
        "<tool_call>\n<function=edit>\n<parameter=text>\n",
        "</parameter>\n<parameter=text>",
        "{",
        '<|tool_call>call:edit{text:<|"|>',
        "<tool_call>edit<arg_key>a</arg_key>",
        "<|channel|>a<|message|>",
    ],
)
def test_time_grows_with_the_length_and_not_faster(format, unit):
    def seconds(chars):
        text = unit * (chars // len(unit))
        pieces = [text[place : place + 4] for place in range(0, len(text), 4)]
        gc.disable()  # a collection of all that other tests hold takes longer than the reading
        try:
            begin = time.thread_time()
            read(pieces, format, "open")
            return time.thread_time() - begin
        finally:
            gc.enable()

    short, long = (min(seconds(chars) for _ in range(2)) for chars in (16_000, 128_000))
    assert long < max(20 * short, 0.5), f"{short:.3f} s for 16,000 characters, {long:.3f} s for 128,000"


def test_fixtures_cover_every_format():
    assert {answer.format for answer in ANSWERS.values()} == set(FORMATS)
    assert all(isinstance(answer, Answer) for answer in ANSWERS.values())


@pytest.mark.parametrize("format", FORMATS)
def test_many_answers_at_once_are_read_as_one(format):
    answers = [answer for answer in ANSWERS.values() if answer.format == format]
    answers = [answers[index % len(answers)] for index in range(32)]
    parsers = [AnswerParser(format, TOOLS, answer.prompt_end) for answer in answers]
    deltas = [[] for _ in answers]
    for place in range(max(len(answer.text) for answer in answers)):
        for index, answer in enumerate(answers):
            deltas[index] += parsers[index].push(answer.text[place : place + 1])
    for index, answer in enumerate(answers):
        deltas[index] += parsers[index].finish("eos")
        assert summary(deltas[index]) == summary(read([answer.text], format, answer.prompt_end))
