"""The `anthropic` package against a server that runs the packaged model."""

import pytest
from api_server import ApiServer

from tandem.batch import Batch
from tandem.default_model import default_model
from tandem.engine import Engine

anthropic = pytest.importorskip("anthropic")
QUESTION = [{"role": "user", "content": "Write a function that adds two numbers."}]
GREEDY = {"temperature": 0}  # recent versions of the package have no argument for it
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "The weather of a city", "input_schema": SCHEMA}


@pytest.fixture(scope="module")
def server():
    made = ApiServer(
        make_batch=lambda: Batch(lambda: Engine.load(default_model(), ctx=4096, threads=2), max_sequences=8)
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120) as made:
        yield made


def ask(client, **fields):
    fields = {"model": "pocket", "messages": QUESTION, "max_tokens": 24, **fields}
    return client.messages.create(**fields)


def test_a_message_parses_into_its_type(client):
    answer = ask(client)
    assert answer.type == "message" and answer.content[0].type == "text" and answer.content[0].text
    assert answer.stop_reason in ("end_turn", "max_tokens") and answer.usage.input_tokens > 0


def test_a_stream_gathers_to_the_same_message(client):
    whole = ask(client, extra_body=GREEDY).content[0].text
    with client.messages.stream(model="pocket", messages=QUESTION, max_tokens=24, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole == final.content[0].text and final.usage.output_tokens > 0


def test_check_52_counted_tokens_are_those_that_were_used(client):
    fields = {"system": "Be brief.", "tools": [WEATHER], "messages": QUESTION}
    counted = client.messages.count_tokens(model="pocket", **fields).input_tokens
    usage = ask(client, max_tokens=1, **fields).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def test_check_53_the_next_turn_comes_from_the_cache_though_the_billing_header_changes(client):
    def turn(mark: str, messages: list):
        header = {"type": "text", "text": f"x-anthropic-billing-header: cch={mark};"}
        return ask(
            client,
            messages=messages,
            system=[header, {"type": "text", "text": "You are helpful. " * 30}],
            extra_body=GREEDY,
        )

    first = turn("a1", QUESTION)
    total = first.usage.input_tokens + first.usage.cache_read_input_tokens
    history = [*QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": "Shorter."}]
    second = turn("b2", history)
    assert second.usage.cache_read_input_tokens >= 0.95 * total


def test_a_round_trip_with_a_tool(client):
    tools, choice = [WEATHER], {"type": "tool", "name": "get_weather"}
    with client.messages.stream(
        model="pocket", messages=QUESTION, max_tokens=100, tools=tools, tool_choice=choice, extra_body=GREEDY
    ) as stream:
        answer = stream.get_final_message()
    use = next(block for block in answer.content if block.type == "tool_use")
    assert answer.stop_reason == "tool_use" and use.input["city"] in ("Paris", "Rome")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "sunny"}]}
    history = [*QUESTION, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert ask(client, messages=history, tools=tools).stop_reason in ("end_turn", "max_tokens", "tool_use")


def test_thinking_is_a_block_and_comes_back(client):
    answer = ask(client, max_tokens=300, thinking={"type": "enabled", "budget_tokens": 1024})
    assert answer.content[0].type == "thinking" and answer.content[0].signature == ""
    history = [*QUESTION, {"role": "assistant", "content": answer.content}, {"role": "user", "content": "Go on."}]
    assert ask(client, messages=history).content


def test_errors_become_the_clients_exceptions(client):
    with pytest.raises(anthropic.NotFoundError):
        ask(client, model="claude")
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 4096 maximum"):
        ask(client, messages=[{"role": "user", "content": "word " * 6000}])
    assert [model.id for model in client.models.list()] == ["pocket"]
