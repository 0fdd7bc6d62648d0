"""The devices that model tests run on: `logits_of(backend, path, chunks)` feeds a file chunk by chunk."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tandem.gguf import read_gguf
from tandem.models import model_for
from tandem.ops.reference import ReferenceOps, ReferenceState, ReferenceStep
from tandem.runtime.weights import load_weights


@dataclass(frozen=True)
class Backend:
    """run(path, chunks, kv) -> logits; tolerances: relative RMS error to transformers, F32 and quantized weights."""

    run: Callable[[str, Sequence[np.ndarray], str | None], np.ndarray]
    tolerance: float
    quantized_tolerance: float


def logits_of(backend: str, path, chunks: Sequence[np.ndarray], kv: str | None = None) -> np.ndarray:
    """Logits float32 [T, vocab] of all tokens of a fresh sequence that gets the chunks one after the other.

    kv: type of the attention cache; None: the most exact that the backend has.
    """
    return BACKENDS[backend].run(path, chunks, kv)


def _reference(path, chunks, kv):
    with read_gguf(path) as file:
        model = model_for(file.metadata)
        config = model.Config.from_gguf(file.metadata, file.tensors)
        weights = load_weights(file, model, config)
        state = ReferenceState(model.state(config), sum(map(len, chunks)), kv or "f32")
        logits, begin = [], 0
        for chunk in chunks:
            rows = np.arange(len(chunk), dtype=np.int32)
            step = ReferenceStep(np.asarray(chunk, np.int32), rows + begin, rows)
            logits.append(model.forward(ReferenceOps(step, state), config, weights))
            begin += len(chunk)
        return np.concatenate(logits)


BACKENDS = {"reference": Backend(_reference, 1e-4, 1e-4)}
