"""`tandem bench mtp`: figures from hand-made runs, real runs on a tiny model, and what is said when text differs."""

import io
import json
import sys

import pytest
from tiny_models import write_tiny

from tandem.bench import mtp, plot
from tandem.bench.mtp import MtpSettings, Run, lines, measure, pooled, summary
from tandem.bench.tasks import TASKS, chosen, encode
from tandem.cli import main
from tandem.engine import Engine
from tandem.errors import RequestError, SettingError
from tandem.runtime.decode import MAX_DRAFTS, NO_DRAFTS


def run(tokens, decode_s, *, rounds=1, drafted=(), accepted=(), texts=((1, 2),), **parts):
    fill = lambda counts: [*counts, *[0] * (MAX_DRAFTS - len(counts))]  # noqa: E731
    return Run(tokens, decode_s, rounds, fill(drafted), fill(accepted), texts=[list(t) for t in texts], **parts)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(write_tiny("qwen35moe", tmp_path_factory.mktemp("mtp") / "tiny.gguf", "Q8_0", mtp=True))


@pytest.fixture(scope="module")
def engine(tiny):
    with Engine.load(tiny, ctx=512, threads=1, drafts=mtp.loading(MtpSettings())) as engine:
        yield engine


@pytest.fixture(scope="module")
def measured(engine):
    settings = MtpSettings(tasks=("chat", "story"), drafts=(1, 3), tokens=12, repeats=2, ignore_eos=True)
    told = []
    results = measure(engine, settings, lambda task, runs: told.append(task))
    assert told == ["chat", "story"]
    return settings, results


def test_figures_are_those_of_hand_made_runs():
    off = [run(10, 1.0), run(10, 2.0), run(10, 4.0)]
    two = [run(10, 0.5, rounds=4, drafted=(4, 4), accepted=(3, 2), draft_s=0.1, verify_s=0.3, host_s=0.04),
           run(10, 2.5, rounds=5, drafted=(5, 5), accepted=(3, 1)),
           run(10, 2.0, rounds=1, drafted=(1, 1), accepted=(1, 1))]
    told = summary({"off": off, "2": two, "auto": off})
    assert told["acceptance_by_position"] == [0.7, 0.4] and told["same_text"]
    figures = told["ways"]["2"]
    assert figures["ratios"] == [2.0, 0.8, 2.0] and figures["ratio"] == 2.0 and figures["tok_s"] == 5.0
    assert figures["tokens_per_round"] == 3.0 and figures["acceptance"] == 0.55
    assert (figures["draft_ms"], figures["verify_ms"], figures["host_ms"]) == (10.0, 30.0, 4.0)
    assert told["ways"]["off"]["ratio"] == 1.0 and told["ways"]["off"]["acceptance"] is None


def test_all_tasks_together_are_sums_of_each_repeat():
    first = {"off": [run(10, 1.0), run(10, 1.0)], "auto": [run(10, 1.0), run(10, 0.5)]}
    second = {"off": [run(30, 1.0), run(30, 3.0)], "auto": [run(30, 1.0), run(30, 1.5)]}
    together = pooled({"a": first, "b": second})
    assert [(r.tokens, r.decode_s) for r in together["off"]] == [(40, 2.0), (40, 4.0)]
    assert summary(together)["ways"]["auto"]["ratios"] == [1.0, 2.0]
    assert len(together["off"][0].texts) == 2


def report_of(**tasks):
    return {"tasks": {name: summary(runs) for name, runs in tasks.items()}, "all": summary(pooled(tasks))}


def test_text_that_differs_in_one_repeat_of_one_way_is_said():
    good = {"off": [run(10, 1.0)] * 2, "auto": [run(10, 1.0)] * 2}
    bad = {"off": [run(10, 1.0)] * 2, "auto": [run(10, 1.0), run(10, 1.0, texts=((1, 3),))]}
    shown = lines(report_of(code=good, story=bad))
    assert "text with drafts = text without: NOT in story" in shown
    assert [line.split()[-1] for line in shown[1:4]] == ["same", "DIFFERS", "DIFFERS"]
    assert "text with drafts = text without: yes, all 1 answers" in lines(report_of(code=good))


def test_a_task_that_drafts_slow_down_is_named():
    runs = {"off": [run(1000, 1.0)], "auto": [run(1000, 1.021)]}
    assert "auto more than 2% slower than off: code (0.979)" in lines(report_of(code=runs))
    runs["auto"] = [run(1000, 1.019)]
    assert "auto more than 2% slower than off: nowhere" in lines(report_of(code=runs))


def test_every_way_writes_the_same_greedy_text_of_the_asked_length(measured):
    settings, results = measured
    for task, runs in results.items():
        assert list(runs) == ["off", "1", "3", "ngram", "auto"]
        assert [[len(text) for text in r.texts] for way in runs.values() for r in way] == (
            [[settings.tokens] * len(TASKS[task])] * 2 * len(runs))
        assert summary(runs)["same_text"]


def test_counts_fit_together(measured):
    for runs in measured[1].values():
        for way, repeats in runs.items():
            for r in repeats:
                answers = len(r.texts)
                # each round of a pass gives the token after its accepted drafts; the first token needs no round
                assert r.rounds + sum(r.accepted) == r.tokens == answers * 11
                assert all(a <= d for a, d in zip(r.accepted, r.drafted, strict=True))
                assert r.accepted[1:] <= r.accepted[:-1] or way == "ngram"
                parts = r.draft_s + r.verify_s + r.host_s
                assert 0 < parts < r.decode_s
        assert sum(runs["off"][0].drafted) == 0
        assert runs["1"][0].drafted[0] > 0 and runs["1"][0].drafted[1:] == [0] * (MAX_DRAFTS - 1)
        assert runs["3"][0].drafted[2] > 0 == runs["3"][0].drafted[3]


def test_what_runs_without_the_mtp_block_does_not_feed_it(engine):
    by_name = {way.name: way for way in mtp.ways(engine, (2,))}
    assert by_name["off"].drafts == NO_DRAFTS and by_name["off"].session.mtp is None
    assert by_name["ngram"].session.mtp is None and by_name["2"].session.mtp is not None
    assert by_name["2"].drafts.sources == ("mtp",) and not by_name["2"].drafts.adaptive


def test_a_run_knows_costs_but_no_acceptance(engine):
    way = mtp.ways(engine, (1,))[-1]
    used = way.history()
    used.acceptance["mtp"].tell(1, 0)
    used.costs.tell(1, 0.1, 0, 0.0)
    fresh = way.history()
    assert fresh.costs.round_s(1, 0) == 0.1 and fresh.guard is used.guard and fresh.acceptance["mtp"].rates[0] == pytest.approx(0.7)


def test_every_task_has_prompts_of_its_kind(engine):
    assert len(TASKS) == 9 and all(2 <= len(prompts) <= 3 for prompts in TASKS.values())
    prompts = [prompt for each in TASKS.values() for prompt in each]
    assert all(prompt.tools for prompt in TASKS["tool call"]) and any(prompt.thinking for prompt in prompts)
    encoded = [tuple(encode(prompt, engine.template, engine.tokenizer)) for prompt in prompts]
    assert len(set(encoded)) == len(prompts)


def test_tasks_and_numbers_that_do_not_exist_are_refused():
    assert chosen("story, tool-call,story") == ["story", "tool call"] and chosen(None) == list(TASKS)
    with pytest.raises(SettingError, match="did you mean 'story'"):
        chosen("code,stroy")
    for drafts in ((0,), (MAX_DRAFTS + 1,)):
        with pytest.raises(SettingError, match=f"1 to {MAX_DRAFTS}"):
            MtpSettings(drafts=drafts)


def test_a_context_that_is_too_small_is_an_error_before_anything_runs(engine):
    with pytest.raises(RequestError, match=r"--ctx \d+ or fewer --tokens"):
        measure(engine, MtpSettings(tasks=("chat",), tokens=500), lambda *_: None)


def call(monkeypatch, capsys, *args):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    with pytest.raises(SystemExit) as ended:
        main([str(arg) for arg in args])
    out = capsys.readouterr()
    return ended.value.code or 0, out.out, out.err


def test_the_command_ends_with_json_or_writes_it(monkeypatch, capsys, tiny, tmp_path):
    args = ("bench", "mtp", tiny, "-q", "--tasks", "chat", "--drafts", 1, "--tokens", 5, "--repeats", 1, "--threads", 1,
            "--ctx", 512, "--ignore-eos")
    code, out, err = call(monkeypatch, capsys, *args)
    told = json.loads(out.splitlines()[-1])
    assert (code, err) == (0, "") and list(told["tasks"]) == ["chat"]
    assert out.startswith("task") and told["all"]["same_text"]
    assert list(told["all"]["ways"]) == ["off", "1", "ngram", "auto"]
    file = tmp_path / "told.json"
    code, out, _ = call(monkeypatch, capsys, *args, "--json", file)
    assert code == 0 and "{" not in out and json.loads(file.read_text())["tokens"] == 5


@pytest.mark.parametrize("args, words", [
    (["mpt"], "did you mean 'mtp'"),
    (["mtp", "nothere.gguf"], "nothere.gguf is not there"),
    (["mtp", "--tasks", "cod"], "did you mean 'code'"),
    (["mtp", "--drafts", "1,x"], "list of token counts"),
    (["mtp", "--drafts", "9"], "1 to 7"),
    (["mtp", "--json", "no/such/folder/x.json"], "folder that exists"),
    (["mtp", "--plot", "x.doc"], ".png"),
])
def test_mistakes_are_refused_before_a_model_is_loaded(monkeypatch, capsys, args, words):
    monkeypatch.setattr("tandem.load", lambda *_, **__: pytest.fail("loaded"))
    code, out, err = call(monkeypatch, capsys, "bench", *args)
    assert (code, out) == (2, "") and words in err and "Traceback" not in err


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SettingError, match="pip install matplotlib"):
        plot.require(str(tmp_path / "x.png"))


def test_the_plot_is_a_picture(measured, engine, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "x.png"
    plot.draw(mtp.report(engine, *measured), str(file))
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 10_000
