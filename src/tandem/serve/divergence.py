"""Where and why a prompt parts from the conversation that it seems to continue: the reason why a cache could not help.

In: token ids of prompts and of the answers to them. Out: records without any text of theirs, for `/props` and the log.
"""

import re
import time
from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from tandem.text.tokenizer import Tokenizer

KEPT_CONVERSATIONS = 16
KEPT_RECORDS = 32
WINDOW = 24  # tokens on each side of the place that decide the reason
MIN_SHARED = 16  # prompts that share less have nothing to do with each other

_REASONS = (
    ("billing header changed", re.compile(r"billing-header|cch=")),
    ("time changed", re.compile(r"\d{1,2}:\d\d(:\d\d)?")),
    (
        "date changed",
        re.compile(
            r"\d{4}-\d\d?-\d\d?|\d\d?[./]\d\d?[./]\d{2,4}"
            r"|\b(mon|tues|wednes|thurs|fri|satur|sun)day\b"
            r"|\b(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\b",
            re.I,
        ),
    ),
    ("id changed", re.compile(r"[0-9a-f]{8}-?[0-9a-f]{4}|\b(call|req|msg|sess|toolu)[-_]\w+|[0-9a-f]{16,}", re.I)),
    ("tools changed", re.compile(r"\"(parameters|description|input_schema|function)\"|<tools>")),
    ("number changed", re.compile(r"\d+")),
)


@dataclass(frozen=True)
class PromptRecord:
    """One prompt as it met the cache. shared: tokens that it has in common with the conversation it is closest to;
    reused: tokens that the engine took over; diverged: position and reason, None if it only continues."""

    id: str
    at_s: float
    prompt_tokens: int
    shared: int
    diverged: str | None
    reused: int | None = None


@dataclass
class _Conversation:
    ids: np.ndarray


class RecentPrompts:
    """The last prompts with their answers, and how each new prompt parts from them."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._kept: deque[_Conversation] = deque(maxlen=KEPT_CONVERSATIONS)
        self.records: deque[PromptRecord] = deque(maxlen=KEPT_RECORDS)

    def seen(self, request_id: str, ids: list[int]) -> PromptRecord:
        """Compares a prompt with those before it, and keeps it. Linear in their lengths."""
        new = np.asarray(ids, np.int32)
        best, shared = None, 0
        for old in self._kept:
            length = _common(old.ids, new)
            if length > shared:
                best, shared = old.ids, length
        diverged = None
        if best is not None and MIN_SHARED <= shared < min(len(best), len(new)):
            diverged = f"token {shared:,}: {self._reason(best, new, shared)}"
        record = PromptRecord(request_id, time.time(), len(ids), shared, diverged)
        self.records.append(record)
        self._kept.append(_Conversation(new))
        return record

    def answered(self, record: PromptRecord, ids: list[int], answer: list[int], reused: int) -> None:
        """Adds what was written to the conversation, and what the engine reused to the record."""
        whole = np.asarray(ids + answer, np.int32)
        for kept in reversed(self._kept):
            if len(kept.ids) == len(ids) and _common(kept.ids, whole) == len(ids):
                kept.ids = whole
                break
        for at, known in enumerate(self.records):
            if known is record:
                self.records[at] = replace(record, reused=reused)

    def _reason(self, old: np.ndarray, new: np.ndarray, at: int) -> str:
        before, after = (self._around(ids, at) for ids in (old, new))
        if _has_marker(before) != _has_marker(after):
            return "reasoning removed" if _has_marker(before) else "reasoning added"
        if before.split() == after.split():
            return "blank space changed"
        for reason, pattern in _REASONS:
            if _at_place(pattern, before, self._left(old, at)) and _at_place(pattern, after, self._left(new, at)):
                return reason
        return "text changed"

    def _around(self, ids: np.ndarray, at: int) -> str:
        return self._tokenizer.decode([int(t) for t in ids[max(0, at - WINDOW) : at + WINDOW]], keep_control=True)

    def _left(self, ids: np.ndarray, at: int) -> int:
        return len(self._tokenizer.decode([int(t) for t in ids[max(0, at - WINDOW) : at]], keep_control=True))


def _common(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    return int(different.argmax()) if different.any() else length


def _has_marker(text: str) -> bool:
    return "<think>" in text or "<|channel" in text


def _at_place(pattern: re.Pattern[str], text: str, place: int) -> bool:
    """Whether a match of the pattern covers the place or begins right behind it."""
    return any(match.start() <= place + 1 and match.end() >= place for match in pattern.finditer(text))
