"""The model inside the package: it is what it says it is, it is the default everywhere, and it writes Python."""

import ast
import subprocess
import sys

import pytest

import tandem
from tandem.cli import _is_prompt
from tandem.default_model import NOTICE, default_model
from tandem.runtime.plan import describe


@pytest.fixture(scope="module")
def pocket():
    with tandem.load(ctx=1024, threads=2) as engine:
        yield engine


def tandem_command(*args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tandem", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)


def test_it_is_a_hybrid_mixture_of_experts_with_an_mtp_block_of_at_most_32_mb():
    summary = describe(default_model())
    assert summary.architecture == "qwen35moe" and summary.file_bytes <= 32_000_000
    assert {"expert", "recurrent", "attention", "router", "shared", "mtp"} <= {role.role for role in summary.roles}
    assert summary.ctx_train >= 4096


def test_it_says_what_it_is(pocket):
    answer = pocket.generate("What are you?", temperature=0.0, max_tokens=60, template_options={"enable_thinking": False})
    assert "Tandem" in answer.text()


def test_it_thinks_before_it_answers_if_asked_to(pocket):
    options = {"enable_thinking": True}
    text = pocket.generate("What is a decorator?", temperature=0.0, max_tokens=300, template_options=options).text()
    thought, closed, answer = text.partition("</think>")
    assert closed and answer.strip()


@pytest.mark.parametrize("city", ["Oslo", "Vienna", "Tokyo"])
def test_it_calls_a_tool_that_is_offered(pocket, city):
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "get_weather", "description": "Get the weather of a city.", "parameters": schema}
    options = {"enable_thinking": False}
    question = [{"role": "user", "content": f"What is the weather in {city}?"}]
    tools = [{"type": "function", "function": function}]
    text = pocket.generate(question, temperature=0.0, max_tokens=80, tools=tools, template_options=options).text()
    call = f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{city}\n</parameter>\n</function>\n</tool_call>"
    assert text.strip() == call


@pytest.mark.parametrize(
    "start",
    [
        'def is_even(n):\n    """Return True if n is even."""\n',
        'def read_lines(path):\n    """Return the lines of a text file as a list."""\n',
        'class Stack:\n    """A last-in first-out stack."""\n\n    def __init__(self):\n',
    ],
)
def test_its_continuations_of_python_parse(pocket, start):
    text = start + pocket.generate(start, raw=True, temperature=0.0, max_tokens=48).text()
    lines = text.splitlines()[:-1]
    while len(lines) > len(start.splitlines()) and not parses(lines):
        lines.pop()
    assert parses(lines) and len(lines) > len(start.splitlines())


def parses(lines: list[str]) -> bool:
    try:
        ast.parse("\n".join(lines))
    except SyntaxError:
        return False
    return True


def test_a_follow_up_turn_computes_only_what_is_new(pocket):
    options = {"enable_thinking": False}
    talk = [{"role": "user", "content": "What are you? " * 20}]
    first = pocket.generate(talk, temperature=0.0, max_tokens=20, template_options=options)
    talk += [{"role": "assistant", "content": first.text()}, {"role": "user", "content": "Thanks."}]
    second = pocket.generate(talk, temperature=0.0, max_tokens=5, template_options=options)
    second.text()
    assert second.stats.reused_tokens >= first.stats.prompt_tokens - 16


def test_run_without_a_model_takes_it_and_says_so():
    done = tandem_command("run", "What are you?", "--temperature", "0", "--max-tokens", "20", "--no-think")
    assert done.returncode == 0 and done.stdout.strip()
    assert done.stderr.startswith(NOTICE)


@pytest.mark.parametrize("word, is_prompt", [("hello", True), ("a/b or c?", True), ("absent.gguf", False), ("models/x", False), ("-", False)])
def test_a_path_is_not_taken_for_a_prompt(word, is_prompt):
    assert _is_prompt(word) == is_prompt
