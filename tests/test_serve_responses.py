"""The Responses API by the numbers of the conformance checks, over a scripted engine."""

import json

import pytest
from api_server import ApiServer, call_text
from fake_batch import BROKEN, Script

from tandem.serve.app import AppSettings
from tandem.serve.responses import ResponseStore

TOOL = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture(scope="module")
def server():
    made = ApiServer(AppSettings(patience_s=0.05, ping_s=0.1, event_s=0.2))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def plain(server):
    server.script = "Hello there."


def ask(server, input="Hi", **fields):
    return server.request("/v1/responses", {"input": input, **fields})


def prompt_of(server) -> str:
    return server.model.tokenizer.decode(server.batch.opened[-1].prompt.ids, keep_control=True)


def test_check_44_events_come_in_order_with_rising_numbers_and_no_done(server):
    server.script = "Think.</think>\n\nText.\n" + call_text(city="Paris")
    reply = ask(server, stream=True, tools=[TOOL], reasoning={"effort": "high"})
    events = reply.events
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert all(name == data["type"] for name, data in events) and b"[DONE]" not in reply.data
    names = [name.removeprefix("response.") for name, _ in events if not name.endswith("delta")]
    text = ["output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done"]
    reasoning = [name.replace("output_text", "reasoning_text") for name in text]
    call = ["output_item.added", "function_call_arguments.done", "output_item.done"]
    assert names == ["created", "in_progress", *reasoning, *text, *call, "completed"]


def test_check_45_calls_are_items_and_their_results_come_back(server):
    server.script = call_text(city="Paris")
    tools = [
        TOOL,
        {"type": "web_search"},
        {"type": "custom", "name": "patch"},
        {"type": "namespace", "name": "x", "tools": []},
    ]
    first = ask(server, tools=tools).json
    item = first["output"][0]
    assert (item["type"], item["name"], json.loads(item["arguments"])) == (
        "function_call",
        "get_weather",
        {"city": "Paris"},
    )
    assert item["call_id"] and first["status"] == "completed"
    assert len(first["tandem"]["warnings"]) == 3 and "web_search" in first["tandem"]["warnings"][0]
    server.script = "Sunny."
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "sun"}
    second = ask(server, [{"role": "user", "content": "Weather?"}, item, result], tools=tools).json
    assert second["output"][0]["content"][0]["text"] == "Sunny."
    assert "<parameter=city>\nParis\n</parameter>" in prompt_of(server) and "<tool_response>\nsun" in prompt_of(server)


def test_check_46_reasoning_is_an_item_in_and_out(server):
    server.script = "Think hard.</think>\n\nText."
    events = ask(server, stream=True, reasoning={"effort": "high"}).events
    deltas = [data for name, data in events if name == "response.reasoning_text.delta"]
    assert all(data["content_index"] == 0 for data in deltas) and "".join(d["delta"] for d in deltas) == "Think hard."
    output = events[-1][1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    back = [
        {"role": "user", "content": "Q"},
        *output,
        call,
        {"type": "function_call_output", "call_id": "c", "output": "R"},
    ]
    assert ask(server, back).status == 200
    assert "<think>\nThink hard.\n</think>\n\nText.\n\n<tool_call>" in prompt_of(server), "one turn of the assistant"
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Short."}], "encrypted_content": "x"}
    assert ask(server, [{"role": "user", "content": "Q"}, summary, call]).status == 200
    assert "<think>\nShort.\n</think>" in prompt_of(server)


def test_check_47_usage_is_nested(server):
    server.script = Script("T.</think>\n\nText.", reused=5)
    usage = ask(server, stream=True, reasoning={"effort": "high"}).events[-1][1]["response"]["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == 5
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_check_48_conversations_go_on_by_id_and_only_those_that_were_stored(server):
    first = ask(server, "My name is Ann.", instructions="Be brief.").json
    assert server.request(f"/v1/responses/{first['id']}").json["id"] == first["id"]
    second = ask(server, "Who am I?", previous_response_id=first["id"]).json
    prompt = prompt_of(server)
    assert "My name is Ann." in prompt and "Hello there." in prompt and "Be brief." not in prompt
    assert second["previous_response_id"] == first["id"]
    hidden = ask(server, "x", store=False).json
    assert hidden["store"] is False
    for id in (hidden["id"], "resp_unknown"):
        reply = ask(server, "y", previous_response_id=id)
        assert reply.status == 404 and reply.error["param"] == "previous_response_id"
    assert server.request(f"/v1/responses/{first['id']}", method="DELETE").json["deleted"] is True
    assert server.request(f"/v1/responses/{first['id']}").status == 404


def test_check_48_the_store_is_bounded_by_number_and_bytes():
    store = ResponseStore(most=3, most_bytes=10_000)
    from tandem.serve.bodies import InputItem

    for at in range(10):
        store.put({"id": f"r{at}"}, [InputItem(role="user", content="x" * 100)])
    assert [store.response(f"r{at}")["id"] for at in (7, 8, 9)] == ["r7", "r8", "r9"] and len(store._kept) == 3
    store.put({"id": "big"}, [InputItem(role="user", content="x" * 9_800)])
    assert list(store._kept) == ["big"] and store._bytes <= 10_000


def test_check_49_a_probe_without_input_is_answered_without_the_engine(server):
    before = len(server.batch.opened)
    for input in ("", [], None):
        reply = ask(server, input, max_output_tokens=1)
        assert reply.status == 200 and reply.json["status"] == "completed" and reply.json["output"] == []
    assert [name for name, _ in ask(server, "", max_output_tokens=1, stream=True).events][-1] == "response.completed"
    assert len(server.batch.opened) == before
    assert ask(server, "").error["param"] == "input"


def test_an_answer_cut_by_the_limit_is_incomplete(server):
    events = ask(server, stream=True, max_output_tokens=2).events
    response = events[-1][1]["response"]
    assert events[-1][0] == "response.incomplete" and response["incomplete_details"] == {"reason": "max_output_tokens"}


def test_a_failure_in_the_middle_is_response_failed(server):
    server.script = Script("Hello there, this goes on.", decode_error=BROKEN, error_at=3)
    name, data = ask(server, stream=True).events[-1]
    assert name == "response.failed" and data["response"]["status"] == "failed" and data["response"]["error"]["message"]


def test_instructions_and_a_developer_message_are_one_system_message(server):
    ask(
        server,
        [{"role": "developer", "content": [{"type": "input_text", "text": "Two."}]}, {"role": "user", "content": "Q"}],
        instructions="One.",
    )
    assert prompt_of(server).startswith("<|im_start|>system\nOne.\n\nTwo.<|im_end|>")


def test_silence_is_broken_by_real_events_for_clients_that_count_nothing_else(server):
    server.batch.prefill_token_s = 0.05
    try:
        events = ask(server, "word " * 4, stream=True).events
    finally:
        server.batch.prefill_token_s = 0.0
    assert [name for name, _ in events].count("response.in_progress") >= 3
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))


def test_check_35_truncation_happens_only_if_asked_for_and_says_so(server):
    turns = [
        {"role": role, "content": f"{role} {n} " + "word " * 900} for n in range(3) for role in ("user", "assistant")
    ]
    turns.append({"role": "user", "content": "last"})
    assert ask(server, turns).error["code"] == "context_length_exceeded"
    reply = ask(server, turns, truncation="auto", instructions="Stay.")
    assert reply.status == 200 and reply.json["tandem"]["dropped_messages"] == 2
    prompt = prompt_of(server)
    assert "Stay." in prompt and "user 0" not in prompt and "user 1" in prompt and "last" in prompt
    assert ask(server, "word " * 6000, truncation="auto").status == 400
    assert ask(server, "x", truncation="half").error["param"] == "truncation"


def test_formats_and_images(server):
    ask(server, text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}})
    assert server.batch.opened[-1].constraint is not None
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA"}]}]
    assert "pocket" in ask(server, image).error["message"]
    strange = ask(server, [{"type": "computer_call", "id": "x"}, {"role": "user", "content": "Q"}]).json
    assert "computer_call" in strange["tandem"]["warnings"][0]
