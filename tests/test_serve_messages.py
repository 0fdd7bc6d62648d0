"""The Messages API by the numbers of the conformance checks, over a scripted engine."""

import json

import pytest
from api_server import ApiServer, call_text
from fake_batch import BROKEN, Script

from tandem.serve.app import AppSettings

TOOL = {
    "name": "get_weather",
    "description": "d",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
BILLING = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=%s;"}


@pytest.fixture(scope="module")
def server():
    made = ApiServer(AppSettings(patience_s=0.05, ping_s=0.1, event_s=0.2))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def plain(server):
    server.script = "Hello there."


def ask(server, messages="Hi", path="/v1/messages", **fields):
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return server.request(path, {"messages": messages, "max_tokens": 100, **fields})


def prompt_of(server) -> str:
    return server.model.tokenizer.decode(server.batch.opened[-1].prompt.ids, keep_control=True)


def test_check_50_events_come_in_order_and_arguments_concatenate(server):
    server.script = Script("Think.</think>\n\nText.\n" + call_text(city='Pa"ris') + call_text("now"), reused=3)
    now = {"name": "now", "input_schema": {"type": "object"}}
    events = ask(server, stream=True, tools=[TOOL, now], thinking={"type": "enabled", "budget_tokens": 1000}).events
    assert all(name == data["type"] for name, data in events)
    order = [name for name, _ in events if name not in ("content_block_delta", "ping")]
    assert order == [
        "message_start",
        *["content_block_start", "content_block_stop"] * 4,
        "message_delta",
        "message_stop",
    ]
    usage = events[0][1]["message"]["usage"]
    assert usage["input_tokens"] > 0 and usage["cache_read_input_tokens"] == 3
    kinds = [data["content_block"]["type"] for name, data in events if name == "content_block_start"]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    pieces = [
        "".join(
            d["delta"].get("partial_json", "") for n, d in events if n == "content_block_delta" and d["index"] == at
        )
        for at in (2, 3)
    ]
    assert [json.loads(piece) for piece in pieces] == [{"city": 'Pa"ris'}, {}]
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"
    final = events[-2][1]["usage"]
    assert final["input_tokens"] + final["cache_read_input_tokens"] == len(server.batch.opened[-1].prompt.ids)
    assert final["output_tokens"] > 0


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({}, "end_turn", None),
        ({"max_tokens": 1}, "max_tokens", None),
        ({"stop_sequences": ["ere"]}, "stop_sequence", "ere"),
    ],
)
def test_check_50_stop_reasons(server, fields, reason, sequence):
    reply = ask(server, **fields).json
    assert (reply["stop_reason"], reply["stop_sequence"]) == (reason, sequence) and reply["type"] == "message"
    streamed = ask(server, stream=True, **fields).events[-2][1]["delta"]
    assert (streamed["stop_reason"], streamed["stop_sequence"]) == (reason, sequence)


def test_check_51_thinking_has_a_signature_and_comes_back(server):
    server.script = "Think.</think>\n\nText."
    content = ask(server, thinking={"type": "enabled", "budget_tokens": 1000}).json["content"]
    assert content == [{"type": "thinking", "thinking": "Think.", "signature": ""}, {"type": "text", "text": "Text."}]
    events = ask(server, stream=True, thinking={"type": "enabled", "budget_tokens": 1000}).events
    assert "signature_delta" in [data["delta"]["type"] for name, data in events if name == "content_block_delta"]
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "R"}]}
    back = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": [*content, use]}, result]
    assert ask(server, back).status == 200 and "<think>\nThink.\n</think>\n\nText." in prompt_of(server)
    redacted = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, use]},
        result,
    ]
    assert ask(server, redacted).status == 200


def test_check_52_counted_tokens_are_those_of_the_prompt(server):
    bodies = [
        {},
        {"system": "S"},
        {"system": [{"type": "text", "text": "S"}, {**BILLING}], "tools": [TOOL]},
        {"thinking": {"type": "enabled", "budget_tokens": 10}},
        {"tools": [TOOL], "tool_choice": {"type": "none"}},
    ]
    for body in bodies:
        before = len(server.batch.opened)
        counted = ask(server, "How long is it? 漢字", "/v1/messages/count_tokens", **body).json
        assert len(server.batch.opened) == before
        ask(server, "How long is it? 漢字", **body)
        assert counted == {"input_tokens": len(server.batch.opened[-1].prompt.ids)}


def test_check_53_cache_marks_change_nothing_and_the_billing_header_is_gone(server):
    def system(mark: str) -> list:
        return [
            {"type": "text", "text": BILLING["text"] % mark},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        ]

    prompts = []
    for mark in ("aaa", "bbb"):
        ask(
            server,
            [{"role": "user", "content": [{"type": "text", "text": "Q", "cache_control": {"type": "ephemeral"}}]}],
            system=system(mark),
        )
        prompts.append(server.batch.opened[-1].prompt.ids)
    ask(server, "Q", system="Be brief.")
    assert prompts[0] == prompts[1] == server.batch.opened[-1].prompt.ids
    ask(server, "Q", system="x-anthropic-billing-header: cch=ccc;\nBe brief.")
    assert server.batch.opened[-1].prompt.ids == prompts[0]
    server.chat(
        [
            {"role": "system", "content": "x-anthropic-billing-header: cch=d;\nBe brief."},
            {"role": "user", "content": "Q"},
        ]
    )
    assert server.batch.opened[-1].prompt.ids == prompts[0]


def test_check_54_results_of_tools_may_be_lists_errors_and_images(server):
    use = [{"type": "tool_use", "id": f"t{n}", "name": "f", "input": {"a": n}} for n in range(3)]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    results = [
        {"type": "tool_result", "tool_use_id": "t0", "content": [{"type": "text", "text": "one"}, image]},
        {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": "broken"},
        {"type": "tool_result", "tool_use_id": "t2"},
        {"type": "text", "text": "Go on."},
    ]
    messages = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": use},
        {"role": "user", "content": results},
    ]
    assert ask(server, messages).status == 200
    prompt = prompt_of(server)
    assert "one[An image was here" in prompt and "Error: broken" in prompt and "user\nGo on." in prompt
    reply = ask(server, [{"role": "user", "content": [image]}])
    assert reply.status == 400 and "pocket" in reply.error["message"]


def test_a_last_message_of_the_assistant_is_the_beginning_of_the_answer(server):
    ask(server, [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "{"}], thinking={"type": "enabled"})
    assert prompt_of(server).endswith("<think>\n\n</think>\n\n{")


def test_tool_choices_of_this_api(server):
    for choice, forced in (
        ({"type": "any"}, True),
        ({"type": "tool", "name": "get_weather"}, True),
        ({"type": "auto"}, False),
    ):
        ask(server, tools=[TOOL], tool_choice=choice)
        assert (server.batch.opened[-1].constraint is not None) == forced
    assert ask(server, tools=[TOOL], tool_choice={"type": "tool", "name": "x"}).status == 400
    assert ask(server, tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"}]).status == 200


def test_errors_have_this_apis_shape(server):
    for body in (b"{", b'{"messages": []}', b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}'):
        reply = server.request("/v1/messages", body)
        assert (
            reply.status == 400
            and set(reply.json) == {"type", "error"}
            and reply.error["type"] == "invalid_request_error"
        )
    assert ask(server, model="x").error["type"] == "not_found_error"
    server.script = Script("Hello there, this goes on.", decode_error=BROKEN, error_at=3)
    name, data = ask(server, stream=True).events[-1]
    assert name == "error" and data["type"] == "error" and data["error"]["type"] == "api_error"


def test_pings_are_events_here(server):
    server.batch.prefill_token_s = 0.05
    try:
        assert "ping" in [name for name, _ in ask(server, "word " * 4, stream=True).events]
    finally:
        server.batch.prefill_token_s = 0.0
