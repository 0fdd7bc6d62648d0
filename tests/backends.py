"""The devices that model tests run on: `logits_of(backend, path, chunks)` feeds a file chunk by chunk."""

from collections.abc import Sequence

import numpy as np

from tandem.gguf import read_gguf
from tandem.models import model_for
from tandem.native import native
from tandem.ops.program import Pool
from tandem.ops.reference import ReferenceOps, ReferenceState, ReferenceStep
from tandem.ops.state_cpu import CpuState
from tandem.runtime.step import Part, Runner
from tandem.runtime.weights import load_weights


def logits_of(backend: str, path, chunks: Sequence[np.ndarray], kv: str = "f32") -> np.ndarray:
    """Logits float32 [T, vocab] of all tokens of a fresh sequence that gets the chunks one after the other.

    backend: one of BACKENDS, or "int8": the reference with activations rounded as devices do it. kv: type of the cache.
    """
    with read_gguf(path) as file:
        model = model_for(file.metadata)
        config = model.Config.from_gguf(file.metadata, file.tensors)
        run = {"reference": _reference, "int8": _int8, "cpu": _cpu}[backend]
        return run(model, config, load_weights(file, model, config), chunks, kv)


def _int8(*args) -> np.ndarray:
    return _reference(*args, quantize_activations=True)


def _reference(model, config, weights, chunks, kv, *, quantize_activations=False) -> np.ndarray:
    state = ReferenceState(model.state(config), sum(map(len, chunks)), kv)
    logits, begin = [], 0
    for chunk in chunks:
        rows = np.arange(len(chunk), dtype=np.int32)
        step = ReferenceStep(np.asarray(chunk, np.int32), rows + begin, rows)
        ops = ReferenceOps(step, state, quantize_activations=quantize_activations)
        logits.append(model.forward(ops, config, weights))
        begin += len(chunk)
    return np.concatenate(logits)


def _cpu(model, config, weights, chunks, kv) -> np.ndarray:
    runner = Runner.trunk(native(), model, config, weights)
    pool = Pool(native(), 2)
    runner.allocate(pool)
    state = CpuState(model.state(config), sum(map(len, chunks)), kv, runner.max_rows)
    logits, begin = [], 0
    for chunk in chunks:
        runner.run([Part(state, chunk, begin)])
        logits.append(runner.logits(range(len(chunk))).copy())
        begin += len(chunk)
    runner.close()
    pool.close()
    return np.concatenate(logits)


BACKENDS = ("reference", "cpu")
