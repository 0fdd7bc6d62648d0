"""Errors, admission, models and health, by the numbers of the conformance checks; and the lint of all error texts."""

import json
import re
import time

import pytest
from api_server import ApiServer, tool
from fake_batch import FakeBatch, Script
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.errors import EngineError, RequestError
from tandem.serve.app import AppSettings
from tandem.serve.errors_api import KINDS, TEXTS, ApiError, as_api_error, lint, overflow, problem, reworded
from tandem.serve.events import Overloaded
from tandem.serve.lifecycle import SleepPolicy
from tandem.serve.scheduler import Limits

# What two agents take for an overflow, restated one by one from their tables.
OVERFLOWS = [
    "request (131500 tokens) exceeds the available context size (131072 tokens), try increasing it",
    "prompt is too long: 9 tokens > 8 maximum",
    "image count 9 exceeds the limit of 8",
    "tool schema too large: exceeds the limit of 65536 bytes",
    "too many tokens in stop list",
    "max_tokens 9000 exceeds what is left of the context",
    "the prompt template exceeded its render time limit",
    "input token count 5 exceeds the maximum",
    "Context size has been exceeded.",
    "maximum context length is 5 tokens",
    "rate limit: too many tokens per minute",
]
FINE = [
    "queue full: this server is overloaded, retry later",
    "image 20000x20000 is larger than the allowed 40 megapixels",
    "Unable to generate parser for this template",
    "System message must be at the beginning.",
    "model limit reached, try again later",
    "server busy, please try again. maximum pending requests exceeded",
]


@pytest.fixture(scope="module")
def server():
    made = ApiServer(AppSettings(max_body_bytes=100_000, api_keys=(), patience_s=0.1))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def plain(server):
    server.script = "Hello there."


@pytest.mark.parametrize("text", OVERFLOWS)
def test_the_lint_finds_every_text_that_clients_take_for_an_overflow(text):
    assert lint(text) and not lint(reworded(text))


@pytest.mark.parametrize("text", FINE)
def test_the_lint_leaves_other_texts_alone(text):
    assert not lint(text) and reworded(text) == text


@pytest.mark.parametrize("name", TEXTS)
def test_every_error_text_passes_the_lint_as_it_is_unless_it_means_overflow(name):
    kind, text = TEXTS[name]
    for filling in ("x", "5", "tools", "temperature"):
        filled = text.format_map({key: filling for key in re.findall(r"{(\w+)", text)} | {}).replace("!r", "")
        assert bool(lint(filled)) == (kind == "overflow"), lint(filled)


@given(
    st.lists(
        st.sampled_from(
            "prompt context token tokens request input limit exceeds exceed exceeded over too long large many "
            "maximum max_tokens of the 5 : , length reduce greater than window overflow x".split()
        ),
        max_size=14,
    )
)
@settings(max_examples=400, deadline=None)
def test_no_text_of_other_folders_is_taken_for_an_overflow(words):
    assert not lint(ApiError("invalid", " ".join(words)).message)


def test_texts_raised_elsewhere_are_linted_too(server):
    error = as_api_error(RequestError("the prompt has 9 tokens and exceeds the limit of 8"))
    assert not lint(error.message) and error.status == 400


def test_check_33_a_full_queue_is_503_and_says_when_to_come_back():
    tight = ApiServer(limits=Limits(max_sequences=1, max_queue=1), decode_s=0.02)
    try:
        tight.script = "word " * 400
        import threading

        threads = [threading.Thread(target=tight.chat, args=("Hi",), kwargs={"max_tokens": 60}) for _ in range(2)]
        for thread in threads:
            thread.start()
        tight.wait(lambda: tight.worker.snapshot().running == 1 and tight.worker.snapshot().queued == 1)
        for path, body in (("/v1/chat/completions", {}), ("/v1/messages", {}), ("/v1/responses", {"input": "Hi"})):
            reply = tight.request(path, {"messages": [{"role": "user", "content": "Hi"}], "stream": True, **body})
            assert reply.status == 503 and "overloaded" in reply.error["message"]
            assert int(reply.headers["retry-after"]) >= 1 and int(reply.headers["retry-after-ms"]) >= 1
        for thread in threads:
            thread.join()
    finally:
        tight.close()


def test_check_34_a_request_waits_for_the_model_with_pings_and_lists_answer_meanwhile():
    slow = ApiServer(AppSettings(patience_s=0.05, ping_s=0.1), load_s=1.0)
    try:
        began = time.monotonic()
        entry = slow.request("/v1/models").json["data"][0]
        assert entry["status"]["value"] == "loading" and slow.request("/health").status == 200
        assert slow.request("/ready").status == 503
        assert time.monotonic() - began < 0.5
        reply = slow.chat("Hi", stream=True)
        assert reply.data.count(b": ping") >= 2 and b"Hell" in reply.data
        assert slow.request("/ready").status == 200
    finally:
        slow.close()


def test_check_35_overflow_is_told_by_all_signals_before_the_first_byte(server):
    text = "word " * 6000
    messages = [{"role": "user", "content": text}]
    for stream in (True, False):
        reply = server.chat(messages, stream=stream)
        error = reply.error
        assert (
            reply.status == 400
            and error["code"] == "context_length_exceeded"
            and error["type"] == "exceed_context_size_error"
        )
        assert error["n_ctx"] == 4096 and error["n_prompt_tokens"] > 6000 and error["param"] == "messages"
        assert (
            f"request ({error['n_prompt_tokens']} tokens) exceeds the available context size (4096 tokens)"
            in error["message"]
        )
        assert error["message"].endswith("maximum context length is 4096 tokens")
    reply = server.request("/v1/messages", {"messages": messages, "max_tokens": 5, "stream": True})
    assert reply.status == 400 and reply.error["type"] == "invalid_request_error"
    assert re.fullmatch(r"prompt is too long: \d+ tokens > 4096 maximum", reply.error["message"])
    reply = server.request("/v1/responses", {"input": text, "stream": True})
    assert reply.status == 400 and reply.error["code"] == "context_length_exceeded"
    reply = server.request("/v1/completions", {"prompt": text})
    assert reply.status == 400 and reply.error["code"] == "context_length_exceeded" and reply.error["param"] == "prompt"


def test_an_overflow_found_by_the_engine_is_told_in_the_same_way():
    """While the model is loading its context may not be known yet."""
    from tandem.serve.model import Offer

    unknown = ApiServer(offer=Offer("pocket"), load_s=0.5)
    try:
        reply = unknown.chat("word " * 6000)
        assert reply.status == 400 and reply.error["code"] == "context_length_exceeded", reply.data
    finally:
        unknown.close()


def test_check_38_errors_of_ours_are_json_without_traceback_and_path(server):
    server.script = Script(open_error=ValueError("secret /home/me/model.gguf"))
    for path, body in (
        ("/v1/chat/completions", {}),
        ("/v1/messages", {"max_tokens": 9}),
        ("/v1/responses", {"input": "x"}),
    ):
        reply = server.request(path, {"messages": [{"role": "user", "content": "Hi"}], **body})
        assert reply.status == 500 and reply.headers["content-type"] == "application/json"
        assert b"secret" not in reply.data and b"home" not in reply.data and b"Traceback" not in reply.data
        assert reply.error["message"]
    for path, status in (("/nope", 404), ("/v1/nope/%2e%2e/x", 404)):
        assert server.request(path).error["message"] and server.request(path).status == status
    assert server.request("/v1/chat/completions").status == 405
    assert server.request("/v1/models", {}).status == 405


def test_check_39_a_server_that_stops_refuses_and_closes(server):
    server.app.stopping = True
    try:
        reply = server.chat("Hi")
    finally:
        server.app.stopping = False
    assert reply.status == 503 and reply.headers["connection"] == "close" and "shutting down" in reply.error["message"]


def test_check_20_a_body_that_is_too_large_is_413(server):
    assert server.chat("x" * 200_000).status == 413
    small = server.request("/v1/chat/completions", b"[" * 99_000)
    assert small.status == 400


def test_check_41_models_are_listed_with_what_clients_want_to_know(server):
    entry = server.request("/v1/models").json["data"][0]
    assert entry["id"] == "pocket" and entry["owned_by"] == "tandem" and entry["object"] == "model"
    assert entry["context_length"] == entry["max_model_len"] == 4096 and entry["input"] == ["text"]
    assert entry["supports_tools"] is True and entry["reasoning"] is True and entry["status"] == {"value": "loaded"}
    assert server.request("/v1/models/alias").json["id"] == "pocket"
    for bad in ("../x", "%2e%2e/x", "/etc/passwd", "x%00"):
        assert server.request(f"/v1/models/{bad}").status == 404
    assert "models" not in server.request("/v1/models").json
    assert server.request("/v1/models?client_version=1").json["models"] == []


def test_check_42_health_ready_and_props(server):
    assert server.request("/health").json == {
        "status": "ok",
        "models": {"pocket": {"state": "loaded", "queued": 0, "running": 0}},
    }
    assert server.request("/ready?model=pocket").status == 200 and server.request("/ready?model=x").status == 404
    props = server.request("/props?autoload=false").json
    assert props["default_generation_settings"]["n_ctx"] == 4096 and props["total_slots"] == 8
    assert props["chat_template_caps"]["supports_tools"] is True and "/" not in json.dumps(props["build_info"])
    assert "gguf" not in json.dumps({k: v for k, v in props.items() if k != "chat_template"})


def test_checks_41_to_43_reading_neither_wakes_nor_waits_and_a_failed_load_can_be_tried_again():
    failing = [EngineError("/srv/models/big.gguf: no memory")]

    def make():
        if failing:
            raise failing.pop()
        return FakeBatch(max_sequences=8)

    made = ApiServer(make_batch=make)
    try:
        made.wait(lambda: made.worker.snapshot().state == "failed")
        status = made.request("/v1/models").json["data"][0]["status"]
        assert status["value"] == "failed" and "no memory" in status["reason"] and "/srv" not in status["reason"]
        assert made.request("/health").status == 200 and made.request("/ready").status == 503
        made.wait(lambda: made.chat("Hi").status == 200, 15)
        assert made.request("/ready").status == 200
    finally:
        made.close()


def test_check_41_reading_and_counting_leave_a_sleeping_model_asleep_and_a_request_wakes_it():
    made = ApiServer(limits=Limits(max_sequences=8, sleep=SleepPolicy.at_level(2, 0.2)))
    try:
        assert made.chat("Hi").status == 200
        made.wait(lambda: made.worker.snapshot().state == "sleeping")
        counted = {"messages": [{"role": "user", "content": "Hi"}]}
        for path, body in (
            ("/v1/models", None),
            ("/health", None),
            ("/props", None),
            ("/ready", None),
            ("/openapi.json", None),
            ("/v1/messages/count_tokens", counted),
            ("/tokenize", {"content": "x"}),
            ("/apply-template", counted),
        ):
            assert made.request(path, body).status == 200
        assert made.worker.snapshot().state == "sleeping" and made.batch.wakes == 0
        assert made.request("/v1/models").json["data"][0]["status"]["value"] == "sleeping"
        assert made.request("/props").json["is_sleeping"] is True
        assert made.chat("Hi").status == 200 and made.batch.wakes == 1
    finally:
        made.close()


def test_check_55_embeddings_as_numbers_and_as_base64(server):
    import base64
    import struct

    plain = server.request("/v1/embeddings", {"input": ["a", "b", "a"]}).json
    vectors = [entry["embedding"] for entry in plain["data"]]
    assert [entry["index"] for entry in plain["data"]] == [0, 1, 2] and vectors[0] == vectors[2] != vectors[1]
    assert sum(x * x for x in vectors[0]) == pytest.approx(1, abs=1e-5)
    packed = server.request("/v1/embeddings", {"input": "a", "encoding_format": "base64"}).json["data"][0]["embedding"]
    data = base64.b64decode(packed)
    assert list(struct.unpack(f"<{len(data) // 4}f", data)) == pytest.approx(vectors[0], abs=1e-7)
    ids = server.model.tokenizer.encode("a")
    for tokens in (ids, [ids]):
        assert server.request("/v1/embeddings", {"input": tokens}).json["data"][0]["embedding"] == vectors[0]
    for bad in ("", [], [""], "word " * 6000, [99999999], [-1], {"a": 1}, ["a", 5]):
        reply = server.request("/v1/embeddings", {"input": bad})
        assert reply.status == 400 and reply.error["param"].startswith("input"), bad
    assert server.request("/v1/embeddings", {"input": "a", "encoding_format": "int8"}).status == 400
    assert server.request("/v1/embeddings", {"input": "a", "dimensions": 3}).error["param"] == "dimensions"


def test_completions_continue_texts_and_tokens(server):
    server.script = "and on"
    reply = server.request("/v1/completions", {"prompt": "Once", "echo": True}).json
    assert reply["choices"][0]["text"] == "Onceand on" and reply["object"] == "text_completion"
    ids = server.model.tokenizer.encode("Once", add_special=True)
    assert server.batch.opened[-1].prompt.ids == ids and server.batch.opened[-1].prompt.continues
    both = server.request("/v1/completions", {"prompt": ["a", "b"], "n": 2}).json
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert server.request("/v1/completions", {"prompt": ids}).json["choices"][0]["text"] == "and on"
    streamed = server.request(
        "/v1/completions", {"prompt": "Once", "stream": True, "stream_options": {"include_usage": True}}
    )
    assert "".join(c["choices"][0]["text"] for c in streamed.chunks if c["choices"]) == "and on"
    assert streamed.chunks[-1]["usage"]["completion_tokens"] == 2 and streamed.events[-1][1] == "[DONE]"
    for body, field in (
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [9999999]}, "prompt"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "logprobs"),
        ({"prompt": "a", "json_schema": {}, "regex": "a"}, "regex"),
        ({}, "prompt"),
    ):
        reply = server.request("/v1/completions", body)
        assert reply.status == 400 and reply.error["param"] == field, body


def test_tokenize_detokenize_and_apply_template(server):
    text = "<|im_end|> hello 漢"
    tokens = server.request("/tokenize", {"content": text}).json["tokens"]
    assert server.request("/detokenize", {"tokens": tokens}).json["content"] == text
    assert server.model.tokenizer.token_id("<|im_end|>") not in tokens
    special = server.request("/tokenize", {"content": text, "parse_special": True, "with_pieces": True}).json["tokens"]
    assert special[0] == {"id": server.model.tokenizer.token_id("<|im_end|>"), "piece": "<|im_end|>"}
    assert server.request("/detokenize", {"tokens": [1 << 40]}).status == 400
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool()]}
    prompt = server.request("/apply-template", body).json["prompt"]
    assert "<tools>" in prompt and prompt.endswith("</think>\n\n")


def test_props_tell_where_and_why_a_prompt_parts_from_an_earlier_one(server):
    def ask(system: str, request: str) -> None:
        server.chat([{"role": "system", "content": system}, {"role": "user", "content": request}])

    ask("You are helpful. Be brief and kind to everybody. Today is 2026-11-30. Go on like that.", "A")
    ask("You are helpful. Be brief and kind to everybody. Today is 2026-12-01. Go on like that.", "A")
    record = server.request("/props").json["recent_prompts"][0]
    assert re.fullmatch(r"token \d+: date changed", record["diverged"]) and record["shared"] >= 16
    assert "helpful" not in json.dumps(record)


def test_errors_of_kinds_have_the_shape_of_each_api():
    for kind in KINDS:
        error = ApiError(kind, "x", "field")
        assert set(error.object("openai")["error"]) >= {"message", "type", "param", "code"}
        assert error.object("anthropic") == {"type": "error", "error": {"type": KINDS[kind].anthropic, "message": "x"}}
    assert as_api_error(Overloaded("queue full", 3.0)).headers()["retry-after-ms"] == "3000"
    assert overflow(9, 8).object("openai")["error"]["n_ctx"] == 8
    assert problem("no_key").headers()["www-authenticate"] == "Bearer"
