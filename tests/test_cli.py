"""The commands: what goes to which stream, exit codes, and what Ctrl-C does."""

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from tiny_models import write_tiny

import tandem
from tandem.cli import breaker_ids, main
from tandem.requests import GenerationStats
from tandem.runtime.decode import DraftSettings
from tandem.runtime.sampling import PROFILES, Sampling
from tandem.show import Progress, count, printable, size, stats_line, table

TESTS = Path(__file__).parent


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return str(path)


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs the command line with a scripted engine: (exit code, stdout, stderr)."""

    def call(*args, engine=None, stdin=b""):
        if engine is not None:
            monkeypatch.setattr(tandem, "load", engine.load)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        with pytest.raises(SystemExit) as ended:
            main([str(arg) for arg in args])
        out = capsys.readouterr()
        return ended.value.code or 0, out.out, out.err

    return call


def test_run_streams_the_answer_to_stdout_and_the_speed_to_stderr(command, model):
    engine = FakeEngine([["Par", "is."]])
    code, out, err = command("run", model, "Capital of France?", "--ctx", 100, "--threads", 2, "--kv", "q8_0", engine=engine)
    assert (code, out) == (0, "Paris.\n")
    assert engine.calls[0].prompt == [{"role": "user", "content": "Capital of France?"}]
    assert engine.load_options == {
        "ctx": 100, "threads": 2, "kv": "q8_0", "drafts": DraftSettings(), "draft_model": None
    }
    assert "total 2 MiB" in err and err.index("total 2 MiB") < err.index("ready after")
    assert re.fullmatch(r"prompt 10 tokens at 20\.0 tok/s, answer 2 tokens at 0\.5 tok/s, "
                        r"first token after 0\.60 s, ended by eos", err.splitlines()[-1])
    assert engine.closed


def test_quiet_leaves_stderr_empty(command, model):
    assert command("run", model, "x", "-q", engine=FakeEngine([["y"]])) == (0, "y\n", "")


@pytest.mark.parametrize("args", [[], ["-"]])
def test_run_reads_the_prompt_from_stdin(command, model, args):
    engine = FakeEngine([["ok"]])
    assert command("run", model, *args, engine=engine, stdin="zwei\nZeilen é\n".encode())[0] == 0
    assert engine.calls[0].prompt[0]["content"] == "zwei\nZeilen é\n"


def test_run_raw_skips_the_template_and_keeps_tags(command, model):
    engine = FakeEngine([["<think>", " x"]])
    code, out, _ = command("run", model, "Once", "--raw", engine=engine)
    assert (code, out) == (0, "<think> x\n")
    assert engine.calls[0].prompt == "Once" and engine.calls[0].raw


def test_run_json_is_one_object_with_text_tokens_timings_and_reason(command, model):
    engine = FakeEngine([["hm\n", "</think>", "\n\nY", "es", {"stop": "length"}]], opening="<think>\n")
    code, out, _ = command("run", model, "x", "--json", "--seed", 5, engine=engine)
    result = json.loads(out)
    assert code == 0 and out.count("\n") == 1
    assert (result["text"], result["reasoning"], result["stop_reason"], result["seed"]) == ("Yes", "hm", "length", 5)
    assert result["tokens"] == {"prompt": 10, "reused": 0, "completion": 4} and len(result["token_ids"]) == 4
    assert result["timings"] == {"prefill_s": 0.5, "decode_s": 2.0, "first_token_s": 0.6, "prefill_tok_s": 20.0,
                                 "decode_tok_s": 1.5, "drafted": 0, "accepted": 0}


def test_reasoning_is_shown_between_tags_before_the_answer(command, model):
    engine = FakeEngine([["let me", " see\n", "</think>\n\n", "42"]], opening="<think>\n")
    assert command("run", model, "x", engine=engine)[1] == "<think>\nlet me see\n</think>\n\n42\n"
    engine = FakeEngine([["let me"]], opening="<think>\n")
    assert command("run", model, "x", engine=engine)[1] == "<think>\nlet me\n</think>\n"


def test_sampling_options_reach_the_engine(command, model):
    engine = FakeEngine([["y"]])
    code, _, _ = command(
        "run", model, "x", "--temperature", 0.3, "--top-k", 7, "--top-p", 0.9, "--min-p", 0.01, "--typical-p", 0.8,
        "--presence-penalty", 1, "--frequency-penalty", 0.5, "--repetition-penalty", 1.1, "--repetition-window", 64,
        "--dry-multiplier", 0.8, "--dry-base", 2, "--dry-allowed-length", 3, "--dry-window", 99, "--seed", 9,
        "--max-tokens", 12, "--stop", "A", "--stop", "B", "--logit-bias", "5=-inf", "--loop-guard", engine=engine)
    assert code == 0
    assert engine.calls[0].sampling == Sampling(
        temperature=0.3, top_k=7, top_p=0.9, min_p=0.01, typical_p=0.8, presence_penalty=1, frequency_penalty=0.5,
        repetition_penalty=1.1, repetition_window=64, dry_multiplier=0.8, dry_base=2, dry_allowed_length=3,
        dry_window=99, dry_breakers=sorted(b'\n:"*'), seed=9, max_tokens=12, stop=("A", "B"),
        logit_bias={5: float("-inf")}, loop_guard=True)


def test_the_template_decides_which_of_the_models_profiles_counts(command, model):
    for args, opening, profile in (([], "<think>\n", "thinking"), (["--no-think"], "<think>\n", "nonthinking"),
                                   (["--profile", "coding"], "", "coding"), ([], "", "thinking")):
        engine = FakeEngine([["y"]], opening=opening, metadata={"general.name": "Qwen3.5-9B"})
        command("run", model, "x", *args, engine=engine)
        assert engine.calls[0].sampling == Sampling(**PROFILES[f"qwen3.5-{profile}"])


@pytest.mark.parametrize("args, words", [
    (["run", "MODEL", "x", "--temprature", "1"], "--temperature"),
    (["rnu", "MODEL"], "did you mean 'run'"),
    (["run", "MODEL", "x", "--top-p", "3"], "top_p: got 3.0, expected a number from 0 to 1"),
    (["run", "MODEL", "x", "--top-k", "many"], "--top-k"),
    (["run", "MODEL", "x", "--profile", "codin"], "did you mean 'coding'"),
    (["run", "MODEL", "x", "--logit-bias", "7"], "ID=BIAS"),
    (["run", "MODEL", "x", "--dry-breaker", "a"], "--dry-multiplier"),
    (["run", "MODEL", "x", "--raw", "--system", "s"], "leave out --raw"),
    (["run", "MODEL", " "], "prompt is empty"),
    (["run", "nothere.gguf", "x"], "nothere.gguf is not there"),
    (["run", "MODEL/..", "x"], "MODEL is a .gguf file"),
    (["bench", "MODEL", "--depths", "0,x"], "list of token counts"),
    (["info", "MODEL", "more"], "more"),
])
def test_a_mistake_is_one_clear_error_and_exit_code_2(command, model, args, words):
    args = [arg.replace("MODEL/..", str(Path(model).parent)).replace("MODEL", model) for arg in args]
    code, out, err = command(*args, engine=FakeEngine([["never"]]))
    assert (code, out) == (2, "")
    assert words in err and "Traceback" not in err


def test_a_misspelt_model_file_names_the_one_beside_it(command, model):
    assert "did you mean 'model.gguf'" in command("run", Path(model).with_name("modle.gguf"), "x")[2]


def test_a_file_that_is_no_model_is_an_error_without_a_traceback(command, model):
    for name in ("run", "info", "chat", "bench"):
        code, out, err = command(name, model, *(["x"] if name == "run" else []))
        assert (code, out) == (2, "") and "Traceback" not in err and "tandem: " in err


def test_stdin_that_is_not_utf8_is_refused(command, model):
    code, _, err = command("run", model, engine=FakeEngine([["x"]]), stdin=b"caf\xe9")
    assert code == 2 and "not UTF-8 at byte 3" in err
    code, _, err = command("run", model, "caf\udce9", engine=FakeEngine([["x"]]))
    assert code == 2 and "not valid UTF-8 at character 3" in err


def test_version_and_help_answer_without_loading_anything():
    for args, words in ((["--version"], tandem.__version__), (["--help"], "bench"), (["chat", "-h"], "--no-loop-guard")):
        done = subprocess.run([sys.executable, "-X", "importtime", "-m", "tandem", *args], capture_output=True, text=True)
        assert done.returncode == 0 and words in done.stdout
        assert " numpy" not in done.stderr and " prompt_toolkit" not in done.stderr


def test_chat_from_a_pipe_answers_each_line_and_remembers(command, model):
    engine = FakeEngine([["One"], ["why\n</think>\nTwo"], ["Three"]], opening="")
    engine.answers[1] = ["<think>why\n", "</think>\nTwo"]
    code, out, err = command("chat", model, "--system", "Be brief.", engine=engine, stdin=b"a\n\nb\nc\n")
    assert code == 0
    assert out == "One\n<think>\nwhy\n</think>\n\nTwo\nThree\n"
    assert err.count("ended by eos") == 3
    assert engine.calls[2].prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "One"},
        {"role": "user", "content": "b"}, {"role": "assistant", "content": "Two", "reasoning_content": "why"},
        {"role": "user", "content": "c"},
    ]


def test_chat_guards_against_loops_unless_told_not_to(command, model):
    for args, guarded in (([], True), (["--no-loop-guard"], False)):
        engine = FakeEngine([["x", {"stop": "loop"}]])
        code, _, err = command("chat", model, *args, engine=engine, stdin=b"a\n")
        assert code == 0 and engine.calls[0].sampling.loop_guard is guarded
        assert "begun to repeat itself" in err


def test_chat_commands_change_the_conversation(command, model, tmp_path):
    engine = FakeEngine([[str(n)] for n in range(6)])
    saved = tmp_path / "talk.json"
    lines = f"a\n/system S\nb\n/undo\n/retry\n//x\n/save {saved}\n/clear\n/think off\nc\n/load {saved}\nd\n/quit\nnever\n"
    code, out, _ = command("chat", model, engine=engine, stdin=lines.encode())
    assert (code, out) == (0, "0\n1\n2\n3\n4\n5\n")
    told = [[(m["role"][0], m["content"]) for m in call.prompt] for call in engine.calls]
    assert told[1] == [("s", "S"), ("u", "a"), ("a", "0"), ("u", "b")]
    assert told[2] == [("s", "S"), ("u", "a")]
    assert told[3] == [("s", "S"), ("u", "a"), ("a", "2"), ("u", "/x")]
    assert told[4] == [("s", "S"), ("u", "c")] and engine.calls[4].options == {"enable_thinking": False}
    assert told[5] == [("s", "S"), ("u", "a"), ("a", "2"), ("u", "/x"), ("a", "3"), ("u", "d")]
    assert json.loads(saved.read_text())["messages"][-1] == {"role": "assistant", "content": "3"}


@pytest.mark.parametrize("line, words", [
    ("/hlep", "did you mean '/help'"),
    ("/think maybe", "on or off"),
    ("/save", "expected a file name"),
    ("/save /nowhere/x", "No such file"),
    ("/load /nowhere/x", "No such file"),
    ("/retry", "no question yet"),
    ("/undo", "no question yet"),
])
def test_a_wrong_chat_command_is_said_and_the_chat_goes_on(command, model, line, words):
    engine = FakeEngine([["still here"]])
    code, out, err = command("chat", model, engine=engine, stdin=f"{line}\nhello\n".encode())
    assert (code, out) == (2, "still here\n") and words in err


def test_save_never_overwrites_and_load_refuses_other_files(command, model, tmp_path):
    other = tmp_path / "other.json"
    other.write_text('{"messages": [{"role": "tool", "content": "x"}]}')
    _, _, err = command("chat", model, engine=FakeEngine([]), stdin=f"/save {other}\n/load {other}\n".encode())
    assert "File exists" in err and "message 0 is not a message of" in err
    assert "tool" in other.read_text()


def test_a_question_that_cannot_be_answered_is_forgotten(command, model):
    engine = FakeEngine([{"error": "the prompt has 9 tokens"}, ["fine"]])
    code, out, err = command("chat", model, engine=engine, stdin=b"long\nshort\n")
    assert (code, out) == (2, "fine\n") and "the prompt has 9 tokens" in err
    assert engine.calls[1].prompt == [{"role": "user", "content": "short"}]


def test_a_closed_pipe_ends_quietly(model):
    script = Path(model).with_suffix(".json")
    script.write_text(json.dumps({"answers": [["x" * 1000 + "\n"] * 2000]}))
    line = f"{sys.executable} {TESTS / 'fake_engine.py'} {script} run -q {model} hi | head -c 10"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {line}"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "x" * 10, "")


@pytest.fixture(scope="module", params=["llama", "qwen35moe"])
def tiny(request, tmp_path_factory):
    return write_tiny(request.param, tmp_path_factory.mktemp("tiny") / f"{request.param}.gguf", "Q8_0", seed=3)


def test_run_and_chat_work_on_a_real_file(command, tiny):
    args = [tiny, "--ctx", 200, "--threads", 1, "--temperature", 0, "--max-tokens", 8, "--no-loop-guard"]
    code, out, err = command("run", *args, "--json", "hello")
    first = json.loads(out)
    assert code == 0 and len(first["token_ids"]) == first["tokens"]["completion"] <= 8
    assert first["model"].startswith("tiny") and first["timings"]["first_token_s"] > 0
    assert "weights" in err and "total" in err and "ended by" in err
    code, out, err = command("chat", *args, stdin=b"hello\nand more\n")
    assert code == 0 and out.startswith(first["text"].rstrip("\n"))
    assert len(re.findall("ended by", err)) == 2 and " reused)" in err


def test_bench_ends_with_one_json_object(command, tiny):
    code, out, _ = command("bench", tiny, "--prefill", 20, "--depths", "0,30", "--decode", 3, "--repeats", 2, "--threads", 1)
    result = json.loads(out.splitlines()[-1])
    assert code == 0 and [row["depth"] for row in result["depths"]] == [0, 30]
    assert {"model", "device", "threads", "depth", "prefill_tok_s", "decode_tok_s", "bytes_per_token", "ram_read_gb_s",
            "share_of_ram_bandwidth", "version"} <= set(result)


def test_info_tells_sizes_by_role_and_memory_by_context(command, tiny):
    code, out, err = command("info", tiny, "--json")
    told = json.loads(out)
    assert (code, err) == (0, "")
    assert told["file_bytes"] == Path(tiny).stat().st_size
    assert sum(role["n_params"] for role in told["roles"]) == told["n_params"]
    assert all(sum(role["formats"].values()) == role["size_bytes"] for role in told["roles"])
    needs = told["memory_bytes"]["f16"]
    assert list(needs) == ["512"] and needs["512"] > told["memory_bytes"]["q8_0"]["512"] > sum(
        role["size_bytes"] for role in told["roles"])
    code, text, _ = command("info", tiny)
    assert code == 0 and told["architecture"] in text and "Q8_0" in text and "each token takes f16" in text


class Terminal:
    """A program in a pseudo-terminal: `send` types, `until` reads on until a text appears."""

    def __init__(self, args):
        self.process, self.end = pty.fork()
        if self.process == 0:
            # no cursor position requests: nothing here would answer them
            environment = os.environ | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
            os.execve(sys.executable, [sys.executable, *args], environment)
        self.shown = ""

    def send(self, text):
        os.write(self.end, text.encode())

    def until(self, text, timeout_s=30):
        """What was shown since the last call, up to and with the text."""
        limit = time.monotonic() + timeout_s
        while text not in self.shown:
            ready, _, _ = select.select([self.end], [], [], max(0, limit - time.monotonic()))
            assert ready, f"{text!r} did not come, only {self.shown!r}"
            self.shown += os.read(self.end, 65536).decode(errors="replace")
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def exit_code(self):
        while select.select([self.end], [], [], 30)[0]:
            try:
                if not os.read(self.end, 65536):
                    break
            except OSError:
                break
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])


def _terminal(model, command, **script):
    path = Path(model).with_suffix(".json")
    path.write_text(json.dumps(script))
    return Terminal([str(TESTS / "fake_engine.py"), str(path), *command])


def test_ctrl_c_stops_the_answer_and_not_the_chat(model):
    many = [f"w{n} " for n in range(2000)]
    terminal = _terminal(model, ["chat", model], answers=[many, ["<think>dim", "</think>bright"]], delay_s=0.01)
    terminal.until("/help lists")
    terminal.until(">")
    terminal.send("count\r")
    terminal.until("w20 ")
    terminal.send("\x03")
    terminal.until("ended by cancelled")
    terminal.until(">")
    terminal.send("/help\r")
    terminal.until("/undo")
    terminal.send("again\r")
    terminal.until("\x1b[2m<think>")
    assert "\x1b[0m" in terminal.until("bright")
    terminal.until("ended by eos")
    terminal.until(">")
    terminal.send("\x03")
    terminal.send("\x04")
    assert terminal.exit_code() == 0


def test_ctrl_c_in_run_keeps_the_text_so_far_and_exits_130(model):
    script = Path(model).with_suffix(".json")
    script.write_text(json.dumps({"answers": [["w "] * 5000], "delay_s": 0.01}))
    args = [sys.executable, str(TESTS / "fake_engine.py"), str(script), "run", model, "x"]
    process = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    assert process.stdout.read(2) == b"w "
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and set((b"w " + out).split()) == {b"w"} and out.endswith(b"\n")
    assert b"ended by cancelled" in err


def test_a_models_words_cannot_command_the_terminal(model):
    terminal = _terminal(model, ["run", "-q", model, "x"], answers=[["a\x1b[2Jb\x07c\x9bd\te"]])
    assert "a\ufffd[2Jb\ufffdc\ufffdd\te".split("\t")[0] in terminal.until("e\r\n").replace("        ", "\t")
    assert terminal.exit_code() == 0
    assert printable("ä\n\t\r\x00") == "ä\n\t\ufffd\ufffd"


def test_progress_shows_long_work_on_a_terminal_and_removes_itself():
    class Stream(io.StringIO):
        def isatty(self):
            return True

    quick, slow, stream = io.StringIO(), Stream(), Stream()
    for done in range(1, 101):
        Progress("p", quick)(done, 100)
    assert quick.getvalue() == ""
    progress = Progress("reading", slow, patience_s=0.0)
    progress(10, 100)
    assert "reading: 10 of 100 tokens" in slow.getvalue()
    progress(100, 100)
    assert slow.getvalue().endswith("\r\x1b[K")
    Progress("reading", stream, patience_s=60)(10, 100)
    assert stream.getvalue() == ""


def test_figures_are_worded_as_stated():
    assert [size(n) for n in (0, 1023, 1024, 1536 << 20, 19 << 30)] == ["0 B", "1023 B", "1.0 KiB", "1.50 GiB", "19.00 GiB"]
    assert [count(n) for n in (999, 135_000_000, 35_100_000_000)] == ["999", "135 M", "35.1 B"]
    assert table([("a", "1", "x"), ("long", "22", "")]) == ["a      1  x", "long  22"]
    assert "(7 reused)" in stats_line(GenerationStats(9, 7, 3, 1.0, 1.0, 1.0, "eos"))


def test_breakers_are_all_tokens_that_hold_one():
    class Tokenizer:
        vocab_size = 4

        def token_bytes(self, token):
            return [b"a", b"\n\n", b"x:", "\u00e9".encode()][token]

    assert breaker_ids(Tokenizer(), ("\n", ":", "\u00e9")) == (1, 2, 3)
