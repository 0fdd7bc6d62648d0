"""Several answers at once over one loaded model. Every call does a bounded piece of work, a chunk of one prompt or one
round of all answers, so that whoever calls decides what comes next. All calls belong on one thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tandem.engine import Engine
from tandem.errors import RequestError, SettingError
from tandem.generation import Answer
from tandem.machine import machine
from tandem.requests import DecodeStep, GenerationRequest, GenerationStats, PrefillStep, StopReason
from tandem.runtime.decode import decode_round
from tandem.runtime.session_pool import ReuseReport, SessionPool
from tandem.runtime.session_store import SessionStore, model_fingerprint
from tandem.runtime.step import EXACT_ROWS

CACHE_SESSIONS = 64  # conversations kept at most, whatever their bytes


class Batch:
    """max_sequences answers at a time, and the conversations that ended, kept for reuse up to cache_bytes.

    load: opens the engine; called now and again by `wake` after a sleep of level 2. cache_bytes: RAM that conversations
    may take, None: half of what the plan leaves free. cache_dir: where conversations survive the end of the process, in
    at most as many bytes, None: nowhere. Raises what `load` raises, SettingError for numbers out of range.
    """

    def __init__(
        self,
        load: Callable[[], Engine],
        *,
        max_sequences: int = EXACT_ROWS,
        cache_bytes: int | None = None,
        cache_dir: str | Path | None = None,
    ):
        if not 1 <= max_sequences <= EXACT_ROWS:
            raise SettingError(f"{max_sequences} sequences at once: 1 to {EXACT_ROWS} are possible")
        self.max_sequences, self._load, self._cache_bytes, self._cache_dir = max_sequences, load, cache_bytes, cache_dir
        self.engine: Engine = load()
        self.tokenizer, self.ctx = self.engine.tokenizer, self.engine.ctx
        self.model_state = "loaded"
        self._answers: set[Answer] = set()
        self._reports: dict[Answer, ReuseReport] = {}
        self._open_pool()

    def open(self, request: GenerationRequest) -> Answer:
        """A new answer on the conversation that shares most with its prompt. Raises RequestError if the prompt does not
        fit the context or if no sequence is free, SettingError for bad token ids in the settings."""
        self._check_awake()
        ids = request.prompt.ids
        if not ids:
            raise RequestError("the prompt is empty: at least one token is needed")
        if len(ids) >= self.ctx:
            raise RequestError(f"the prompt has {len(ids)} tokens, the context holds {self.ctx}")
        if len(self._answers) >= self.max_sequences:
            raise RequestError(f"all {self.max_sequences} sequences are in use: close one first")
        session, report = self._pool.acquire(ids)
        try:
            answer = self.engine.answer(request, session)
        except BaseException:
            self._pool.release(session)
            raise
        self._answers.add(answer)
        self._reports[answer] = report
        return answer

    def prefill(self, answer: Answer, max_tokens: int = 512) -> PrefillStep:
        """Runs one chunk of the answer's prompt; it is ready to decode when done == total."""
        step, parts = answer.prefill(max_tokens), self._reports[answer].divergence
        return step if parts is None else replace(step, diverged=f"token {parts.position}")

    def decode(self, answers: Sequence[Answer]) -> list[DecodeStep]:
        """One round of these answers, all prefilled and none ended."""
        decode_round(self.engine.runner, [answer.decoder for answer in answers if answer.reason is None])
        return [answer.after_round() for answer in answers]

    def close(self, answer: Answer, reason: StopReason | None = None) -> GenerationStats:
        """Ends the answer, for that reason if it has not ended by itself; its conversation stays for reuse."""
        answer.stop(reason or "cancelled")
        if answer in self._answers:
            self._answers.discard(answer)
            self._reports.pop(answer)
            self._pool.release(answer.session)
        return answer.stats()

    def embed(self, ids: Sequence[int]) -> np.ndarray:
        """The mean over the tokens of their hidden states after the last norm, float32 [hidden_size], not normalised.

        Raises RequestError if they do not fit the context.
        """
        self._check_awake()
        return self.engine.mean_hidden(ids)

    def sleep(self, level: int) -> None:
        """Gives memory back; no answer may be open. 1: conversations, their caches and states; 2: the weights too."""
        assert not self._answers, "answers are open"
        if self.model_state == "unloaded" or (self.model_state == "asleep" and level < 2):
            return
        self._save()
        self._pool.clear()
        if level >= 2:
            self.engine.close()
            self.model_state = "unloaded"
        else:
            self.engine.release_memory()
            self.model_state = "asleep"

    def wake(self) -> None:
        """Makes it ready again. Raises EngineError if loading fails; it can be tried again."""
        if self.model_state == "unloaded":
            self.engine = self._load()
            self.tokenizer, self.ctx = self.engine.tokenizer, self.engine.ctx
            self._open_pool()
        elif self.model_state == "asleep":
            self._restore()
        self.model_state = "loaded"

    def memory(self) -> dict[str, int]:
        """Bytes by role: weights mapped, caches and states in use, checkpoints, scratch."""
        unloaded = self.model_state == "unloaded"
        plan = self.engine.plan
        return {
            "weights": 0 if unloaded else plan.weights_bytes,
            "scratch": 0 if unloaded else plan.scratch_bytes,
            **self._pool.memory(),
        }

    def close_all(self) -> None:
        """Ends every answer, saves the conversations if a folder was given, and frees everything."""
        for answer in list(self._answers):
            self.close(answer, "cancelled")
        if self.model_state != "unloaded":
            self._save()
            self._pool.clear()
            self.engine.close()
            self.model_state = "unloaded"

    def _open_pool(self) -> None:
        """A pool over the engine as it is now loaded, with the conversations of the folder if there is one."""
        left = machine().free_bytes - self.engine.plan.total_bytes
        cap = self._cache_bytes or max(left // 2, self.engine.plan.state_bytes)
        self._pool = SessionPool(self.engine.new_session, CACHE_SESSIONS, cap)
        self._store = None
        if self._cache_dir is not None:
            self._store = SessionStore(self._cache_dir, model_fingerprint(self.engine.file), cap)
            self._restore()

    def _restore(self) -> None:
        if self._store:
            for session in self._store.load_all(self.engine.new_session, CACHE_SESSIONS):
                self._pool.add(session)

    def _save(self) -> None:
        if self._store:
            self._store.save_all(self._pool.idle_sessions)

    def _check_awake(self) -> None:
        if self.model_state != "loaded":
            raise RequestError(f"the model is {self.model_state}: wake it first")
