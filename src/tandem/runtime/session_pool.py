"""Conversations kept for reuse: in comes a prompt, out goes the session that continues it with the least to compute,
and a report of what was reused and where the prompt parts from what is cached.

`choose` decides, from numbers alone; `SessionPool` carries it out. What is lost is always what was used longest ago.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

import numpy as np

from tandem.runtime.session import Session

KEEP_TAIL = 256  # tokens: a shorter end of a conversation is overwritten rather than copied around
SAME_TEXT = 0.5  # share of its runs of GRAM tokens that a prompt has in common with what it replaces
GRAM = 8
LOOK_AHEAD = 512  # tokens of the prompt that are compared so
REPLACED_ANSWER = 4096  # tokens: a prompt that stops short of the cached text by no more wants another answer
MAX_TIES = 8  # conversations with the same beginning that are compared further
WINDOW = 12  # tokens shown on each side of a divergence


@dataclass(frozen=True)
class Candidate:
    """A cached conversation as `choose` sees it. reusable: tokens of the prompt whose states it has; lost: tokens that
    only it has and that continuing it with the prompt overwrites; replaced: the prompt is a new version of them."""

    idle: bool
    last_used: int
    held_bytes: int
    reusable: int
    lost: int
    replaced: bool


@dataclass(frozen=True)
class Choice:
    """source: index of the conversation to go on from, None: none has anything. in_place: the source itself goes on,
    else a copy of the shared part. evict: conversations to forget first, least recently used first."""

    source: int | None
    in_place: bool
    evict: tuple[int, ...]


def choose(candidates: Sequence[Candidate], free_sessions: int, free_bytes: int, new_bytes: int) -> Choice:
    """Where to continue. free_sessions: how many more there may be; free_bytes: left under the cap; new_bytes: what the
    prompt takes in a session of its own.

    The source is the one that saves most. It goes on itself if little is lost by that, or if making room for a copy
    would cost it anyway.
    """
    source = max(range(len(candidates)), key=lambda i: _preference(candidates[i]), default=None)
    if source is not None and not candidates[source].reusable:
        source = None
    if source is not None and candidates[source].idle:
        own = candidates[source]
        more_bytes = max(0, new_bytes - own.held_bytes)
        in_place = Choice(source, True, _evictions(candidates, 1, free_bytes, more_bytes, spared=source))
        if own.replaced or own.lost <= KEEP_TAIL:
            return in_place
        evict = _evictions(candidates, free_sessions, free_bytes, new_bytes)
        return in_place if source in evict else Choice(source, False, evict)
    return Choice(source, False, _evictions(candidates, free_sessions, free_bytes, new_bytes))


def _preference(c: Candidate) -> tuple:
    return c.reusable, c.idle, c.replaced, -c.lost, c.last_used


def _evictions(
    candidates: Sequence[Candidate], free_sessions: int, free_bytes: int, needed_bytes: int, spared: int | None = None
) -> tuple[int, ...]:
    """The least recently used idle ones, as many as make room for one session and its bytes, or all there are."""
    idle = [i for i, c in enumerate(candidates) if c.idle and i != spared]
    idle.sort(key=lambda i: candidates[i].last_used)
    evict = []
    for i in idle:
        if free_sessions >= 1 and free_bytes >= needed_bytes:
            break
        evict.append(i)
        free_sessions += 1
        free_bytes += candidates[i].held_bytes
    return tuple(evict)


def is_new_version(rest: np.ndarray, replaced: np.ndarray) -> bool:
    """Whether a prompt's `rest` is the cached text `replaced` once more with something changed or left out, such as
    reasoning or a date, or stops where an answer began; else it is another conversation with the same beginning."""
    if len(rest) < GRAM:
        return len(rest) == 0 and len(replaced) <= REPLACED_ANSWER
    if len(replaced) < GRAM:
        return False
    wanted, known = (_grams(part) for part in (rest[:LOOK_AHEAD], replaced))
    return bool(np.isin(wanted, known).mean() >= SAME_TEXT)


def _grams(tokens: np.ndarray) -> np.ndarray:
    """A hash of every run of GRAM tokens."""
    runs = np.lib.stride_tricks.sliding_window_view(tokens.astype(np.uint64), GRAM)
    factors = np.uint64(0x9E3779B97F4A7C15) ** np.arange(1, GRAM + 1, dtype=np.uint64)
    return runs @ factors


@dataclass(frozen=True)
class Divergence:
    """Where a prompt parts from the cached conversation that shares most with it: both token windows begin at `begin`
    and are the same up to `position`."""

    position: int
    begin: int
    cached: tuple[int, ...]
    prompt: tuple[int, ...]


@dataclass(frozen=True)
class ReuseReport:
    """What became of a prompt: tokens reused, and in how many it agrees with the best cached conversation (more than
    reused if no state of that length is at hand). origin: "continued" one, "copied" from one that stays, or "fresh".
    divergence: None where the prompt only goes on from the cached text, or ends in it."""

    prompt_tokens: int
    reused: int
    shared: int
    origin: Literal["continued", "copied", "fresh"]
    divergence: Divergence | None
    evicted: int


def adopt_prefix(session: Session, other: Session, length: int) -> None:
    """Makes `session` what `other` was after `length` tokens, at most its own; checkpoints are shared.

    With recurrent layers there must be a checkpoint of that length.
    """
    session.clear()
    session.state.copy_prefix(other.state, length)
    session.checkpoints = [c for c in other.checkpoints if c.length <= length]
    hidden = None
    if session.recurrent:
        assert session.checkpoints and session.checkpoints[-1].length == length
        session.state.restore(session.checkpoints[-1].recurrent)
        hidden = session.checkpoints[-1].hidden
    session.tokens = list(other.tokens[:length])
    if session.mtp:
        session.mtp.adopt(other.mtp, length, hidden)


class _Entry:
    """A session of the pool. tokens: those of an idle session, int32."""

    def __init__(self, session: Session):
        self.session, self.idle, self.last_used = session, False, 0
        self.tokens = np.empty(0, np.int32)

    def refresh(self) -> None:
        self.tokens = np.asarray(self.session.tokens, np.int32)

    @property
    def state_bytes(self) -> dict[str, int]:
        """RAM of caches and recurrent state, by role."""
        states = [self.session.state, *([self.session.mtp.state] if self.session.mtp else [])]
        recurrent = self.session.state.recurrent_memory.nbytes if self.session.state.held_bytes else 0
        return {"kv": sum(state.held_bytes for state in states) - recurrent, "recurrent": recurrent}


class SessionPool:
    """At most max_sessions sessions, and cap_bytes (None: no cap) of RAM for those that are idle and busy together.

    Busy ones are never touched, so the cap may be passed while nothing idle is left to forget. All calls on one thread.
    """

    def __init__(self, make_session: Callable[[], Session], max_sessions: int, cap_bytes: int | None = None):
        assert max_sessions >= 1
        self.make_session, self.max_sessions, self.cap_bytes = make_session, max_sessions, cap_bytes
        self._entries: list[_Entry] = []
        self._spare: list[Session] = []  # forgotten ones, whose RAM is given back
        self._clock = count(1)

    def acquire(self, tokens: Sequence[int]) -> tuple[Session, ReuseReport]:
        """The session to run this prompt on, from then on busy; its own `rewind` finds the reused part.

        At least one session must be idle or not made yet.
        """
        prompt = np.asarray(tokens, np.int32)
        shared = [self._shared(entry, prompt) for entry in self._entries]
        candidates = self._candidates(prompt, shared)
        sample = self._entries[0].session if self._entries else self._sample()
        new_bytes = _bytes_at(sample, len(prompt))
        choice = choose(candidates, self.max_sessions - len(self._entries), self._free_bytes(), new_bytes)
        divergence = self._divergence(prompt, shared)
        source = None if choice.source is None else self._entries[choice.source]
        reused = 0 if choice.source is None else candidates[choice.source].reusable
        for entry in [self._entries[i] for i in choice.evict]:
            self._forget(entry)
        entry = source if source and choice.in_place else self._open(source, reused)
        entry.idle, entry.last_used = False, next(self._clock)
        origin = "continued" if choice.in_place else "copied" if source else "fresh"
        most = max(shared, default=0)
        return entry.session, ReuseReport(len(prompt), reused, most, origin, divergence, len(choice.evict))

    def release(self, session: Session) -> None:
        """The session's conversation has paused: it may be reused or forgotten from now on."""
        entry = next(entry for entry in self._entries if entry.session is session)
        assert not entry.idle
        entry.refresh()
        entry.idle, entry.last_used = True, next(self._clock)
        if not session.reusable([*session.tokens, 0]):  # empty, or a failed step has spoilt it
            self._forget(entry)
        self.trim()

    def trim(self) -> None:
        """Forgets the least recently used idle conversations until the cap holds."""
        idle = sorted(self.idle_entries, key=lambda entry: entry.last_used)
        while idle and self._free_bytes() < 0:
            self._forget(idle.pop(0))

    def clear(self) -> None:
        """Forgets all idle conversations and gives their RAM back."""
        for entry in self.idle_entries:
            self._forget(entry)
        self._spare.clear()

    @property
    def idle_entries(self) -> list[_Entry]:
        return [entry for entry in self._entries if entry.idle]

    @property
    def idle_sessions(self) -> list[Session]:
        """Idle conversations, least recently used first."""
        return [entry.session for entry in sorted(self.idle_entries, key=lambda entry: entry.last_used)]

    def memory(self) -> dict[str, int]:
        """RAM of all sessions by role: kv, recurrent, checkpoints; a checkpoint that several share counts once."""
        states = [entry.state_bytes for entry in self._entries]
        checkpoints = {id(c): c.size_bytes for entry in self._entries for c in entry.session.checkpoints}
        totals = {role: sum(state[role] for state in states) for role in ("kv", "recurrent")}
        return totals | {"checkpoints": sum(checkpoints.values())}

    def add(self, session: Session) -> None:
        """Takes over a session with a conversation in it, idle; it counts as the most recently used."""
        assert len(self._entries) < self.max_sessions
        entry = _Entry(session)
        self._entries.append(entry)
        self.release(session)

    def _free_bytes(self) -> int:
        return (1 << 62) if self.cap_bytes is None else self.cap_bytes - sum(self.memory().values())

    def _shared(self, entry: _Entry, prompt: np.ndarray) -> int:
        if not entry.idle:
            entry.refresh()
        return _common(entry.tokens, prompt)

    def _candidates(self, prompt: np.ndarray, shared: Sequence[int]) -> list[Candidate]:
        reusable = [self._reusable(entry, prompt, n) for entry, n in zip(self._entries, shared, strict=True)]
        best = max(reusable, default=0)
        ties = [i for i, n in enumerate(reusable) if n == best > 0]
        ties = set(sorted(ties, key=lambda i: self._entries[i].last_used)[-MAX_TIES:])
        made = []
        for i, (entry, reused) in enumerate(zip(self._entries, reusable, strict=True)):
            held = sum(entry.state_bytes.values()) + sum(c.size_bytes for c in entry.session.checkpoints)
            lost = self._lost(entry, reused) if i in ties else len(entry.tokens) - reused
            replaced = i in ties and is_new_version(prompt[shared[i] :], entry.tokens[shared[i] :])
            made.append(Candidate(entry.idle, entry.last_used, held, reused, lost, replaced))
        return made

    def _reusable(self, entry: _Entry, prompt: np.ndarray, shared: int) -> int:
        """Tokens that an idle session can rewind to, or that can be copied from a busy one."""
        session = entry.session
        length = min(shared, len(prompt) - 1)
        if session.recurrent and not (entry.idle and length == len(entry.tokens)):
            length = max((c.length for c in session.checkpoints if c.length <= length), default=0)
        return length if session.state.can_cut(len(entry.tokens), length) else 0

    def _lost(self, entry: _Entry, reused: int) -> int:
        """Tokens after the reused ones that no other conversation has."""
        if len(entry.tokens) - reused <= KEEP_TAIL:
            return len(entry.tokens) - reused
        elsewhere = (_common(entry.tokens, other.tokens) for other in self._entries if other is not entry)
        return len(entry.tokens) - max(reused, *elsewhere, 0)

    def _divergence(self, prompt: np.ndarray, shared: Sequence[int]) -> Divergence | None:
        best = max(range(len(shared)), key=lambda i: (shared[i], self._entries[i].last_used), default=None)
        if best is None:
            return None
        cached, position = self._entries[best].tokens, shared[best]
        if position in (len(cached), len(prompt)):
            return None
        begin = max(0, position - WINDOW)
        windows = (tuple(part[begin : position + WINDOW].tolist()) for part in (cached, prompt))
        return Divergence(position, begin, *windows)

    def _open(self, source: _Entry | None, length: int) -> _Entry:
        """A session of its own, with the source's first `length` tokens if there is one."""
        entry = _Entry(self._spare.pop() if self._spare else self.make_session())
        if source:
            adopt_prefix(entry.session, source.session, length)
        self._entries.append(entry)
        return entry

    def _sample(self) -> Session:
        """Any session, to ask for sizes."""
        if self._spare:
            return self._spare[-1]
        self._spare.append(self.make_session())
        return self._spare[-1]

    def _forget(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        session = entry.session
        session.clear()
        session.state.release()
        if session.mtp:
            session.mtp.state.release()
        self._spare.append(session)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


def _bytes_at(session: Session, length: int) -> int:
    """RAM that a session takes with that many tokens, without checkpoints."""
    return session.state.resident_bytes(length) + (session.mtp.state.resident_bytes(length) if session.mtp else 0)
