"""Streams of chat completions, by the numbers of the conformance checks, over a scripted engine."""

import json
import socket
import time

import pytest
from api_server import ApiServer, call_text, tool
from fake_batch import BROKEN, Script

from tandem.serve.app import AppSettings

SETTINGS = AppSettings(patience_s=0.05, ping_s=0.1, event_s=0.35)


@pytest.fixture(scope="module")
def server():
    made = ApiServer(SETTINGS)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def plain(server):
    server.script = "Hello there."
    yield
    if server.batch:
        server.batch.decode_s = server.batch.prefill_token_s = 0.0


def stream(server, content="Hi", **fields):
    reply = server.chat(content, stream=True, **fields)
    assert reply.status == 200, reply.data
    return reply


def text_of(reply, key="content"):
    return "".join(c["choices"][0]["delta"].get(key) or "" for c in reply.chunks if c.get("choices"))


def raw_stream(server, body: dict, path="/v1/chat/completions") -> socket.socket:
    """A connection on which a stream has been asked for."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.settimeout(20)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def read_until(connection: socket.socket, wanted: bytes) -> bytes:
    data = b""
    while wanted not in data:
        more = connection.recv(65536)
        assert more, data
        data += more
    return data


BODY = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}


def test_check_21_the_role_comes_first_and_the_head_is_the_same_in_every_chunk(server):
    chunks = stream(server, stream_options={"include_usage": True}).chunks
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:-1])
    heads = {json.dumps([chunk[key] for key in ("id", "created", "model", "object")]) for chunk in chunks}
    assert len(heads) == 1 and chunks[0]["object"] == "chat.completion.chunk"


def test_checks_22_and_23_parts_of_calls_have_an_index_and_concatenate_to_json(server):
    server.script = Script("Look:\n" + call_text(city='Pa"r\\is\nx') + "\n" + call_text("now"), tokens_per_round=3)
    chunks = stream(server, tools=[tool(), {"type": "function", "function": {"name": "now"}}]).chunks
    deltas = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert all("index" in delta for delta in deltas)
    for index, name, arguments in ((0, "get_weather", {"city": 'Pa"r\\is\nx'}), (1, "now", {})):
        mine = [delta for delta in deltas if delta["index"] == index]
        assert mine[0]["id"] and mine[0]["type"] == "function" and mine[0]["function"]["name"] == name
        assert all(
            set(delta) == {"index", "function"} and set(delta["function"]) == {"arguments"} for delta in mine[1:]
        )
        assert json.loads("".join(delta["function"]["arguments"] for delta in mine)) == arguments
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 1}, {"stop": ["ere"]}, {"n": 2}, {"tools": [tool()]}])
def test_check_24_exactly_one_finish_reason(server, fields):
    reply = stream(server, **fields)
    reasons = [
        (c["choices"][0]["index"], c["choices"][0]["finish_reason"])
        for c in reply.chunks
        if c["choices"][0]["finish_reason"]
    ]
    assert sorted(index for index, _ in reasons) == list(range(fields.get("n", 1)))
    assert reasons[0][1] == ("length" if "max_tokens" in fields else "stop")
    assert reply.events[-1][1] == "[DONE]" and reply.data.count(b"[DONE]") == 1


def test_check_25_usage_comes_if_asked_for_and_only_then(server):
    for options, wanted in (
        (None, False),
        ({}, False),
        ({"include_usage": False}, False),
        ({"include_usage": True}, True),
    ):
        chunks = stream(server, stream_options=options).chunks
        assert any("usage" in chunk for chunk in chunks) == wanted
        if wanted:
            assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 3
    assert "timings" in chunks[-2]


def test_check_26_no_chunk_splits_a_character(server):
    server.script = text = "👩‍👩‍👧‍👦 漢字 العربية 🇩🇪 \u2028"
    assert text_of(stream(server, text)) == text


def test_check_27_reasoning_comes_before_content_and_its_tag_does_not_leak(server):
    server.batch.controls = ()  # the tag comes in pieces of four characters
    server.script = "One two.</think>\n\nThree."
    reply = stream(server, enable_thinking=True)
    server.batch.controls = ("<think>", "</think>")
    kinds = [
        key for c in reply.chunks for key in c["choices"][0]["delta"] if key != "role" and c["choices"][0]["delta"][key]
    ]
    assert kinds == sorted(kinds, reverse=True) and set(kinds) == {"reasoning_content", "content"}
    assert (
        text_of(reply, "reasoning_content") == "One two." and text_of(reply) == "Three." and b"think>" not in reply.data
    )


def test_check_28_an_error_after_the_first_byte_is_an_event_and_no_end(server):
    server.script = Script("Hello there, this goes on.", decode_error=BROKEN, error_at=3)
    reply = stream(server)
    assert text_of(reply)
    error = reply.chunks[-1]["error"]
    assert error["type"] == "server_error" and "fake engine" not in error["message"]
    assert b"[DONE]" not in reply.data and not any(c.get("choices", [{}])[0].get("finish_reason") for c in reply.chunks)
    server.wait(lambda: server.worker.snapshot().state in ("loaded", "failed"))
    server.script = "Hello there."
    assert server.chat("Hi").status == 200


def test_check_29_silence_is_broken_by_comments_and_by_events(server):
    server.batch.prefill_token_s = 0.06
    data = stream(server, "word " * 6).data
    server.batch.prefill_token_s = 0.0
    assert data.count(b": ping\n\n") >= 3
    assert data.count(b'"delta":{},"finish_reason":null') >= 1
    head = data.split(b": ping", 1)[0]
    assert b'"role":"assistant"' in head, "headers and role are sent before the prompt is done"


def test_check_30_a_client_that_leaves_ends_its_answer(server):
    server.script = "word " * 4000
    server.batch.decode_s = 0.002
    cancelled = server.worker.snapshot().totals.finished.get("cancelled", 0)
    connection = raw_stream(server, BODY)
    read_until(connection, b"word")
    connection.close()
    server.wait(lambda: server.worker.snapshot().totals.finished.get("cancelled", 0) == cancelled + 1, 2)
    assert server.worker.snapshot().running == 0


def test_check_30_a_client_that_leaves_during_the_prompt_ends_it_and_so_does_one_without_a_stream(server):
    server.batch.prefill_token_s = 0.002
    for body in (BODY, {**BODY, "stream": False}):
        body = {**body, "messages": [{"role": "user", "content": "word " * 3000}]}
        cancelled = server.worker.snapshot().totals.finished.get("cancelled", 0)
        connection = raw_stream(server, body)
        server.wait(lambda: server.worker.snapshot().running == 1)
        connection.close()
        server.wait(lambda c=cancelled: server.worker.snapshot().totals.finished.get("cancelled", 0) == c + 1, 3)


def test_leaving_before_anything_was_sent_leaves_no_error(server, caplog):
    server.batch.prefill_token_s = 0.002
    for patience in range(3):
        cancelled = server.worker.snapshot().totals.finished.get("cancelled", 0)
        connection = raw_stream(server, {**BODY, "messages": [{"role": "user", "content": "word " * 1500}]})
        server.wait(lambda: server.worker.snapshot().running == 1)
        time.sleep(0.02 * patience)
        connection.close()
        server.wait(lambda before=cancelled: server.worker.snapshot().totals.finished.get("cancelled", 0) > before, 3)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_check_31_a_slow_reader_holds_up_its_own_answer_and_nobody_else(server):
    server.script = lambda request: "x" * 16000 if request.sampling.max_tokens is None else "fast"
    connection = raw_stream(server, BODY)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    read_until(connection, b"xxxx")
    time.sleep(0.3)
    before = time.monotonic()
    assert text_of(stream(server, max_tokens=5)) == "fast"
    assert time.monotonic() - before < 2
    answers = server.worker.snapshot().requests
    assert all(answer.tokens < 4000 for answer in answers)
    connection.close()
    server.wait(lambda: not server.worker.snapshot().running)


def test_check_32_headers_of_a_stream(server):
    headers = stream(server).headers
    assert headers["content-type"].startswith("text/event-stream") and headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no" and "content-encoding" not in headers


def test_check_36_an_answer_that_fills_the_context_ends_with_length(server):
    ctx = server.batch.ctx
    server.script = "word " * 10
    prompt = len(server.model.tokenizer.encode("Hi")) + 12
    server.batch.ctx = prompt + 6
    try:
        chunks = stream(server, stream_options={"include_usage": True}).chunks
    finally:
        server.batch.ctx = ctx
    assert chunks[-2]["choices"][0]["finish_reason"] == "length" and chunks[-2]["tandem"]["stop_reason"] == "context"
    assert chunks[-1]["usage"]["completion_tokens"] > 0


def test_pieces_of_one_step_are_one_write_and_joined(server):
    server.script = Script("a b c d e f g h", tokens_per_round=4)
    reply = stream(server)
    assert text_of(reply) == "a b c d e f g h" and len(reply.chunks) <= 4


def test_streams_side_by_side_are_not_mixed(server):
    import concurrent.futures

    server.script = lambda request: f"answer {len(request.prompt.ids)} " * 30

    def one(words: int) -> bool:
        reply = stream(server, "w " * words)
        return (
            text_of(reply).strip() == (f"answer {len(server.model.tokenizer.encode('w ' * words)) + 12} " * 30).strip()
        )

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        lengths = [len(server.model.tokenizer.encode("w " * n)) for n in range(1, 25)]
        assert len(set(lengths)) > 12
        assert all(pool.map(one, range(1, 25)))
