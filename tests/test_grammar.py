"""Whatever the logits say, what is written under a constraint satisfies it; what cannot be enforced is refused."""

import json
import os
import random
import re
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from small_vocabularies import byte_level
from test_tool_parsers import checked_calls, read, summary

from tandem.default_model import default_model
from tandem.errors import RequestError
from tandem.gguf import read_gguf
from tandem.text.grammar import MAX_KEPT, Limits, ToolRequest, make_constraint
from tandem.text.masks import vocabulary_of
from tandem.text.tokenizer import Tokenizer

MODELS = Path(os.environ.get("TANDEM_TEST_MODELS") or Path.home() / ".cache" / "tandem-test-models")
SMOLLM2 = MODELS / "SmolLM2-135M-Instruct.Q4_1.gguf"
needs_smollm2 = pytest.mark.skipif(not SMOLLM2.exists(), reason="bench/fetch_models.py fetches it")
VOCABULARIES = ["small", "pocket", pytest.param("smollm2", marks=needs_smollm2)]
_TOKENIZERS = {}


def tokenizer_of(name):
    """The tokenizer of a tiny vocabulary without tool tokens, of the packaged model, or of SmolLM2."""
    if name not in _TOKENIZERS:
        paths = {"pocket": default_model(), "smollm2": SMOLLM2}
        metadata = read_gguf(paths[name]).metadata if name in paths else byte_level("gpt-2")
        _TOKENIZERS[name] = Tokenizer.from_metadata(metadata)
    return _TOKENIZERS[name]


def allowed_ids(mask, size):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:size])


@lru_cache
def closing_tokens(tokenizer):
    """Which tokens begin with a character that tends to bring an end nearer."""
    return np.array([(tokenizer.token_bytes(i) or b"x")[:1] in b'"}],<\n@7' for i in range(tokenizer.vocab_size)])


def write(tokenizer, constraint, seed, max_tokens=500, free=()):
    """Ids that a random sampler writes under a constraint, None if it found no end: any allowed token, but more and
    more often one that closes something, now and then a whole end tag. free: what is written, id by id, while
    everything is allowed."""
    rng, free, close, ids = random.Random(seed), list(free), [], []
    closing = closing_tokens(tokenizer)
    while len(ids) < max_tokens:
        mask = constraint.allowed()
        forced = list(constraint.forced())
        for index in forced:
            mask = constraint.allowed()
            assert mask is None or mask[index // 32] >> np.uint32(index % 32) & 1, "a forced token is not allowed"
            constraint.accept(index)
        ids += forced
        if forced:
            continue
        if mask is None:
            if not free:
                return ids
            index = free.pop(0)
        else:
            choices = allowed_ids(mask, tokenizer.vocab_size)
            assert len(choices), "nothing is allowed"
            ends = [index for index in choices if index in tokenizer.eog_ids]
            if ends and rng.random() < 0.5:
                constraint.accept(ends[0])
                return ids
            preferred = choices[closing[choices]]
            choices = preferred if len(preferred) and rng.random() < min(0.9, 0.3 + len(ids) / 80) else choices
            index = int(choices[rng.randrange(len(choices))])
            if not close and rng.random() < 0.1:
                close = tokenizer.encode("\n</parameter>\n")
            if close and mask[close[0] // 32] >> np.uint32(close[0] % 32) & 1:
                index = close.pop(0)
            else:
                close = []
        constraint.accept(index)
        if index in tokenizer.eog_ids:
            return ids
        ids.append(index)
    return None


def o(properties, required=None, **extra):
    """An object schema; everything is required unless said otherwise."""
    required = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": required, **extra}


S, I, N, B = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))  # noqa: E741
SCHEMAS = {
    "string": S,
    "integer range": {"type": "integer", "minimum": -3, "maximum": 120},
    "number range": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "multiple": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 500},
    "boolean": B,
    "null": {"type": "null"},
    "enum": {"enum": ["a", "b c", 3, None, True]},
    "const": {"const": {"a": [1, "x"]}},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "pattern inside": {"type": "string", "pattern": "[0-9]"},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "email": {"type": "string", "format": "email"},
    "array": {"type": "array", "items": I, "minItems": 1, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [S, I], "items": False, "minItems": 2},
    "object": o({"name": S, "age": I}, additionalProperties=False),
    "optional": o({"name": S, "age": I, "tags": {"type": "array", "items": S}}, ["name"], additionalProperties=False),
    "open object": o({"name": S}),
    "map": {"type": "object", "additionalProperties": I},
    "pattern properties": {"type": "object", "patternProperties": {"^x_": I}, "additionalProperties": False},
    "property count": {"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": B},
    "nested": o({"a": o({"b": o({"c": {"type": "array", "items": o({"d": B}), "maxItems": 2}})})}),
    "pydantic optional": o({"x": {"anyOf": [I, {"type": "null"}], "default": None, "title": "X"}}, [], title="M"),
    "pydantic references": {
        "$defs": {"Item": o({"sku": S, "price": {"type": "number", "minimum": 0}}, title="Item")},
        **o({"items": {"type": "array", "items": {"$ref": "#/$defs/Item"}, "maxItems": 3}}),
    },
    "pydantic union": {
        "$defs": {
            "Cat": o({"kind": {"const": "cat", "type": "string"}, "lives": I}),
            "Dog": o({"kind": {"const": "dog", "type": "string"}, "good": B}),
        },
        **o({"pet": {"anyOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]}}),
    },
    "pydantic discriminated": {
        "oneOf": [o({"kind": {"const": "a"}, "v": I}), o({"kind": {"const": "b"}, "v": S})],
        "discriminator": {"propertyName": "kind"},
    },
    "zod": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **o({"id": {"type": "string", "format": "uuid"}, "role": {"type": "string", "enum": ["admin", "user"]}}),
        "additionalProperties": False,
    },
    "types": o({"v": {"type": ["string", "number", "null"]}}),
    "recursive": {
        "$defs": {"node": o({"v": I, "next": {"$ref": "#/$defs/node"}}, ["v"], additionalProperties=False)},
        "$ref": "#/$defs/node",
    },
    "all of": {"allOf": [o({"a": I}), o({"b": S})]},
    "openapi format": o({"n": {"type": "integer", "format": "int32"}, "p": {"type": "string", "format": "password"}}),
    "keywords as names": o({"enum": S, "format": S, "pattern": {"type": "string", "maxLength": 3}}),
}


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("name", SCHEMAS)
def test_random_logits_write_valid_instances(name, vocabulary):
    tokenizer, schema = tokenizer_of(vocabulary), SCHEMAS[name]
    factory = make_constraint(tokenizer, json_schema=schema, prompt_end="closed")
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    written = [write(tokenizer, factory(), seed) for seed in range(3)]
    complete = [tokenizer.decode(ids) for ids in written if ids is not None]
    assert complete, "no answer came to an end"
    for text in complete:
        validator.validate(json.loads(text))


def test_the_checker_of_instances_sees_a_wrong_one():
    tokenizer = tokenizer_of("pocket")
    ids = write(tokenizer, make_constraint(tokenizer, json_schema=SCHEMAS["object"], prompt_end="closed")(), 0)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(tokenizer.decode(ids)), o({"other": S}))


@pytest.mark.parametrize(
    "pattern", ["[a-c]{3}", "^(yes|no)$", "a|bb", "\\d{4}-\\d{2}", "(?i)abc", "[^x]{2}/[a-z]+", "😀+!", "(a+)+b"]
)
def test_a_regex_is_matched_as_a_whole(pattern):
    tokenizer = tokenizer_of("pocket")
    factory = make_constraint(tokenizer, regex=pattern, prompt_end="closed")
    texts = [tokenizer.decode(ids) for seed in range(5) if (ids := write(tokenizer, factory(), seed)) is not None]
    for text in texts:
        assert re.fullmatch(pattern, text), text
    assert texts


@pytest.mark.parametrize(
    "grammar",
    [
        'start: greeting " " NAME "!"\ngreeting: "Hello" | "Bye"\nNAME: /[A-Z][a-z]{1,5}/',
        'root ::= greeting " " name "!"\ngreeting ::= "Hello" | "Bye"\nname ::= [A-Z] [a-z]{1,5}',
    ],
    ids=["lark", "gbnf"],
)
def test_grammars_in_both_notations_are_followed(grammar):
    tokenizer = tokenizer_of("pocket")
    factory = make_constraint(tokenizer, grammar=grammar, prompt_end="closed")
    for seed in range(5):
        assert re.fullmatch("(Hello|Bye) [A-Z][a-z]{1,5}!", tokenizer.decode(write(tokenizer, factory(), seed)))


def test_after_the_end_only_end_tokens_are_allowed():
    tokenizer = tokenizer_of("pocket")
    constraint = make_constraint(tokenizer, json_schema={"const": "x"}, prompt_end="closed")()
    for index in tokenizer.encode('"x"'):
        constraint.accept(index)
    assert set(allowed_ids(constraint.allowed(), tokenizer.vocab_size)) == tokenizer.eog_ids
    assert constraint.forced() == ()
    with pytest.raises(RequestError):
        constraint.accept(tokenizer.encode("x")[0])


def test_a_token_that_is_not_allowed_is_refused():
    tokenizer = tokenizer_of("pocket")
    constraint = make_constraint(tokenizer, json_schema=SCHEMAS["object"], prompt_end="closed")()
    with pytest.raises(RequestError, match="not allowed"):
        constraint.accept(tokenizer.encode("x")[0])


def test_nothing_to_enforce_makes_no_constraint():
    tokenizer, tools = tokenizer_of("pocket"), [{"name": "f", "parameters": o({"a": S})}]
    assert make_constraint(tokenizer) is None
    assert make_constraint(tokenizer, tool_request=ToolRequest(tools, "auto", "qwen-xml")) is None
    strict = [{**tools[0], "strict": True}]
    assert make_constraint(tokenizer, tool_request=ToolRequest(strict, "none", "qwen-xml")) is None


# Calls

CITY = {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": o(
            {
                "city": CITY,
                "days": {"type": "integer", "minimum": 1, "maximum": 10},
                "unit": {"type": "string", "enum": ["C", "F", "very cold"]},
                "note": {"anyOf": [S, {"type": "null"}]},
                "more": {"anyOf": [o({"a": I}, additionalProperties=False), {"type": "null"}]},
                "label": {"type": "string", "minLength": 2, "maxLength": 6},
                "on": {"type": "array", "items": B, "maxItems": 3},
            },
            ["city", "days"],
            additionalProperties=False,
        ),
    },
}
PLAIN = [
    {"name": "get", "parameters": o({})},
    {"name": "free", "parameters": {"type": "object"}},
    {"name": "odd", "parameters": o({"x": {"not": {"type": "string"}}})},
]
ALL = [WEATHER, *PLAIN]


def check_calls(text, format, names, prompt_end="closed"):
    """The calls in a text; asserts that each is complete, of a known tool, and valid if it is the strict one."""
    _, content, flags, calls, _ = summary(read([text], format, prompt_end, tools=ALL))
    found = checked_calls(calls)
    assert not flags and not content.strip() and len(found) == len(calls), text
    for name, arguments in found:
        assert name in names
        if name == "get_weather":
            jsonschema.validate(arguments, WEATHER["function"]["parameters"])
    return found


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("format", ["qwen-xml", "hermes", "llama3"])
@pytest.mark.parametrize("choice", ["required", "get_weather"])
def test_a_forced_call_is_made_and_valid(format, choice, vocabulary):
    tokenizer = tokenizer_of(vocabulary)
    factory = make_constraint(tokenizer, tool_request=ToolRequest(ALL, choice, format), prompt_end="closed")
    found = []
    for seed in range(6):
        ids = write(tokenizer, factory(), seed)
        if ids is not None:
            names = {"get_weather"} if choice == "get_weather" else {"get_weather", "get", "free", "odd"}
            calls = check_calls(tokenizer.decode(ids), format, names)
            assert calls and (choice == "required" or len(calls) == 1)
            found += calls
    assert found


def test_arguments_may_come_in_any_order_but_none_twice_and_all_required_ones():
    tokenizer = tokenizer_of("pocket")
    factory = make_constraint(
        tokenizer, tool_request=ToolRequest([WEATHER], "required", "qwen-xml"), prompt_end="closed"
    )
    begin = "<tool_call>\n<function=get_weather>\n<parameter=days>\n5\n</parameter>\n"

    def fits(text):
        constraint = factory()
        try:
            for index in tokenizer.encode(text):
                constraint.accept(index)
        except RequestError:
            return False
        return True

    assert fits(begin + "<parameter=city>\nBern\n</parameter>\n</function>\n</tool_call>")
    assert not fits(begin + "<parameter=days>\n5\n</parameter>\n")
    assert not fits(begin + "</function>\n</tool_call>")
    assert not fits(begin + "<parameter=other>\n")
    assert not fits(begin + "<parameter=city>\nbern\n</parameter>\n")
    assert not fits("<tool_call>\n<function=other>\n")
    assert not fits("text")


@pytest.mark.parametrize(
    ("schema", "value", "fits"),
    [
        ({"type": "string", "pattern": "[0-9]"}, "ab1\nc", True),
        ({"type": "string", "pattern": "[0-9]"}, "abc", False),
        ({"type": "string", "pattern": "^a"}, "ab", True),
        ({"type": "string", "pattern": "^a"}, "ba", False),
        ({"type": "string", "pattern": "a$"}, "ba", True),
        ({"type": "string", "pattern": "a$"}, "ab", False),
        ({"type": "string", "pattern": "^(a|b)$"}, "b", True),
        ({"type": "string", "pattern": "^(a|b)$"}, "bb", False),
        ({"type": "string", "pattern": "a|b"}, "xbx", True),
        ({"type": "string", "minLength": 2, "maxLength": 60}, "ab\n</parameter>\nc", False),
        ({"type": "string", "minLength": 2, "maxLength": 60}, "ab </parameter>\nc", True),
        ({"type": "string", "maxLength": 3}, "日本語", True),
        ({"type": "string", "maxLength": 3}, "日本語!", False),
        ({"enum": ["a", 5]}, "5", True),
        ({"enum": ["a", "b"]}, "a", True),
        ({"enum": ["a", "b"]}, '"a"', False),
        ({"type": ["integer", "null"]}, "null", True),
        ({"type": ["integer", "null"]}, "no", False),
        ({"$ref": "#/$defs/n"}, "-5", False),
        ({"$ref": "#/$defs/n"}, "5", True),
        ({"type": "array", "items": {"$ref": "#/$defs/n"}}, "[1, 2]", True),
        ({"type": "array", "items": {"$ref": "#/$defs/n"}}, "[1, -2]", False),
        ({"anyOf": [{"type": "string", "maxLength": 1}, {"$ref": "#/$defs/n"}]}, "55", True),
        ({"anyOf": [{"type": "string", "maxLength": 1}, {"$ref": "#/$defs/n"}]}, "ab", False),
        ({"title": "anything"}, "{ </parameter>", True),
        ({"type": "string", "format": "date"}, "2026-12-01", True),
        ({"type": "string", "format": "date"}, "2026-13-01", False),
        ({"type": "string", "format": "date-time"}, "2026-12-01T10:00:00Z", True),
        ({"type": "string", "format": "email"}, "a.b@c-d.org", True),
        ({"type": "string", "format": "email"}, "a.b@", False),
        ({"type": "string", "format": "int64"}, "any", True),
    ],
)
def test_raw_values_follow_their_schema(schema, value, fits):
    tokenizer = tokenizer_of("pocket")
    tool = {"name": "f", "strict": True, "parameters": o({"x": schema}, additionalProperties=False)}
    tool["parameters"]["$defs"] = {"n": {"type": "integer", "minimum": 0}}
    constraint = make_constraint(tokenizer, tool_request=ToolRequest([tool], "f", "qwen-xml"), prompt_end="closed")()
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>\n</tool_call>"

    def accepted():
        try:
            for index in tokenizer.encode(text):
                constraint.accept(index)
        except RequestError:
            return False
        return True

    assert accepted() == fits


@pytest.mark.parametrize("vocabulary", ["small", "pocket"])
@pytest.mark.parametrize("format", ["qwen-xml", "hermes"])
@pytest.mark.parametrize("prompt_end", ["open", "closed", "none"])
def test_a_strict_tool_is_free_until_its_marker_and_after_its_call(format, prompt_end, vocabulary):
    tokenizer = tokenizer_of(vocabulary)
    factory = make_constraint(tokenizer, tool_request=ToolRequest([WEATHER], "auto", format), prompt_end=prompt_end)
    free = tokenizer.encode("I < look.</x>\n<tool_call>")
    for seed in range(4):
        constraint = factory()
        for index in free:
            mask = constraint.allowed()
            assert mask is None or mask[index // 32] >> np.uint32(index % 32) & 1
            assert not constraint.forced()
            constraint.accept(index)
        assert constraint.allowed() is not None
        ids = write(tokenizer, constraint, seed)
        if ids is not None:
            calls = check_calls("<tool_call>" + tokenizer.decode(ids), format, {"get_weather"})
            assert len(calls) == 1 and constraint.allowed() is None


def test_a_token_that_reaches_behind_the_marker_cannot_break_the_call():
    tokenizer = tokenizer_of("small")
    factory = make_constraint(tokenizer, tool_request=ToolRequest([WEATHER], "auto", "qwen-xml"))
    longer = [
        index
        for index in range(tokenizer.vocab_size)
        if (data := tokenizer.token_bytes(index)).startswith(b">") and len(data) > 1
    ]
    assert longer, "this vocabulary has no token that could"
    constraint = factory()
    for index in tokenizer.encode("<tool_call"):
        constraint.accept(index)
    mask = constraint.allowed()
    for index in longer:
        permitted = mask is None or bool(mask[index // 32] >> np.uint32(index % 32) & 1)
        assert permitted == (b">\n<function=get_weather>".startswith(tokenizer.token_bytes(index)))


@pytest.mark.parametrize("kind", ["schema", "required"])
def test_reasoning_is_free_and_what_follows_is_restricted(kind):
    tokenizer = tokenizer_of("pocket")
    tools = ToolRequest(ALL, "required", "qwen-xml") if kind == "required" else ToolRequest()
    schema = SCHEMAS["object"] if kind == "schema" else None
    factory = make_constraint(tokenizer, json_schema=schema, tool_request=tools, prompt_end="open")
    thoughts = tokenizer.encode('Hm {"x" <tool>, so\n</think>')
    for seed in range(4):
        ids = write(tokenizer, factory(), seed, free=thoughts)
        if ids is None:
            continue
        text = tokenizer.decode(ids)
        assert text.startswith('Hm {"x" <tool>, so\n</think>')
        if kind == "required":
            reasoning, content, _, calls, _ = summary(read([text], "qwen-xml", "open", tools=ALL))
            assert reasoning and not content and checked_calls(calls)
        else:
            jsonschema.validate(json.loads(text.partition("</think>")[2]), SCHEMAS["object"])


def test_a_model_that_opens_reasoning_itself_may_do_so_first():
    tokenizer = tokenizer_of("pocket")
    constraint = make_constraint(tokenizer, json_schema={"const": "x"}, prompt_end="none")()
    think = tokenizer.token_id("<think>")
    assert constraint.forced() == ()
    assert think in allowed_ids(constraint.allowed(), tokenizer.vocab_size)
    constraint.accept(think)
    assert constraint.allowed() is None
    for index in tokenizer.encode("a</think>"):
        constraint.accept(index)
    assert tokenizer.encode('"x"')[0] in allowed_ids(constraint.allowed(), tokenizer.vocab_size)
    assert think not in allowed_ids(constraint.allowed(), tokenizer.vocab_size)


@pytest.mark.parametrize("format", ["qwen-xml", "hermes", "llama3"])
def test_an_answer_may_be_an_instance_or_a_call(format):
    tokenizer = tokenizer_of("pocket")
    request = ToolRequest([WEATHER], "auto", format)
    factory = make_constraint(tokenizer, json_schema=o({"answer": I}), tool_request=request, prompt_end="closed")
    kinds = set()
    for seed in range(24):
        ids = write(tokenizer, factory(), seed)
        if ids is None:
            continue
        text = tokenizer.decode(ids)
        _, content, _, calls, _ = summary(read([text], format, "closed", tools=ALL))
        kinds.add("call" if calls else "text")
        if calls:
            check_calls(text, format, {"get_weather"})
        else:
            jsonschema.validate(json.loads(content), o({"answer": I}))
    assert kinds == {"call", "text"}


def test_forced_tokens_are_those_of_the_tokenizer():
    for name in ("small", "pocket"):
        tokenizer = tokenizer_of(name)
        request = ToolRequest([WEATHER], "get_weather", "qwen-xml")
        constraint = make_constraint(tokenizer, tool_request=request, prompt_end="closed")()
        ids = []
        while forced := constraint.forced():
            ids += forced
            for index in forced:
                constraint.accept(index)
        whole = "<tool_call>\n<function=get_weather>\n<parameter="
        assert whole.startswith(tokenizer.decode(ids)) and len(tokenizer.decode(ids)) > len("<tool_call>\n<function=")
        assert tokenizer.encode(whole)[: len(ids)] == ids


# What is refused


def nest(depth):
    schema = I
    for _ in range(depth):
        schema = o({"a": schema})
    return schema


REFUSED = {
    "remote reference": ({"$ref": "http://localhost:9/x.json"}, "."),
    "remote file": ({"$ref": "file:///etc/passwd"}, "."),
    "unknown reference": ({"$ref": "#/$defs/x"}, "."),
    "deep": (nest(500), "deep"),
    "very deep": (nest(100_000), "deep"),
    "huge enum": ({"enum": [f"value {index}" for index in range(20_000)]}, "20,000"),
    "huge text": (o({f"key{index}": {"description": "x" * 1000, **S} for index in range(1000)}), "characters"),
    "long pattern": ({"type": "string", "pattern": "a" * 10_000}, "10,000"),
    "look-ahead": ({"type": "string", "pattern": "^(?=a)b$"}, "cannot be enforced"),
    "back-reference": ({"type": "string", "pattern": "(a)\\1"}, "cannot be enforced"),
    "not": ({"not": {"type": "string"}}, "not"),
    "if": ({"if": S, "then": I}, "if"),
    "unique": ({"type": "array", "items": I, "uniqueItems": True}, "uniqueItems"),
    "contains": ({"type": "array", "contains": I}, "contains"),
    "overlapping oneOf": ({"oneOf": [o({"a": I}), o({"a": N})]}, "oneOf"),
    "impossible": ({"type": "string", "minLength": 5, "maxLength": 2}, "nsatisfiable"),
    "false": (False, "."),
    "standard format that nothing checks": ({"type": "string", "format": "json-pointer"}, "json-pointer"),
    "no schema": ([1], "list"),
    "no JSON": ("{", "JSON"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_an_error_that_says_why(name):
    schema, words = REFUSED[name]
    with pytest.raises(RequestError, match=words):
        make_constraint(tokenizer_of("pocket"), json_schema=schema)


def test_the_enum_limit_is_where_it_says():
    schema = {"enum": [f"value {index}" for index in range(10_000)]}
    assert make_constraint(tokenizer_of("pocket"), json_schema=schema)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"json_schema": S, "regex": "a"}, "json_schema and regex"),
        ({"regex": "("}, "regex"),
        ({"regex": ""}, "regex"),
        ({"regex": "a" * 5000}, "5,000"),
        ({"grammar": "start: nothing"}, "nothing"),
        ({"grammar": 'a: "b"'}, "start"),
        ({"grammar": "root ::= ("}, "GBNF|grammar"),
        ({"grammar": "x" * 100_000}, "100,000"),
        ({"tool_request": ToolRequest(ALL, "get_wether", "qwen-xml")}, "get_weather"),
        ({"tool_request": ToolRequest([], "required", "qwen-xml")}, "needs tools"),
        ({"tool_request": ToolRequest(ALL, "required", "harmony")}, "harmony"),
    ],
)
def test_bad_requests_are_named(arguments, words):
    with pytest.raises(RequestError, match=words):
        make_constraint(tokenizer_of("pocket"), **arguments)


@pytest.mark.parametrize(
    "parameters",
    [
        o({"x": {"type": "string", "pattern": "^(?=a)b$"}}),
        o({"x": {"not": S}}),
        {"oneOf": [o({"a": S}), o({"b": S})]},
        o({"x": {"type": "string", "format": "idn-email"}}),
        {**o({"x": {"$ref": "#/$defs/a"}}), "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 9}}},
        o({"x": {"anyOf": [{"type": "string", "maxLength": n} for n in range(1000)]}}),
        o({"x": S}, ["y"]),
        o({"a<b": S}),
    ],
)
def test_a_strict_tool_that_cannot_be_enforced_is_refused_and_a_plain_one_is_not(parameters):
    tool = {"name": "f", "parameters": parameters}
    with pytest.raises(RequestError, match="'f'"):
        make_constraint(
            tokenizer_of("pocket"), tool_request=ToolRequest([{**tool, "strict": True}], "auto", "qwen-xml")
        )
    assert make_constraint(tokenizer_of("pocket"), tool_request=ToolRequest([tool], "required", "qwen-xml"))


BOMBS = {
    "nested quantifiers": {"regex": "((a{1,100}){1,100}){1,100}"},
    "repeated any": {"regex": "(.*a){30}b"},
    "long look-back": {"regex": "(a|b)*a(a|b){40}c"},
    "alternatives": {"regex": "|".join(f"(.*{chr(97 + i % 26)}{i})" for i in range(200))},
    "schema patterns": {"json_schema": o({f"k{i}": {"type": "string", "pattern": "(.*x){25}y"} for i in range(20)})},
    "recursion": {"json_schema": {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, I]}}, "$ref": "#/$defs/a"}},
    "recursion of itself": {"json_schema": {"$ref": "#"}},
    "wide recursion": {
        "json_schema": {"$defs": {"a": {"anyOf": [o({"x": {"$ref": "#/$defs/a"}})] * 50}}, "$ref": "#/$defs/a"}
    },
    "products of unions": {
        "json_schema": {"allOf": [{"anyOf": [o({f"k{i}{j}": I}) for j in range(8)]} for i in range(8)]}
    },
    "long counts": {"json_schema": {"type": "array", "items": S, "minItems": 100_000}},
    "long string": {"json_schema": {"type": "string", "maxLength": 10**9}},
    "optional properties": {"json_schema": o({f"key_{i}": S for i in range(800)}, [])},
    "big enum of pieces": {"json_schema": o({f"k{i}": {"enum": [f"v{i}_{j}" for j in range(400)]} for i in range(20)})},
    "ambiguous grammar": {"grammar": 'start: a\na: a a | "x" | '},
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_end_soon_in_a_constraint_or_an_error(name):
    tokenizer = tokenizer_of("pocket")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.process_time()
    try:
        constraint = make_constraint(tokenizer, prompt_end="closed", **BOMBS[name])()
        write(tokenizer, constraint, 0, max_tokens=40)
    except RequestError as error:
        assert len(str(error)) < 600
    assert time.process_time() - begin < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600_000  # KiB


def test_a_grammar_that_grows_too_complex_stops_the_answer_instead_of_freeing_it():
    tokenizer = tokenizer_of("pocket")
    limits = Limits(lexer_states=300)
    with pytest.raises(RequestError, match="complex"):
        constraint = make_constraint(tokenizer, regex="(a|b)*a(a|b){12}c", prompt_end="closed", limits=limits)()
        for char in random.Random(0).choices("ab", k=2000):
            assert constraint.allowed() is not None
            constraint.accept(tokenizer.encode(char)[0])


def test_an_equal_request_is_compiled_once_and_an_other_one_is_not_mistaken_for_it():
    tokenizer = tokenizer_of("pocket")
    one = make_constraint(tokenizer, json_schema=o({"a": I}), prompt_end="closed")
    assert make_constraint(tokenizer, json_schema=o({"a": I}), prompt_end="closed") is one
    for schema, end in ((o({"a": S}), "closed"), (o({"a": I}), "open")):
        assert make_constraint(tokenizer, json_schema=schema, prompt_end=end) is not one
    for index in range(50):
        make_constraint(tokenizer, json_schema={"const": index})
    assert len(vocabulary_of(tokenizer).kept) <= MAX_KEPT


def test_answers_of_one_factory_do_not_touch_each_other():
    tokenizer = tokenizer_of("pocket")
    factory = make_constraint(tokenizer, tool_request=ToolRequest(ALL, "required", "qwen-xml"), prompt_end="closed")
    alone = [write(tokenizer, factory(), seed, max_tokens=120) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda seed: write(tokenizer, factory(), seed, max_tokens=120), range(4)))
    assert together == alone
