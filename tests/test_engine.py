"""The engine on tiny random models: reuse equals recomputing, steps agree with each other, errors come before work."""

import threading
import time

import numpy as np
import pytest
from tiny_models import write_tiny

import tandem
from tandem.errors import EngineError, FormatError, PlanError, RequestError, SettingError
from tandem.machine import Machine
from tandem.runtime.plan import describe, make_plan
from tandem.runtime.session import Checkpoint, Session

ARCHITECTURES = ("llama", "qwen3", "gemma3", "qwen35", "qwen35moe")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def engine(request, tmp_path_factory):
    path = write_tiny(request.param, tmp_path_factory.mktemp("models") / f"{request.param}.gguf", "Q8_0", seed=3)
    with tandem.load(path, ctx=300, threads=2) as loaded:
        yield loaded


def ids(engine, n, seed=0):
    return np.random.default_rng(seed).integers(0, engine.vocab_size, n).tolist()


def close(a, b, bound):
    """Whether the relative RMS error of a against b is below bound."""
    return np.sqrt(np.mean((a - b) ** 2) / np.mean(np.square(b))) < bound


def test_rows_run_together_have_the_bits_of_rows_run_alone(engine):
    tokens, session = ids(engine, 24), engine.session
    session.clear()
    alone = np.stack([session.append(t) for t in tokens])
    for rows in (2, 3, 5, 8):
        session.clear()
        together = []
        for at in range(0, len(tokens), rows):
            part = tokens[at : at + rows]
            session.advance(part)
            together.append(engine.runner.logits(range(len(part))).copy())
        np.testing.assert_array_equal(np.concatenate(together), alone)


def test_prefill_agrees_with_decode(engine):
    tokens, session = ids(engine, 70), engine.session
    session.clear()
    decoded = np.stack([session.append(t) for t in tokens])
    assert close(engine.logits(tokens), decoded, 2e-2)


def test_a_reused_prefix_gives_what_a_fresh_timeline_gives(engine):
    first, session = ids(engine, 90), engine.session
    session.clear()
    session.sync(first, borders=(40,))
    second = first[:60] + ids(engine, 30, seed=1)
    warm, reused = session.sync(second, borders=(40,))
    assert reused in (40, 60) or session.recurrent and reused == 40
    session.clear()
    cold, none = session.sync(second, borders=(40, reused))
    assert none == 0
    np.testing.assert_array_equal(warm, cold)


def test_the_same_prompt_again_is_nearly_free(engine):
    tokens, session = ids(engine, 80), engine.session
    session.clear()
    before, _ = session.sync(tokens, borders=(79,))
    after, reused = session.sync(tokens, borders=(79,))
    assert reused == 79
    np.testing.assert_array_equal(before, after)


def test_generation_continues_its_own_answer_without_recomputing(engine):
    prompt = ids(engine, 30)
    answer = engine.generate(prompt, temperature=0.0, max_tokens=10)
    answer.text()
    longer = prompt + answer.token_ids
    more = engine.generate(longer, temperature=0.0, max_tokens=5)
    more.text()
    assert more.stats.reused_tokens >= len(longer) - 1
    engine.session.clear()
    fresh = engine.generate(longer, temperature=0.0, max_tokens=5)
    fresh.text()
    assert fresh.stats.reused_tokens == 0


def test_threads_do_not_change_the_output(engine):
    tokens = ids(engine, 40)
    expected = engine.logits(tokens)
    path = engine.file.paths[0]
    for threads in (1, 3):
        with tandem.load(path, ctx=300, threads=threads) as other:
            np.testing.assert_array_equal(other.logits(tokens), expected)


def test_q8_0_cache_stays_close_to_f16(engine):
    tokens = ids(engine, 40)
    with tandem.load(engine.file.paths[0], ctx=300, threads=1, kv="q8_0") as other:
        assert close(other.logits(tokens), engine.logits(tokens), 5e-2)


def test_cancel_ends_an_answer_within_one_token(engine):
    answer = engine.generate(ids(engine, 10), temperature=0.0, max_tokens=100, loop_guard=False)
    next(answer._pieces, None)
    answer.cancel()
    answer.text()
    assert answer.stats.stop_reason in ("cancelled", "eos")
    assert answer.stats.completion_tokens < 50


def test_cancel_during_prefill_leaves_a_usable_session(engine):
    tokens, session = ids(engine, 120), engine.session
    session.clear()
    calls = iter([False, True])
    session.runner.max_rows, keep = 50, session.runner.max_rows
    try:
        logits, _ = session.sync(tokens, cancelled=lambda: next(calls))
        assert logits is None and session.tokens == tokens[:50]
        logits, reused = session.sync(tokens)
        assert reused == 50 and np.isfinite(logits).all()
    finally:
        session.runner.max_rows = keep


def test_an_interrupted_step_is_not_trusted_afterwards(engine, monkeypatch):
    tokens, session = ids(engine, 50), engine.session
    session.clear()
    expected, _ = session.sync(tokens)
    run = session.runner.run

    def interrupted(*args):
        run(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(session.runner, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.append(1)
    monkeypatch.undo()
    again, reused = session.sync(tokens)
    assert reused == 0
    np.testing.assert_array_equal(again, expected)


def test_the_context_is_never_overrun(engine):
    with pytest.raises(RequestError, match="300"):
        engine.generate(ids(engine, 301))
    answer = engine.generate(ids(engine, 290), temperature=1.0, seed=1, loop_guard=False, logit_bias={i: -1e9 for i in engine.tokenizer.eog_ids})
    answer.text()
    assert answer.stats.stop_reason == "context"
    assert answer.stats.prompt_tokens + answer.stats.completion_tokens <= 301
    with pytest.raises(RequestError, match="full"):
        for token in ids(engine, 20):
            engine.session.append(token)


def test_bad_requests_are_refused_before_any_work(engine):
    engine.session.clear()
    for bad in ([], [-1], [engine.vocab_size]):
        with pytest.raises(RequestError):
            engine.generate(bad).text()
    with pytest.raises(SettingError, match="temperature"):
        engine.generate([1], temprature=1.0)
    with pytest.raises(SettingError):
        engine.generate([1], temperature=-1.0)
    assert engine.session.tokens == []


def test_a_context_that_does_not_fit_names_the_largest_that_would(tmp_path):
    path = write_tiny("llama", tmp_path / "m.gguf")
    summary = describe(path)
    small = Machine("test", 1, 1 << 30, 300 << 20)
    with pytest.raises(PlanError, match=r"largest context that fits is (\d+)") as refused:
        make_plan(summary, small, ctx=1 << 20, kv="f16", threads=1, scratch_bytes=1000)
    largest = int(str(refused.value).rsplit(" ", 1)[1])
    fits = make_plan(summary, small, ctx=largest, kv="f16", threads=1, scratch_bytes=1000)
    assert fits.total_bytes <= small.free_bytes
    with pytest.raises(PlanError):
        make_plan(summary, small, ctx=largest + 64, kv="f16", threads=1, scratch_bytes=1000)
    assert make_plan(summary, small, ctx=None, kv="f16", threads=1, scratch_bytes=1000).ctx <= largest


def test_a_closed_engine_leaves_no_threads_and_says_so(tmp_path):
    path = write_tiny("llama", tmp_path / "m.gguf")
    before = threading.active_count(), native_threads()
    loaded = tandem.load(path, threads=3)
    assert native_threads() == before[1] + 2
    loaded.close()
    loaded.close()
    assert (threading.active_count(), native_threads()) == before
    with pytest.raises(RequestError, match="closed"):
        loaded.generate([1])


def native_threads():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))


def test_unknown_options_name_the_valid_ones(tmp_path):
    path = write_tiny("llama", tmp_path / "m.gguf")
    for bad in ({"kv": "f17"}, {"device": "cuda"}, {"ctx": 0}, {"threads": -1}):
        with pytest.raises(SettingError):
            tandem.load(path, **bad)
    with pytest.raises(FormatError):
        tandem.load(tmp_path / "absent.gguf")


class FakeState:
    """Recurrent state that is just the number of tokens seen."""

    recurrent = True

    def __init__(self):
        self.seen = 0

    def reset(self):
        self.seen = 0

    def snapshot(self):
        return np.array(self.seen)

    def restore(self, saved):
        self.seen = int(saved)

    def can_cut(self, length, to):
        return True


class FakeRunner:
    """Counts what it is asked to run."""

    max_rows, native = 64, None

    def __init__(self):
        self.ran = 0

    def run(self, parts):
        for part in parts:
            assert part.state.seen == part.start_pos
            part.state.seen += len(part.tokens)
            self.ran += len(part.tokens)

    def hidden(self):
        raise AssertionError("nothing follows")

    def logits(self, rows):
        return np.zeros((len(rows), 4), np.float32)


def fake_session(monkeypatch, max_checkpoints=4):
    monkeypatch.setattr("tandem.runtime.session.CpuState", lambda *args, **kwargs: FakeState())
    return Session(FakeRunner(), (), 100_000, "f16", max_checkpoints)


def test_checkpoints_stay_within_their_number_and_keep_the_newest(monkeypatch):
    session = fake_session(monkeypatch)
    borders = list(range(100, 3000, 100))
    session.sync(list(range(3000)), borders)
    kept = [c.length for c in session.checkpoints]
    assert len(kept) == 4 and kept[-1] == 3000 and kept == sorted(kept)
    assert all(isinstance(c, Checkpoint) for c in session.checkpoints)


def test_a_rewind_runs_only_what_follows_the_checkpoint(monkeypatch):
    session = fake_session(monkeypatch)
    tokens = list(range(1000))
    session.sync(tokens, borders=(600,))
    session.runner.ran = 0
    _, reused = session.sync(tokens[:700] + [5] * 50, borders=(600,))
    assert reused == 600 and session.runner.ran == 150


def test_closing_while_another_thread_generates_is_an_error_there_and_no_crash(tmp_path):
    path = write_tiny("qwen35moe", tmp_path / "m.gguf", "Q8_0", seed=3)
    for delay_s in np.linspace(0.005, 0.02, 10):
        engine = tandem.load(path, ctx=300, threads=2)
        failed = []

        def write(engine=engine, failed=failed):
            session = engine.session
            try:
                while True:
                    session.clear()
                    session.sync(list(range(290)))
            except Exception as error:
                failed.append(error)

        writer = threading.Thread(target=write)
        writer.start()
        time.sleep(delay_s)
        engine.close()
        writer.join(20)
        assert not writer.is_alive() and isinstance(failed[0], EngineError)
