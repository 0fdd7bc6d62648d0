"""Conversations that survive a restart: they come back with the same bits, and no file, however broken, does harm."""

import logging
import os
import random
import stat
import time

import numpy as np
import pytest

import tandem
from tandem.gguf import read_gguf
from tandem.runtime.session_pool import SessionPool
from tandem.runtime.session_store import STALE_S, SessionStore, model_fingerprint

MODEL, OTHER = bytes(range(32)), bytes(32)


@pytest.fixture(scope="module")
def engine():
    with tandem.load(ctx=1500, threads=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def texts(engine):
    rng = np.random.default_rng(11)
    return [rng.integers(10, engine.vocab_size, 700).tolist() for _ in range(4)]


def conversation(engine, text, borders=(100, 200)):
    session = engine.new_session()
    session.sync(text[:300], borders)
    for token in text[300:310]:
        session.append(token)
    return session


@pytest.fixture
def session(engine, texts):
    return conversation(engine, texts[0])


def files(folder):
    return sorted(folder.iterdir())


def warnings_in(caplog):
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_saved_conversation_goes_on_with_the_same_bits(engine, texts, session, tmp_path):
    assert SessionStore(tmp_path / "new", MODEL).save_all([session]) == 1
    (loaded,) = SessionStore(tmp_path / "new", MODEL).load_all(engine.new_session, 5)
    assert loaded.tokens == session.tokens
    assert [c.length for c in loaded.checkpoints] == [100, 200, 300]
    for prompt in ([*texts[0][:310], *texts[1][:40]], [*texts[0][:250], *texts[1][40:90]]):
        (ours, reused), (theirs, their_reused) = (s.sync(prompt) for s in (session, loaded))
        assert reused == their_reused == (310 if len(prompt) == 350 else 200)
        assert np.array_equal(ours, theirs)
        for token in texts[2][:12]:
            assert np.array_equal(session.append(token), loaded.append(token))
        if session.mtp:
            drafts = [engine.drafter.draft([(s.mtp, 9, 3)]) for s in (session, loaded)]
            assert drafts[0] == drafts[1]
    assert np.array_equal(session.state.snapshot(), loaded.state.snapshot())


def test_a_pool_goes_on_after_a_restart(engine, texts, tmp_path):
    pool = SessionPool(engine.new_session, 3)
    for text in texts[:3]:
        session, _ = pool.acquire(text[:200])
        session.sync(text[:200])
        pool.release(session)
    SessionStore(tmp_path, MODEL).save_all(pool.idle_sessions)
    again = SessionPool(engine.new_session, 3)
    for session in SessionStore(tmp_path, MODEL).load_all(engine.new_session, again.max_sessions):
        again.add(session)
    for text in reversed(texts[:3]):
        session, report = again.acquire(text[:260])
        assert (report.origin, report.reused) == ("continued", 200)
        again.release(session)
    assert [s.tokens[0] for s in pool.idle_sessions] == [text[0] for text in texts[:3]]  # the order of use is kept


def test_files_are_private_and_appear_whole(session, tmp_path):
    before = os.umask(0)
    try:
        SessionStore(tmp_path / "new", MODEL).save_all([session])
    finally:
        os.umask(before)
    (path,) = files(tmp_path / "new")
    assert path.suffix == ".conversation"
    assert [stat.S_IMODE(p.stat().st_mode) for p in (path, path.parent)] == [0o600, 0o700]


def test_a_conversation_that_went_on_replaces_its_file_and_others_stay(engine, session, texts, tmp_path):
    other = conversation(engine, texts[1])
    SessionStore(tmp_path, OTHER).save_all([other])
    store = SessionStore(tmp_path, MODEL)
    store.save_all([session, other])
    before = {path.name: path.stat().st_ino for path in files(tmp_path)}
    session.append(5)
    store.save_all([other, session])
    after = {path.name: path.stat().st_ino for path in files(tmp_path)}
    assert len(before) == len(after) == 3
    unchanged = before.items() & after.items()
    assert len(unchanged) == 2  # the other model's, and the one that did not move on is not written again
    loaded = SessionStore(tmp_path, MODEL).load_all(engine.new_session, 1)
    assert [s.tokens for s in loaded] == [session.tokens]  # the one used last


def test_the_cap_keeps_those_used_last_and_removes_other_models_first(engine, texts, tmp_path):
    sessions = [conversation(engine, text) for text in texts[:3]]
    SessionStore(tmp_path, OTHER).save_all(sessions[:1])
    size = files(tmp_path)[0].stat().st_size
    store = SessionStore(tmp_path, MODEL, cap_bytes=int(2.5 * size))
    assert store.save_all(sessions) == 2
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 2.5 * size
    loaded = store.load_all(engine.new_session, 9)
    assert [s.tokens for s in loaded] == [s.tokens for s in sessions[1:]]
    assert SessionStore(tmp_path, OTHER).load_all(engine.new_session, 9) == []
    smaller = SessionStore(tmp_path, MODEL, cap_bytes=int(1.5 * size)).load_all(engine.new_session, 9)
    assert [s.tokens for s in smaller] == [sessions[2].tokens]
    assert SessionStore(tmp_path, MODEL, cap_bytes=10).save_all(sessions) == 0


def test_a_broken_file_is_left_out_with_one_line_in_the_log(engine, session, tmp_path, caplog):
    store = SessionStore(tmp_path, MODEL)
    store.save_all([session])
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    spare = engine.new_session()
    rng = random.Random(3)

    def load():
        caplog.clear()
        return SessionStore(tmp_path, MODEL).load_all(lambda: spare, 5)

    cuts = [*range(0, 700, 37), *(rng.randrange(len(whole)) for _ in range(40)), len(whole) - 1]
    flips = [*range(0, 100), *(rng.randrange(700) for _ in range(60)), *(rng.randrange(len(whole)) for _ in range(60))]
    broken = [whole[:cut] for cut in cuts] + [whole + b"x", b"", bytes(1000), rng.randbytes(5000)]
    broken += [whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :] for at in flips]
    for data in broken:
        path.write_bytes(data)
        assert load() == []
        assert len(warnings_in(caplog)) == 1 and path.name in caplog.text
        assert not spare.tokens and not spare.checkpoints
    path.write_bytes(whole)
    (loaded,) = load()
    assert loaded.tokens == session.tokens and not warnings_in(caplog)


def test_files_of_another_model_cache_type_or_context_are_left_out(engine, session, tmp_path, caplog):
    SessionStore(tmp_path, MODEL).save_all([session])
    (path,) = files(tmp_path)
    assert SessionStore(tmp_path, OTHER).load_all(engine.new_session, 5) == [] and not warnings_in(caplog)
    path.rename(tmp_path / path.name.replace(MODEL.hex()[:16], OTHER.hex()[:16]))
    assert SessionStore(tmp_path, OTHER).load_all(engine.new_session, 5) == []
    assert "another model" in caplog.text
    SessionStore(tmp_path, MODEL).save_all([session])
    for options, reason in (({"kv": "q8_0", "ctx": 1500}, "cache type"), ({"ctx": 256}, "context")):
        caplog.clear()
        with tandem.load(threads=1, **options) as other:
            assert SessionStore(tmp_path, MODEL).load_all(other.new_session, 5) == []
        assert reason in caplog.text and len(warnings_in(caplog)) == 1


def test_a_full_or_forbidden_disk_is_a_line_in_the_log(session, tmp_path, caplog, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    assert SessionStore(blocked, MODEL).save_all([session]) == 0
    assert len(warnings_in(caplog)) == 1
    assert SessionStore(blocked, MODEL).load_all(lambda: session, 5) == []

    store = SessionStore(tmp_path / "full", MODEL)

    def full(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tandem.runtime.session_store.os.replace", full)
    assert store.save_all([session]) == 0
    assert files(tmp_path / "full") == []  # nothing half written stays


def test_what_an_interrupted_save_left_is_swept_up_later(engine, tmp_path):
    old, new = tmp_path / "a.1.tmp", tmp_path / "b.2.tmp"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 2 * STALE_S,) * 2)
    SessionStore(tmp_path, MODEL).load_all(engine.new_session, 5)
    assert files(tmp_path) == [new]


def test_a_model_is_known_by_what_it_is_and_not_by_where(engine, tmp_path):
    copy = tmp_path / "copy.gguf"
    whole = engine.file.paths[0].read_bytes()
    copy.write_bytes(whole)
    with read_gguf(copy) as file:
        ours = model_fingerprint(file)
        middles = [tensor.offset + tensor.size_bytes // 2 for tensor in file.tensors.values()]
    assert ours == model_fingerprint(engine.file) and len(ours) == 32
    for places in ([whole.index(b"general.name") + 30], middles):  # other metadata, other weights
        changed = bytearray(whole)
        for at in places:
            changed[at] ^= 1
        copy.write_bytes(changed)
        with read_gguf(copy) as file:
            assert model_fingerprint(file) != ours
