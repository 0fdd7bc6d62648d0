"""What templates write is what parsers read; arguments get the types of their schemas; formats are recognized."""

import json
import re
from pathlib import Path

import call_templates
import chat_templates
import pytest
from call_fixtures import TOOLS, function
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tool_parsers import checked_calls, cuts, read, summary

from tandem.default_model import default_model
from tandem.errors import RequestError
from tandem.gguf import read_gguf
from tandem.text.reasoning import prompt_end
from tandem.text.template import ChatTemplate
from tandem.text.tokenizer import Tokenizer
from tandem.text.tool_schema import read_tools, types_of
from tandem.text.tools import AnswerParser, Content, ToolCallArguments, capabilities, format_of
from tandem.text.tools.coerce import to_json

POCKET = (Path(__file__).parents[1] / "pocket" / "chat_template.jinja").read_text()
TEMPLATES = {
    "thinking": ("qwen-xml", chat_templates.THINKING, "<|im_end|>\n"),
    "pocket": ("qwen-xml", POCKET, "<|im_end|>\n"),
    "hermes": ("hermes", call_templates.HERMES, "<|im_end|>\n"),
    "glm": ("glm", call_templates.GLM, "<|im_end|>\n"),
    "gemma": ("gemma", call_templates.GEMMA, "<|im_end|>\n"),
    "llama3": ("llama3", chat_templates.LLAMA3, "<|eot_id|>"),
    "harmony": ("harmony", call_templates.HARMONY, ""),
}
LOOK_ALIKES = (
    "</parameter>|</function>|</tool_call>|<tool_call>|<function=edit>|<parameter=path>|<parameter=zz>|</think>|<think>|"
    "</arg_value>|<arg_key>|</arg_key>|<arg_value>|<tool_call|>|<|tool_call>|{|}|\\|\"|'|`|\n|\r\n|,|:|call:edit{|"
    "<|channel>|[|]|null|5|true"
).replace("|>|<|", "|>\x00<|")
LOOK_ALIKES = [part for piece in LOOK_ALIKES.split("\x00") for part in re.split(r"(?<!<)\|(?!>)", piece)]
# Text that ends a value in every reading, see `qwen_xml`: no parser can tell it from the end of the call.
AMBIGUOUS = {
    "qwen-xml": re.compile(
        r"</parameter>\s*(<parameter=|</function>\s*(</?tool_call>|<function=)|</tool_call>\s*<tool_call>)"
        r"|\n</function>\s*</tool_call>\s*<tool_call>"
    ),
    "glm": re.compile(r"</arg_value>\s*(<arg_key>|</tool_call>|$)|</tool_call>\s*<tool_call>"),
    "gemma": re.compile(r'<\|"\|>'),
}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_metadata(read_gguf(default_model()).metadata)


@pytest.fixture(scope="module")
def templates(tokenizer):
    made = {name: ChatTemplate(source, tokenizer) for name, (_, source, _) in TEMPLATES.items()}
    yield made
    for template in made.values():
        template.close()


texts = st.lists(st.sampled_from(LOOK_ALIKES) | st.text(st.characters(codec="utf-8"), max_size=6), max_size=6).map(
    "".join
)
plain = st.integers(-(2**70), 2**70) | st.booleans() | st.none() | st.text('abc é\n"\\', max_size=8)
nested = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab_", min_size=1, max_size=3), inner, max_size=3)
    ),
)
edits = st.fixed_dictionaries(
    {},
    optional={
        "path": texts,
        "text": texts,
        "lines": st.lists(st.integers(-5, 10**20), max_size=4),
        "options": st.dictionaries(st.text("ab_", min_size=1, max_size=3), nested, max_size=3),
        "force": st.booleans(),
        "mode": st.sampled_from(["fast", "safe"]),
    },
)
calls = st.lists(st.tuples(st.just("edit"), edits) | st.tuples(st.just("now"), st.just({})), min_size=1, max_size=3)


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_writes_is_read_back(name, templates):
    format, _, end = TEMPLATES[name]

    @settings(max_examples=80, deadline=None, derandomize=True)
    @given(calls=calls, content=st.sampled_from(["", "I look."]), seed=st.integers(0, 99))
    def check(calls, content, seed):
        if name == "llama3":  # writes one call and nothing else
            calls, content = calls[:1], ""
        values = [value for _, arguments in calls for value in arguments.values() if isinstance(value, str)]
        if format in AMBIGUOUS and any(AMBIGUOUS[format].search(value) for value in values):
            return
        written = assistant_turn(templates[name], calls, content, end)
        for pieces in ([written], cuts(written, seed)):
            _, text, flags, found, _ = summary(read(pieces, format, "none"))
            assert not flags and text.strip() == content
            assert checked_calls(found) == tuple(calls)

    check()


def assistant_turn(template, calls, content, end):
    """What the model would have written for the template to show it so."""
    question = [{"role": "user", "content": "Q"}]
    made = [chat_templates.call(name, arguments) for name, arguments in calls]
    answer = {"role": "assistant", "content": content, "tool_calls": made}
    prompt = template.render(question, TOOLS, enable_thinking=False)
    whole = template.render([*question, answer], TOOLS, add_generation_prompt=False)
    prompt = prompt if whole.startswith(prompt) else prompt.removesuffix("<think>\n\n</think>\n\n")
    assert whole.startswith(prompt) and whole.endswith(end)
    return whole[len(prompt) : len(whole) - len(end)]


def test_tokens_of_the_packaged_model_give_the_same_as_text(tokenizer, templates):
    arguments = {"path": "a/ü.txt", "text": "def f():\n    return '</parameter>'\n", "lines": [1, 22]}
    written = assistant_turn(templates["pocket"], [("edit", arguments), ("now", {})], "I look.", "<|im_end|>\n")
    parser, decoder = AnswerParser("qwen-xml", TOOLS, "closed"), tokenizer.decoder(continues=True)
    deltas = [delta for index in tokenizer.encode(written) for delta in parser.push(decoder.push(index))]
    deltas += parser.finish("eos")
    assert checked_calls(summary(deltas)[3]) == (("edit", arguments), ("now", {}))


@pytest.mark.parametrize("name", ["thinking", "pocket"])
def test_the_prompt_tells_where_reasoning_stands(name, templates):
    question = [{"role": "user", "content": "Q"}]
    assert prompt_end(templates[name].render(question, enable_thinking=True)) == "open"
    assert prompt_end(templates[name].render(question, enable_thinking=False)) == "closed"


@pytest.mark.parametrize(
    ("raw", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        (" 5 ", {"type": "integer"}, 5),
        ("5.0", {"type": "integer"}, 5),
        ("5.5", {"type": "integer"}, "5.5"),
        ("+05", {"type": "integer"}, 5),
        ("five", {"type": "integer"}, "five"),
        ("5.50", {"type": "number"}, 5.5),
        ("1e3", {"type": "number"}, 1000.0),
        (".5", {"type": "number"}, 0.5),
        ("NaN", {"type": "number"}, "NaN"),
        ("1_000", {"type": "number"}, "1_000"),
        ("-", {"type": "number"}, "-"),
        ("true", {"type": "boolean"}, True),
        ("False", {"type": "boolean"}, False),
        ("1", {"type": "boolean"}, "1"),
        ("null", {"type": "null"}, None),
        ("None", {"type": "null"}, None),
        ("null", {"type": "string"}, "null"),
        ("null", {"type": ["string", "null"]}, None),
        ("None", {"type": ["string", "null"]}, "None"),
        ("", {"type": ["integer", "null"]}, None),
        ("5", {"type": ["string", "integer"]}, 5),
        ("05", {"type": ["string", "integer"]}, "05"),
        ("5", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 5),
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ("['a', True]", {"type": "array"}, ["a", True]),
        ("[1, 2", {"type": "array"}, "[1, 2"),
        ("a, b", {"type": "array"}, "a, b"),
        ('{"a": [1, null]}', {"type": "object"}, {"a": [1, None]}),
        ('"{\\"a\\": 1}"', {"type": "object"}, {"a": 1}),
        ("[1]", {"type": "object"}, "[1]"),
        ('{"a": 1}', {"type": "string"}, '{"a": 1}'),
        ('{"a": 1}', {}, {"a": 1}),
        ("word", {}, "word"),
        ('"word"', {}, '"word"'),
        ("5", {}, 5),
        ("b", {"enum": ["a", "b"]}, "b"),
        (' "b"', {"enum": ["a", "b"]}, "b"),
        ("5", {"enum": ["5", "6"]}, "5"),
        ("5", {"enum": [5, 6]}, 5),
        ("c", {"enum": ["a", "b"]}, "c"),
        ("x", {"const": "x"}, "x"),
        ("5", {"$ref": "#/$defs/n"}, 5),
        ("5", {"$ref": "#/$defs/round"}, 5),
        ("5", {"allOf": [{"type": ["string", "integer"]}, {"type": "integer"}]}, 5),
        ('{"a":1}', {"properties": {"a": {}}}, {"a": 1}),
        ("[" * 5000, {"type": "array"}, "[" * 5000),
        ("9" * 6000, {"type": "string"}, "9" * 6000),
        ("a\ud800"[:1] + "\x00\u2028", {"type": "string"}, "a\x00\u2028"),
    ],
)
def test_raw_arguments_get_the_type_of_their_schema(raw, schema, value):
    parameters = {
        "properties": {"key": schema},
        "$defs": {"n": {"type": "integer"}, "round": {"$ref": "#/$defs/round"}},
    }
    tool = read_tools([{"name": "f", "parameters": parameters}])["f"]
    text = to_json(raw, tool.types_of("key"), tool.choices_of("key"))
    assert json.loads(text) == value and type(json.loads(text)) is type(value)


def test_numbers_keep_their_digits():
    for raw in ("1.10", "123456789012345678901234567890", "1" * 6000, "0.1234567890123456789", "1e400"):
        assert to_json(raw, frozenset({"number"})) == raw
        deltas = read([f'<tool_call>{{"name": "now", "arguments": {{"n": {raw}}}}}</tool_call>'], "hermes")
        assert ToolCallArguments(0, f'{{"n":{raw}}}') in deltas


def test_half_characters_in_json_stay_escaped_so_that_the_answer_can_be_sent():
    text = '<tool_call>{"name": "edit", "arguments": {"text": "\\ud83d x", "path": "\\ud83d\\ude00"}}</tool_call>'
    end = read([text], "hermes")[-1]
    end.arguments.encode()
    assert json.loads(end.arguments) == {"text": "\ud83d x", "path": "😀"}


def test_deep_values_come_back_as_text_without_an_error():
    for depth in (500, 20_000):
        text = '<tool_call>{"name": "now", "arguments": {"a": ' + "[" * depth + "]" * depth + "}}</tool_call>"
        deltas = read([text], "hermes")
        if not checked_calls(summary(deltas)[3]):
            assert deltas == [Content(text, "malformed_tool_call")]


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}, "f"),
        ({"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}, "f"),
        ({"name": "f", "description": "d", "input_schema": {"type": "object"}}, "f"),
        ({"type": "function", "function": {"name": "mcp__a-b.c", "parameters": None}}, "mcp__a-b.c"),
    ],
)
def test_tools_of_every_api_are_read(entry, name):
    tool = read_tools([entry])[name]
    assert tool.name == name and tool.strict == bool(entry.get("strict"))


def test_tools_that_are_no_functions_are_left_out():
    assert read_tools([{"type": "web_search"}, {"type": "local_shell", "x": 1}]) == {}
    assert read_tools(None) == read_tools([]) == {}


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ("x", "str"),
        ([1], r"tools\[0\]"),
        ([{"type": "function", "function": "f"}], "function"),
        ([{"type": "function", "function": {"name": ""}}], "name"),
        ([{"type": "function", "function": {"name": "a>b"}}], "brackets"),
        ([{"name": "f"}, {"name": "f"}], "twice"),
        ([{"name": "f", "parameters": []}], "schema"),
        ([{"name": f"f{i}"} for i in range(2000)], "1024"),
    ],
)
def test_tools_that_cannot_be_read_are_named(tools, words):
    with pytest.raises(RequestError, match=words):
        read_tools(tools)


def test_types_of_hostile_schemas_take_bounded_time():
    deep = {"type": "integer"}
    for _ in range(5000):
        deep = {"anyOf": [deep]}
    wide = {"anyOf": [{"anyOf": [{"$ref": "#"}] * 64}] * 64}
    assert types_of(deep, deep) >= {"string"}
    assert types_of(wide, wide)


def test_formats_are_recognized_by_their_templates():
    for format, source, _ in TEMPLATES.values():
        if format != "llama3":
            assert format_of(source, {}) == format
    assert format_of(chat_templates.CHATML, {}) == "none"
    assert format_of("{{- '<|python_tag|>' }}", {}) == "llama3"
    assert format_of(chat_templates.LLAMA3, {}) == "llama3"
    assert format_of(None, {"general.architecture": "gpt-oss"}) == "harmony"
    assert format_of(None, {}) == "none"


def test_capabilities_are_found_by_trying(templates, tokenizer):
    thinking, pocket, llama = (capabilities(templates[name]) for name in ("thinking", "pocket", "llama3"))
    assert thinking.supports_tools and thinking.supports_reasoning and thinking.thinking_switch == "enable_thinking"
    assert thinking.supports_system and thinking.system_first and thinking.tool_results and thinking.keeps_reasoning
    assert pocket.supports_tools and pocket.system_first and pocket.thinking_switch == "enable_thinking"
    assert llama.supports_tools and not llama.supports_reasoning and llama.tool_results
    for source, tools, system_first in ((chat_templates.CHATML, False, False), (chat_templates.GEMMA, False, True)):
        template = ChatTemplate(source, tokenizer)
        found = capabilities(template)
        template.close()
        assert (found.supports_tools, found.system_first, found.supports_reasoning) == (tools, system_first, False)


def test_a_function_helper_is_what_the_api_sends():
    assert read_tools([function("f", {"a": {"type": "string"}}, strict=True)])["f"].strict
