"""What a request hears from the worker: any number of Waiting, Prefilling and Generated, then one Finished or Failed.

Out: frozen data for the API layer, and `Overloaded`, the refusal of a request that was not accepted.
"""

from dataclasses import dataclass
from typing import Literal

from tandem.errors import EngineError
from tandem.requests import GenerationStats, Piece, PrefillStep, StopReason

WaitReason = Literal["queue", "loading", "paused"]


class Overloaded(EngineError):
    """The server cannot take the request now; the same request may succeed after retry_after_s seconds."""

    def __init__(self, message: str, retry_after_s: float):
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class Waiting:
    """Nothing happens to the request yet. queue: position requests are before it; loading: the model is not in memory;
    paused: a background request that has begun stands back for interactive ones."""

    reason: WaitReason
    position: int


@dataclass(frozen=True)
class Prefilling:
    """One chunk of the prompt is done."""

    step: PrefillStep


@dataclass(frozen=True)
class Generated:
    """Tokens of the answer, in order; several rounds in one event where the reader is slower than the engine."""

    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Finished:
    """The answer has ended; stats.stop_reason == reason."""

    reason: StopReason
    stats: GenerationStats


@dataclass(frozen=True)
class Failed:
    """The request ended with an error: of the request (RequestError ...), of its circumstances (Overloaded: try again
    later) or of the engine (EngineError)."""

    error: Exception


Event = Waiting | Prefilling | Generated | Finished | Failed
