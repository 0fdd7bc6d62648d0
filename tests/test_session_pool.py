"""Which cached conversation a prompt continues: the decision alone, then the pool over sessions of real models."""

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import write_tiny

import tandem
from tandem.runtime.session_pool import KEEP_TAIL, Candidate, SessionPool, adopt_prefix, choose, is_new_version
from tandem.runtime.session_store import SessionStore

CANDIDATES = st.lists(
    st.builds(
        Candidate,
        idle=st.booleans(),
        last_used=st.integers(0, 10**6),
        held_bytes=st.integers(0, 1000),
        reusable=st.sampled_from([0, 1, 100, 5000]) | st.integers(0, 9000),
        lost=st.sampled_from([0, KEEP_TAIL, KEEP_TAIL + 1]) | st.integers(0, 9000),
        replaced=st.booleans(),
    ),
    max_size=7,
    unique_by=lambda c: c.last_used,
)


@given(CANDIDATES, st.integers(0, 3), st.integers(-2000, 4000), st.integers(0, 3000))
@settings(max_examples=1500, deadline=None, derandomize=True)
def test_choice_keeps_its_promises(candidates, free_sessions, free_bytes, new_bytes):
    choice = choose(candidates, free_sessions, free_bytes, new_bytes)
    evicted = [candidates[i] for i in choice.evict]
    most = max((c.reusable for c in candidates), default=0)
    assert (choice.source is None) == (most == 0)
    assert choice.source is None or candidates[choice.source].reusable == most  # all that is possible is reused
    assert all(c.idle for c in evicted) and choice.source not in choice.evict
    assert not choice.in_place or candidates[choice.source].idle

    spared = choice.source if choice.in_place else None
    by_age = [i for i, c in enumerate(candidates) if c.idle and i != spared]
    by_age.sort(key=lambda i: candidates[i].last_used)
    assert list(choice.evict) == by_age[: len(choice.evict)]  # nothing that was used later than what stays

    source = None if choice.source is None else candidates[choice.source]
    sessions = free_sessions + len(evicted) + choice.in_place
    needed = max(0, new_bytes - source.held_bytes) if choice.in_place else new_bytes
    room = free_bytes + sum(c.held_bytes for c in evicted)
    assert (sessions >= 1 and room >= needed) or len(choice.evict) == len(by_age)
    if evicted:  # one fewer would not do
        assert sessions - 1 < 1 or room - evicted[-1].held_bytes < needed
    if choice.in_place and source.lost > KEEP_TAIL and not source.replaced:
        # a copy would have cost the source anyway, as the oldest of what had to go
        older = [c for c in candidates if c.idle and c.last_used < source.last_used]
        assert free_sessions + len(older) < 1 or free_bytes + sum(c.held_bytes for c in older) < new_bytes


def test_a_new_version_of_a_text_is_told_from_another_text_with_the_same_beginning():
    rng = np.random.default_rng(1)
    text, other = (rng.integers(0, 5000, 3000).astype(np.int32) for _ in range(2))
    assert is_new_version(text[700:], text)  # reasoning left out
    assert is_new_version(np.concatenate((other[:20], text[20:])), text)  # a date changed
    assert not is_new_version(other, text)
    assert is_new_version(text[:0], text)  # another answer to the same prompt
    assert not is_new_version(text[:0], np.tile(text, 2))  # a prompt from many turns ago
    assert not is_new_version(other[:5], text) and not is_new_version(other, text[:5])


@pytest.fixture(scope="module")
def engine():
    with tandem.load(ctx=3000, threads=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def texts(engine):
    """Token sequences that share nothing but chance."""
    rng = np.random.default_rng(7)
    return [rng.integers(10, engine.vocab_size, 1500).tolist() for _ in range(6)]


def run(pool: SessionPool, prompt: list[int], borders=(), answer=()):
    """One request; returns (report, logits after the prompt), and checks that the report says what was reused."""
    session, report = pool.acquire(prompt)
    logits, reused = session.sync(prompt, borders)
    assert reused == report.reused
    for token in answer:
        session.append(token)
    pool.release(session)
    return report, logits


def test_a_copied_prefix_goes_on_with_the_bits_of_the_original(engine, texts):
    system, one, two, _, _, _ = texts
    first, second = engine.new_session(), engine.new_session()
    first.sync([*system[:400], *one[:200]], borders=(400,))
    second.sync(two[:300])  # something to be forgotten
    adopt_prefix(second, first, 400)
    assert second.tokens == system[:400]
    follow = [*system[:400], *two[:150]]
    copied, reused_copy = second.sync(follow)
    again, reused = first.sync(follow)
    assert reused_copy == reused == 400
    assert np.array_equal(copied, again)
    assert np.array_equal(second.state.snapshot(), first.state.snapshot())
    for token in one[:20]:
        assert np.array_equal(first.append(token), second.append(token))
    if first.mtp:
        wanted = [(session.mtp, 5, 3) for session in (first, second)]
        drafts = [engine.drafter.draft([one]) for one in wanted]
        assert drafts[0] == drafts[1]


@pytest.fixture(scope="module", params=["gemma3", "qwen3"])
def attention_engine(request, tmp_path_factory):
    """Without recurrent layers; gemma3 keeps a window of positions in rings of 776."""
    path = write_tiny(request.param, tmp_path_factory.mktemp("models") / "tiny.gguf", "Q8_0", seed=3)
    with tandem.load(path, ctx=2000, threads=2) as engine:
        yield engine


def test_models_without_recurrent_layers_reuse_what_their_windows_hold(attention_engine, tmp_path):
    engine, rng = attention_engine, np.random.default_rng(2)
    windowed = engine.file.metadata["general.architecture"] == "gemma3"
    pool = SessionPool(engine.new_session, 3)
    text, other = (rng.integers(0, engine.vocab_size, 1800).tolist() for _ in range(2))
    run(pool, text[:1400])
    report, copied = run(pool, [*text[:1100], *other[:30]])
    assert (report.origin, report.reused) == ("copied", 1100)
    session = engine.new_session()
    session.sync(text[:1400])
    cut, reused = session.sync([*text[:1100], *other[:30]])
    assert reused == 1100 and np.array_equal(cut, copied)
    report, _ = run(pool, [*text[:500], *other[:30]])  # of 1400, a ring has lost the first 624
    # else it takes the place of the copy, of which only 30 tokens are nowhere else
    assert (report.origin, report.reused) == (("fresh", 0) if windowed else ("continued", 500))
    report, _ = run(pool, [*text[:1300], *other[:30]])
    assert (report.origin, report.reused) == ("continued", 1300)
    store = SessionStore(tmp_path, bytes(32))
    assert store.save_all(pool.idle_sessions) == len(pool.idle_sessions) >= 2
    loaded = SessionStore(tmp_path, bytes(32)).load_all(engine.new_session, 9)
    for ours, theirs in zip(pool.idle_sessions, loaded, strict=True):
        assert ours.tokens == theirs.tokens
        prompt = [*ours.tokens[:-9], *other[40:60]]
        (expected, reused), (got, reused_too) = ours.sync(prompt), theirs.sync(prompt)
        assert reused == reused_too == len(prompt) - 20
        assert np.array_equal(expected, got)


def test_interleaved_agents_reuse_their_whole_history(engine, texts):
    pool = SessionPool(engine.new_session, 4)
    histories = [texts[0][:300], texts[1][:300]]
    for turn in range(4):
        for agent, history in enumerate(histories):
            answer = texts[4 + agent][turn * 20 : turn * 20 + 20]
            report, _ = run(pool, history, answer=answer)
            assert report.origin == ("continued" if turn else "fresh")
            assert report.reused == (len(history) - 40 if turn else 0)
            assert report.divergence is None or not turn
            history += [*answer, *texts[2 + agent][turn * 40 : turn * 40 + 40]]


def test_forks_of_one_system_prompt_each_keep_their_conversation(engine, texts):
    pool = SessionPool(engine.new_session, 4)
    system, tasks = texts[0][:500], [text[:400] for text in texts[1:4]]
    for at, task in enumerate(tasks):
        report, _ = run(pool, system + task, borders=(500,))
        assert (report.origin, report.reused) == (("copied", 500) if at else ("fresh", 0))
    for task in tasks:  # none was destroyed by the others
        report, _ = run(pool, [*system, *task, 1, 2, 3])
        assert (report.origin, report.reused) == ("continued", 900)
    # a fourth takes the place of the one used longest ago once there is no room
    for at, task in enumerate((texts[4][:400], texts[5][:400])):
        report, _ = run(pool, system + task, borders=(500,))
        assert (report.origin, report.reused, report.evicted) == ("copied", 500, at)
    assert run(pool, [*system, *tasks[0], 1, 2, 3, 4])[0].reused == 500
    assert run(pool, [*system, *tasks[2], 1, 2, 3, 4])[0].reused == 903


def test_a_removed_reasoning_block_continues_its_own_conversation(engine, texts):
    pool = SessionPool(engine.new_session, 4)
    prompt, reasoning, answer = texts[0][:400], texts[1][:600], texts[2][:300]
    run(pool, [*prompt, *reasoning, *answer], borders=(400,))
    report, _ = run(pool, [*prompt, *answer, *texts[3][:50]])
    assert (report.origin, report.reused, report.evicted) == ("continued", 400, 0)
    assert len(pool.idle_sessions) == 1
    assert report.divergence.position == 400


def test_a_busy_conversation_is_copied_from_and_never_touched(engine, texts):
    pool = SessionPool(engine.new_session, 2)
    system = texts[0][:500]
    busy, _ = pool.acquire(system + texts[1][:50])
    busy.sync(system + texts[1][:50], borders=(500,))
    report, _ = run(pool, system + texts[2][:50])
    assert (report.origin, report.reused) == ("copied", 500)
    report, _ = run(pool, texts[3][:60])  # the only idle one makes room
    assert (report.origin, report.evicted) == ("fresh", 1)
    assert busy.tokens == system + texts[1][:50]
    pool.release(busy)
    assert run(pool, system + texts[1][:60])[0].reused == 550


def test_a_divergence_is_shown_where_it_is(engine, texts):
    pool = SessionPool(engine.new_session, 2)
    prompt = texts[0][:700]
    run(pool, prompt, borders=(100,))
    changed = [*prompt[:317], (prompt[317] + 1) % engine.vocab_size, *prompt[318:]]
    report, _ = run(pool, changed)
    assert (report.shared, report.reused, report.origin) == (317, 100, "continued")
    seen = report.divergence
    assert (seen.position, seen.begin) == (317, 305)
    assert list(seen.cached) == prompt[305:329] and list(seen.prompt) == changed[305:329]
    assert run(pool, changed[:500])[0].divergence is None  # ends in the cached text


def test_the_cap_holds_and_what_is_forgotten_gives_its_memory_back(engine, texts):
    pool = SessionPool(engine.new_session, 8)
    run(pool, texts[0][:1000])
    one = sum(pool.memory().values())
    pool.cap_bytes = int(2.5 * one)
    for text in texts[1:]:
        run(pool, text[:1000])
        assert sum(pool.memory().values()) <= pool.cap_bytes
    assert len(pool.idle_sessions) == 2
    for text, kept in ((texts[5], True), (texts[4], True), (texts[0], False)):
        assert run(pool, text[:1001])[0].reused == (1000 if kept else 0)
    memory = pool.memory()
    session = pool.idle_sessions[-1]
    states = [entry.session.state for entry in pool._entries]
    assert memory["recurrent"] == sum(state.recurrent_memory.nbytes for state in states)
    assert memory["kv"] >= sum(state.held_bytes - state.recurrent_memory.nbytes for state in states)
    pool.clear()
    assert sum(pool.memory().values()) == 0 and session.state.held_bytes == 0


def test_a_cleared_pool_leaves_no_session_behind(engine, texts):
    pool = SessionPool(engine.new_session, 3)
    for text in texts[:2]:
        run(pool, text[:100])
    alive = [weakref.ref(thing) for s in pool.idle_sessions for thing in (s, s.state, s.state.memory)]
    gc.disable()  # the memory must not wait for the collector
    try:
        pool.clear()
        assert not any(ref() is not None for ref in alive)
    finally:
        gc.enable()


def test_a_failed_step_costs_its_conversation_only(engine, texts):
    pool = SessionPool(engine.new_session, 3)
    run(pool, texts[0][:200])
    session, _ = pool.acquire(texts[1][:200])
    session.sync(texts[1][:100])
    session.begin(texts[1][100:110], tentative=False)  # a step that never ended
    pool.release(session)
    assert run(pool, texts[1][:200])[0].reused == 0
    assert run(pool, texts[0][:210])[0].reused == 200


def assert_same_state(session, expected):
    """Up to what other chunks of the same tokens make: 8-bit activations round otherwise. Other tokens give about 1."""
    recurrent = [s.state.snapshot().view(np.float32) for s in (session, expected)]
    caches = [s.state.prefix(len(s.tokens)).arrays for s in (session, expected)]
    pairs = [recurrent, *[[a.view(np.float16).astype(np.float32) for a in pair] for pair in zip(*caches, strict=True)]]
    for got, wanted in pairs:
        assert np.linalg.norm(got - wanted) < 0.1 * np.linalg.norm(wanted)


def test_any_mix_of_conversations_is_answered_as_by_a_fresh_session(engine, texts):
    """Forks, follow-ups, edits and parallel requests at random: the pool keeps its cap, and what it reuses is right."""
    rng = np.random.default_rng(4)
    pool, fresh = SessionPool(engine.new_session, 4), engine.new_session()
    prompts, busy, origins = [texts[0][:150]], [], set()
    for round in range(40):
        base = prompts[int(rng.integers(len(prompts)))][-700:]
        text = texts[int(rng.integers(6))]
        cut, begin = int(rng.integers(20, len(base) + 1)), int(rng.integers(0, 1000))
        more = text[begin : begin + int(rng.integers(1, 320))]
        kinds = base + more, base[:cut] + more, [*base[:cut], 7, *base[cut + 1 :], *more[:9]]
        prompt = kinds[int(rng.integers(3))]
        session, report = pool.acquire(prompt)
        assert session not in busy
        borders = sorted(rng.integers(1, len(prompt) + 1, 3).tolist())
        _, reused = session.sync(prompt, borders)
        assert reused == report.reused <= report.shared
        origins.add(report.origin)
        if round % 3 == 0 or report.origin == "copied":
            fresh.clear()
            fresh.sync(prompt)
            assert_same_state(session, fresh)
        busy.append(session)
        prompts.append(prompt)
        while len(busy) > rng.integers(0, 4):
            pool.release(busy.pop(int(rng.integers(len(busy)))))
        assert len(pool._entries) <= 4
        if round == 20:
            pool.cap_bytes = int(0.7 * sum(pool.memory().values()))
            pool.trim()
        if not busy:
            assert pool.cap_bytes is None or sum(pool.memory().values()) <= pool.cap_bytes
    assert origins == {"continued", "copied", "fresh"}
