"""The `openai` package against a server that runs the packaged model."""

import json

import pytest
from api_server import ApiServer, tool

from tandem.batch import Batch
from tandem.default_model import default_model
from tandem.engine import Engine

openai = pytest.importorskip("openai")
QUESTION = [{"role": "user", "content": "Write a function that adds two numbers."}]
WEATHER = tool()
FLAT = {"type": "function", **WEATHER["function"]}


@pytest.fixture(scope="module")
def server():
    made = ApiServer(
        make_batch=lambda: Batch(lambda: Engine.load(default_model(), ctx=4096, threads=2), max_sequences=8)
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


def chat(client, **fields):
    fields = {"model": "pocket", "messages": QUESTION, "max_tokens": 24, "temperature": 0, **fields}
    return client.chat.completions.create(**fields)


def test_a_completion_parses_into_its_type_and_counts_its_tokens(client):
    answer = chat(client)
    assert answer.choices[0].message.content and answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert set(answer.model_extra) <= {"timings", "tandem"} and not answer.usage.model_extra


def test_check_17_greedy_answers_repeat_and_a_stream_says_the_same(client):
    whole = chat(client).choices[0].message.content
    assert chat(client).choices[0].message.content == whole
    parts = [chunk.choices[0].delta.content or "" for chunk in chat(client, stream=True) if chunk.choices]
    assert "".join(parts) == whole
    bound = {"regex": "[a-z ]{5,20}"}  # the helper takes answers cut by the limit for errors
    whole = chat(client, extra_body=bound).choices[0].message.content
    with client.chat.completions.stream(model="pocket", messages=QUESTION, temperature=0, extra_body=bound) as stream:
        assert stream.get_final_completion().choices[0].message.content == whole


def test_check_17_seeded_answers_repeat(client):
    answers = {chat(client, temperature=1, seed=5).choices[0].message.content for _ in range(3)}
    assert len(answers) == 1


def test_check_58_the_same_prefix_twice_comes_from_the_cache(client):
    history = [{"role": "system", "content": "You answer in short sentences. " * 20}, *QUESTION]
    first = chat(client, messages=history, max_tokens=8)
    again = chat(
        client,
        messages=[
            *history,
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "And subtract?"},
        ],
        max_tokens=8,
    )
    assert again.usage.prompt_tokens_details.cached_tokens >= 0.95 * first.usage.prompt_tokens


def test_check_58_two_agents_that_take_turns_keep_their_caches(client):
    histories = {name: [{"role": "system", "content": f"You are {name}. " * 40}, *QUESTION] for name in ("Ann", "Ben")}
    before = {name: chat(client, messages=messages, max_tokens=6) for name, messages in histories.items()}
    for name, messages in histories.items():
        answer = before[name].choices[0].message.content
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Go on."}]
        cached = chat(client, messages=messages, max_tokens=6).usage.prompt_tokens_details.cached_tokens
        assert cached >= 0.95 * before[name].usage.prompt_tokens


def test_check_59_reasoning_that_the_template_drops_costs_no_more_than_what_follows(client):
    tools = [tool("get_weather", city={"type": "string", "enum": ["Paris"]})]
    messages = [
        {"role": "system", "content": "You are thorough. " * 30},
        {"role": "user", "content": "Weather in Paris?"},
    ]
    options = {"tools": tools, "extra_body": {"enable_thinking": True, "reasoning_budget": 30}}
    shared = chat(client, messages=messages, max_tokens=1, **options).usage.prompt_tokens
    answer = chat(client, messages=messages, max_tokens=200, tool_choice="required", **options).choices[0].message
    turn = {"role": "assistant", "content": answer.content or "", "reasoning_content": answer.reasoning_content}
    turn["tool_calls"] = [call.model_dump() for call in answer.tool_calls]
    messages += [turn, {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "sunny"}]
    loop = chat(client, messages=messages, max_tokens=8, **options)
    assert loop.usage.prompt_tokens_details.cached_tokens >= 0.95 * shared
    messages += [{"role": "assistant", "content": "Sunny."}, {"role": "user", "content": "Thanks. And now?"}]
    again = chat(client, messages=messages, max_tokens=8, **options)
    assert again.usage.prompt_tokens_details.cached_tokens >= 0.95 * shared


def test_check_7_and_10_a_forced_call_is_valid_and_typed(client):
    tools = [
        tool(
            "get_weather",
            city={"type": "string", "maxLength": 12},
            days={"type": "integer", "minimum": 1, "maximum": 9},
        )
    ]
    named = {"type": "function", "function": {"name": "get_weather"}}
    answer = chat(client, tools=tools, tool_choice=named, max_tokens=120)
    assert answer.choices[0].finish_reason == "tool_calls"
    call = answer.choices[0].message.tool_calls[0]
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "get_weather" and set(arguments) == {"city", "days"} and 1 <= arguments["days"] <= 9


def test_a_round_trip_with_a_tool_streams_and_goes_on(client):
    tools = [tool("get_weather", city={"type": "string", "enum": ["Paris", "Rome"]})]
    with client.chat.completions.stream(
        model="pocket", messages=QUESTION, tools=tools, tool_choice="required", max_tokens=120, temperature=0
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    call = message.tool_calls[0]
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    history = [
        *QUESTION,
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    assert chat(client, messages=history, tools=tools).choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_check_12_an_answer_in_a_schema_validates(client):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
    for thinking in (False, True):
        answer = chat(
            client,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
            max_tokens=300,
            extra_body={"enable_thinking": thinking, "reasoning_budget": 20 if thinking else None},
        )
        found = json.loads(answer.choices[0].message.content)
        assert set(found) == {"ok", "n"} and isinstance(found["ok"], bool) and 0 <= found["n"] <= 99


def test_a_regex_and_a_grammar_are_followed(client):
    assert chat(client, extra_body={"regex": "[ab]{3}"}).choices[0].message.content.strip("ab") == ""
    text = chat(client, extra_body={"grammar": 'start: "yes" | "no"'}).choices[0].message.content
    assert text in ("yes", "no")


def test_check_18_logprobs_and_choices(client):
    answer = chat(client, logprobs=True, top_logprobs=3, max_tokens=5)
    content = answer.choices[0].logprobs.content
    assert len(content) == 5 and "".join(entry.token for entry in content) == answer.choices[0].message.content
    for entry in content:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 3 and entry.logprob == entry.top_logprobs[0].logprob
    assert len({choice.index for choice in chat(client, n=3, temperature=1).choices}) == 3
    chunks = list(chat(client, logprobs=True, max_tokens=5, stream=True))
    assert (
        sum(len(chunk.choices[0].logprobs.content) for chunk in chunks if chunk.choices and chunk.choices[0].logprobs)
        == 5
    )


def test_a_reasoning_budget_ends_reasoning(client):
    answer = chat(client, max_tokens=200, extra_body={"enable_thinking": True, "reasoning_budget": 5})
    message = answer.choices[0].message
    assert message.content and "think>" not in message.content
    assert answer.usage.completion_tokens_details.reasoning_tokens <= 40


def test_completions_and_embeddings(client):
    answer = client.completions.create(
        model="pocket", prompt="def add(a, b):", max_tokens=12, temperature=0, logprobs=2
    )
    assert answer.choices[0].text and len(answer.choices[0].logprobs.tokens) == answer.usage.completion_tokens
    found = client.embeddings.create(model="pocket", input=["def add(a, b):", "a poem"])  # base64 by default
    plain = client.embeddings.create(model="pocket", input=["def add(a, b):", "a poem"], encoding_format="float")
    for one, other in zip(found.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6) and sum(
            x * x for x in one.embedding
        ) == pytest.approx(1, abs=1e-4)


def test_responses_stream_and_go_on(client):
    with client.responses.stream(model="pocket", input="Say hello.", max_output_tokens=24, temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response() if kinds[-1] == "response.completed" else None
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
    first = final or client.responses.create(model="pocket", input="Say hello.", max_output_tokens=24, temperature=0)
    assert first.output_text and first.usage.input_tokens > 0
    second = client.responses.create(
        model="pocket", input="Again.", previous_response_id=first.id, max_output_tokens=16
    )
    assert second.usage.input_tokens > first.usage.input_tokens and second.usage.input_tokens_details.cached_tokens > 0


def test_responses_call_functions(client):
    answer = client.responses.create(
        model="pocket", input="Weather?", tools=[FLAT], tool_choice="required", max_output_tokens=200, temperature=0
    )
    call = answer.output[0]
    assert call.type == "function_call" and isinstance(json.loads(call.arguments), dict)


def test_errors_become_the_clients_exceptions(client):
    with pytest.raises(openai.NotFoundError, match="known: pocket"):
        chat(client, model="gpt-4")
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, messages=[{"role": "user", "content": "word " * 6000}])
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "messages"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat(client, temperature=-1)
    assert [model.id for model in client.models.list()] == ["pocket"]


def test_leaving_a_stream_ends_the_answer(client, server):
    for _ in range(3):
        stream = chat(client, stream=True, max_tokens=2000, temperature=1, extra_body={"loop_guard": False})
        next(iter(stream))
        stream.close()
    server.wait(lambda: server.worker.snapshot().running == 0, 20)
