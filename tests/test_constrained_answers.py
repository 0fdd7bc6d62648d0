"""The packaged model under constraints: calls come out valid, drafts change nothing, a budget closes its reasoning."""

import json

import jsonschema
import pytest
from test_grammar import WEATHER, o
from test_tool_parsers import checked_calls, summary

import tandem
from tandem.batch import Batch
from tandem.requests import GenerationRequest, Prompt
from tandem.text.budget import MESSAGE, Both, reasoning_budget
from tandem.text.grammar import ToolRequest, make_constraint
from tandem.text.reasoning import prompt_end
from tandem.text.tools import AnswerParser, capabilities, format_of

TOOLS = [WEATHER]
QUESTION = [{"role": "user", "content": "What is the weather in Bern for 3 days?"}]


@pytest.fixture(scope="module")
def batch():
    made = Batch(lambda: tandem.load(None, ctx=2048))
    yield made
    made.close_all()


def answered(batch, thinking, constraint, drafts=None, temperature=0.0, max_tokens=200):
    """(ids, deltas, why it ended) of one answer to the question."""
    engine = batch.engine
    ids = engine.template.encode(QUESTION, TOOLS, enable_thinking=thinking)
    end = prompt_end(engine.template.render(QUESTION, TOOLS, enable_thinking=thinking))
    sampling = engine.sampling(temperature=temperature, seed=3, max_tokens=max_tokens)
    answer = batch.open(GenerationRequest(Prompt(ids, (), False), sampling, constraint(end), drafts=drafts))
    while (step := batch.prefill(answer)).done < step.total:
        pass
    parser, written, deltas, finished = AnswerParser("qwen-xml", TOOLS, end), [], [], None
    while finished is None:
        (step,) = batch.decode([answer])
        for piece in step.pieces:
            written.append(piece.token)
            deltas += parser.push(piece.text, piece.control)
        finished = step.finished
    batch.close(answer, finished)
    return written, deltas + parser.finish(finished), finished


def required(batch):
    request = ToolRequest(TOOLS, "required", "qwen-xml", parallel=False)
    return lambda end: make_constraint(batch.engine.tokenizer, tool_request=request, prompt_end=end)


@pytest.mark.parametrize("thinking", [False, True])
def test_a_required_call_is_made_and_valid(batch, thinking):
    _, deltas, finished = answered(batch, thinking, required(batch), temperature=1.0, max_tokens=500)
    _, content, flags, calls, _ = summary(deltas)
    assert finished == "eos" and not content and not flags
    ((name, arguments),) = checked_calls(calls)
    assert name == "get_weather"
    jsonschema.validate(arguments, WEATHER["function"]["parameters"])


@pytest.mark.parametrize("thinking", [False, True])
def test_drafts_change_nothing(batch, thinking):
    plain, with_drafts = (answered(batch, thinking, required(batch), drafts=drafts) for drafts in (0, None))
    assert plain[0] == with_drafts[0] and plain[2] == with_drafts[2]
    assert summary(plain[1]) == summary(with_drafts[1])


def test_an_instance_of_a_schema_ends_by_itself(batch):
    schema = o({"city": {"enum": ["Bern", "Basel"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}})
    tokenizer = batch.engine.tokenizer
    _, deltas, finished = answered(
        batch, False, lambda end: make_constraint(tokenizer, json_schema=schema, prompt_end=end), temperature=1.0
    )
    jsonschema.validate(json.loads(summary(deltas)[1]), schema)
    assert finished == "eos"


@pytest.mark.parametrize("limit", [0, 4])
def test_a_budget_closes_reasoning_and_the_call_follows(batch, limit):
    def constraint(end):
        budget = reasoning_budget(batch.engine.tokenizer, limit, end, "qwen-xml")
        call = required(batch)(end)
        return lambda: Both(budget(), call())

    written, deltas, _ = answered(batch, True, constraint, max_tokens=500)
    reasoning, _, _, calls, _ = summary(deltas)
    thoughts = batch.engine.tokenizer.decode(written[:limit])
    assert reasoning == (thoughts + MESSAGE).strip() if limit else not reasoning
    assert len(checked_calls(calls)) == 1


def test_the_packaged_template_is_known(batch):
    template = batch.engine.template
    assert format_of(template.source, batch.engine.file.metadata) == "qwen-xml"
    assert capabilities(template).supports_tools
