"""Answers that the reference implementation of gpt-oss's format renders and parses are read the same by ours.

Needs the package openai-harmony and, as it downloads its vocabulary at first use, that vocabulary: where there is no
network, TIKTOKEN_ENCODINGS_BASE names a folder with o200k_base.tiktoken.
"""

import json

import pytest
from call_fixtures import TOOLS
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tool_parsers import checked_calls, summary

from tandem.text.tools import AnswerParser

harmony = pytest.importorskip("openai_harmony")


@pytest.fixture(scope="module")
def encoding():
    try:
        return harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    except harmony.HarmonyError as error:
        pytest.skip(f"no vocabulary: {error}")


texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12) | st.sampled_from(
    [
        "<|end|>",
        "<|call|> and <|return|>",
        "to=functions.edit",
        "<|channel|>final<|message|>x",
        "<tool_call>",
        "  a\n\n",
    ]
)
arguments = st.fixed_dictionaries({}, optional={"text": texts, "path": texts, "force": st.booleans()})
messages = st.lists(
    st.tuples(st.just("analysis"), texts)
    | st.tuples(st.just("commentary"), texts)
    | st.tuples(st.just("edit"), arguments),
    max_size=3,
)


def message(kind, value):
    """One message of the assistant as the reference knows it."""
    if kind != "edit":
        return harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, value).with_channel(kind)
    made = harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, json.dumps(value)).with_channel("commentary")
    return made.with_recipient("functions.edit").with_content_type("<|constrain|>json")


def test_both_read_the_same(encoding):
    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(parts=messages, final=st.none() | texts)
    def check(parts, final):
        parts = [*parts, *([("final", final)] if final else [])]
        conversation = harmony.Conversation.from_messages([message(kind, value) for kind, value in parts])
        ids = encoding.render_conversation(conversation)
        ids = ids[2:]  # <|start|>assistant, with which the prompt ends
        if not ids:
            return
        expected = [
            (str(found.channel), found.recipient, "".join(part.text for part in found.content))
            for found in encoding.parse_messages_from_completion_tokens(ids, harmony.Role.ASSISTANT)
        ]
        reasoning, content, flags, calls, _ = summary(read_ids(encoding, ids))
        assert not flags
        assert reasoning == "".join(text for channel, to, text in expected if channel == "analysis" and to is None)
        assert content == "".join(text for channel, to, text in expected if channel != "analysis" and to is None)
        called = tuple(("edit", json.loads(text)) for _, to, text in expected if to == "functions.edit")
        assert checked_calls(calls) == called == tuple(part for part in parts if part[0] == "edit")

    check()


def read_ids(encoding, ids):
    """Deltas of our parser, fed token by token as the engine does."""
    parser, deltas, held = AnswerParser("harmony", TOOLS, "none"), [], []
    for index in ids:
        if encoding.is_special_token(index):
            deltas += parser.push("", encoding.decode([index]))
            continue
        held.append(index)
        text = encoding.decode(held)
        if "\ufffd" not in text:
            deltas += parser.push(text)
            held = []
    return deltas + parser.push(encoding.decode(held)) + parser.finish("eos")
