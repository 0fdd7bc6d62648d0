"""`tandem serve` as a process with the packaged model: what it prints, serves, logs and refuses, and how it ends."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from browser import chromium

from tandem.default_model import default_model
from tandem.errors import SettingError
from tandem.gguf import read_gguf
from tandem.runtime.decode import NO_DRAFTS, SOURCES, DraftSettings
from tandem.serve.command import draft_settings, name_of, worker_limits
from tandem.serve.config import load_config

KEY = "k3y-with-enough-characters"
SECRET = "zebra-crossing-in-my-diary"


STARTED: list[subprocess.Popen] = []


@pytest.fixture(scope="module", autouse=True)
def nothing_stays_behind():
    yield
    for process in STARTED:
        if process.poll() is None:
            process.kill()


class Served:
    """A running `tandem serve`; out and err are read as they come."""

    def __init__(self, *options: str, **variables: str):
        environ = {k: v for k, v in os.environ.items() if not k.startswith("TANDEM_")} | variables
        environ["XDG_CONFIG_HOME"] = "/nonexistent"
        command = [sys.executable, "-m", "tandem", "serve", "--port", "0", "--ctx", "1024", "--threads", "1", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)
        STARTED.append(self.process)
        self.out, self.err = [], []
        for stream, lines in ((self.process.stdout, self.out), (self.process.stderr, self.err)):
            threading.Thread(target=lambda s=stream, kept=lines: kept.extend(iter(s.readline, "")), daemon=True).start()
        self.wait(lambda: self.out or self.process.poll() is not None)
        found = re.search(r"http://\S+:\d+", "".join(self.out))
        self.url = found[0].replace("0.0.0.0", "127.0.0.1") if found else ""

    def wait(self, condition, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.err
            time.sleep(0.02)

    def open(self, path: str, body: dict | None = None, key: str | None = None, timeout: float = 60.0):
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        data = None if body is None else json.dumps(body).encode()
        return urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=timeout)

    def json(self, path: str, body: dict | None = None, key: str | None = None) -> dict:
        with self.open(path, body, key) as answer:
            return json.load(answer)

    def refuses(self) -> bool:
        try:
            self.open("/health", timeout=5).close()
        except OSError:
            return True
        return False

    def lines(self) -> list[dict]:
        return [json.loads(line) for line in self.err if line.startswith("{")]

    def end(self, number: int = signal.SIGTERM, seconds: float = 30.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(seconds)
        time.sleep(0.1)  # for the last lines
        return code


def chat(text: str, **fields) -> dict:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0, **fields}


@pytest.fixture(scope="module")
def served():
    made = Served("--alias", "local", "--grace-s", "5")
    yield made
    assert made.end() == 0
    assert not [line for line in made.lines() if line["level"] == "error"]


def test_one_line_says_where_it_is_and_how_to_stop_it(served):
    assert len(served.out) == 1
    assert re.fullmatch(
        r"pocket at http://127\.0\.0\.1:\d+ \(page there, API under \S+/v1\); Ctrl-C or SIGTERM stops it\n",
        served.out[0],
    )


def test_it_answers_by_name_and_alias_and_logs_no_text(served):
    for model in ("pocket", "local", None):
        answer = served.json(
            "/v1/chat/completions", chat(f"Say {SECRET}", model=model) if model else chat(f"Say {SECRET}")
        )
        assert answer["choices"][0]["finish_reason"] in ("length", "stop") and answer["usage"]["completion_tokens"] <= 8
    assert [model["id"] for model in served.json("/v1/models")["data"]][0] == "pocket"
    served.wait(lambda: sum('"answer"' in line for line in served.err) >= 3)
    line = [line for line in served.lines() if line["event"] == "answer"][-1]
    assert line["endpoint"] == "/v1/chat/completions" and line["model"] == "pocket" and line["tokens"] <= 8
    assert line["reused"] > 0, "the same prompt twice"
    assert SECRET not in "".join(served.err)


def test_a_request_has_one_name_in_the_answer_and_in_the_log(served):
    with served.open("/v1/chat/completions", chat("Hello")) as answer:
        name = answer.headers["x-request-id"]
    served.wait(lambda: any(line.get("id") == name for line in served.lines() if line["event"] == "answer"), 5)


def test_metrics_status_and_page_are_there(served):
    text = served.open("/metrics").read().decode()
    assert re.search(r'^tandem_state\{state="loaded"\} 1\.0$', text, re.M)
    assert re.search(r'^tandem_memory_bytes\{role="weights"\} [1-9]', text, re.M)
    assert served.json("/status")["state"] == "loaded"
    assert "<title>Tandem</title>" in served.open("/").read().decode()
    assert served.json("/health")


def test_errors_are_json_without_paths_and_are_logged_by_status(served):
    with pytest.raises(urllib.error.HTTPError) as refused:
        served.json("/v1/chat/completions", {"messages": []})
    assert refused.value.code == 400 and json.load(refused.value)["error"]["message"]
    with pytest.raises(urllib.error.HTTPError) as refused:
        served.json("/v1/nothing")
    assert refused.value.code == 404 and json.load(refused.value)["error"]["message"]
    served.wait(lambda: {400, 404} <= {line.get("status") for line in served.lines() if line["event"] == "request"})


def test_hang_up_means_nothing(served):
    served.process.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    assert served.json("/status")["state"] == "loaded"


def test_the_page_talks_to_the_model(served):
    with chromium() as browser:
        page = browser.new_page()
        page.goto(served.url)
        page.fill("#max-tokens", "24")
        page.fill("#prompt", "Write a function that adds two numbers.")
        page.press("#prompt", "Enter")
        page.wait_for_selector(".message footer", timeout=60_000)
        assert re.search(r"\d+ tokens", page.inner_text(".message footer"))
        assert page.locator(".message .error").count() == 0
        assert len(page.inner_text(".message.assistant")) > 20
        assert page.inner_text("#state") == "loaded" and page.inner_text("#model-name") == "pocket"
        assert [option for option in page.locator("#model option").all_inner_texts()][0] == "pocket"


def test_a_running_answer_finishes_after_sigterm_and_nothing_new_begins():
    server = Served("--grace-s", "20")
    stream = server.open(
        "/v1/chat/completions", chat("Count to a thousand", max_tokens=120, stream=True, ignore_eos=True)
    )
    first = stream.readline()
    server.process.send_signal(signal.SIGTERM)
    server.wait(lambda: server.refuses(), 10)
    rest = stream.read().decode()
    assert first and '"finish_reason":"' in rest and rest.rstrip().endswith("data: [DONE]")
    assert server.end() == 0


def test_an_answer_longer_than_the_grace_ends_with_an_error_in_its_stream():
    server = Served("--grace-s", "0.2")
    with read_gguf(default_model()) as file:
        end = int(file.metadata["tokenizer.ggml.eos_token_id"])
    body = chat("Count", max_tokens=900, stream=True, logit_bias={str(end): -100}, temperature=1.5)
    streams = [server.open("/v1/chat/completions", body | {"seed": n}) for n in range(8)]
    for stream in streams:
        stream.readline()
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    rests = [stream.read().decode() for stream in streams]
    assert server.end() == 0 and time.monotonic() - began < 10
    cut = [rest for rest in rests if '"error"' in rest]
    assert cut, "eight long answers do not fit in 0.2 s"
    assert all("shutting down" in rest and '"finish_reason":"' not in rest for rest in cut)


def test_other_addresses_need_a_key_and_then_the_key_is_asked_for():
    refused = Served("--host", "0.0.0.0")
    assert refused.end() == 2 and "key" in "".join(refused.err) and not refused.out
    server = Served("--host", "0.0.0.0", TANDEM_API_KEY=KEY)
    with pytest.raises(urllib.error.HTTPError) as locked:
        server.json("/v1/models")
    assert locked.value.code == 401
    with pytest.raises(urllib.error.HTTPError) as locked:
        server.json("/status")
    assert locked.value.code == 401
    assert server.json("/v1/models", key=KEY)["data"]
    assert "<title>" in server.open("/").read().decode(), "the page itself holds nothing and asks for the key"
    assert server.end() == 0
    assert KEY not in "".join(server.err + server.out)


@pytest.mark.parametrize(
    "options, words",
    [
        (("nothing.gguf",), "nothing.gguf is not there"),
        (("--ctx", "16777216", "--kv", "f32"), "the largest context that fits is"),
        (("--max-queue", "x"), "--max-queue: 'x' for max_queue: a whole number"),
        (("--draft", "magic"), "draft source 'magic' is unknown"),
        (("--draft", "model"), "needs draft_model"),
        (("--host", "192.0.2.1"), "cannot listen on 192.0.2.1"),
    ],
)
def test_mistakes_end_it_with_two_and_a_line(options, words):
    server = Served(*options, TANDEM_API_KEY=KEY)
    assert server.process.wait(30) == 2
    time.sleep(0.1)
    assert words in "".join(server.err) and "Traceback" not in "".join(server.err)


def test_a_port_in_use_is_a_mistake():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = Served("--port", str(taken.getsockname()[1]))
        assert server.end() == 2 and "Address already in use" in "".join(server.err)


def test_ctrl_c_ends_it():
    assert Served().end(signal.SIGINT) == 0


def test_settings_of_drafts_and_scheduler_come_from_the_configuration():
    def config(**flags):
        return load_config(flags, {"XDG_CONFIG_HOME": "/nonexistent"})

    assert draft_settings(config(draft="off")) == NO_DRAFTS
    assert draft_settings(config()) == DraftSettings(SOURCES, 4)
    assert draft_settings(config(draft="ngram, mtp", draft_max="2", draft_fixed="true")) == DraftSettings(
        ("ngram", "mtp"), 2, False
    )
    with pytest.raises(SettingError):
        draft_settings(config(draft="model"))
    limits = worker_limits(
        config(max_sequences="3", max_queue="9", sleep_after="60", sleep_level="2", load_deadline_s="7")
    )
    assert (limits.max_sequences, limits.max_queue, limits.load_deadline_s) == (3, 9, 7.0)
    assert (limits.sleep.light_after_s, limits.sleep.deep_after_s) == (None, 60.0)
    assert worker_limits(config()).sleep.deep_after_s is None


@pytest.mark.parametrize(
    "model, path, name",
    [
        ("", "/x/pocket.gguf", "pocket"),
        ("/models/Qwen-Q4_K_M.gguf", "/models/Qwen-Q4_K_M.gguf", "Qwen-Q4_K_M"),
        ("m-00001-of-00003.gguf", "m-00001-of-00003.gguf", "m"),
        ("qwen3.5-35b", "/models/org/repo/Qwen3.5-35B-IQ4.gguf", "qwen3.5-35b"),
        ("odd-of-name.gguf", "odd-of-name.gguf", "odd-of-name"),
    ],
)
def test_the_id_of_a_model_is_its_name_never_its_path(model, path, name):
    assert name_of(model, Path(path)) == name
