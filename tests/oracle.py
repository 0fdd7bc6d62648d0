"""Logits of `transformers`: computed where it is installed, else the samples of them in `recorded_logits.npz`.

With transformers installed, RECORD_LOGITS=1 makes a run of the model tests write its samples into that file.
"""

import importlib.util
import os
import zlib
from pathlib import Path

import numpy as np
from tiny_models import to_transformers

RECORDED = Path(__file__).parent / "recorded_logits.npz"
SAMPLE = np.s_[::17, ::5]  # rows and columns that are recorded
RECORDING = bool(os.environ.get("RECORD_LOGITS"))
INSTALLED = all(importlib.util.find_spec(name) for name in ("transformers", "torch"))
_computed: dict[str, np.ndarray] = {}


def check(got: np.ndarray, path: Path, tokens: np.ndarray, **config_changes) -> float:
    """Relative RMS error of logits [T, vocab] to those of transformers for the file (whose name tells its contents)."""
    key = f"{path.stem}-{zlib.crc32(repr(config_changes).encode()):08x}"
    if not INSTALLED:
        with np.load(RECORDED) as recorded:
            return relative_error(got[SAMPLE], recorded[key])
    if key not in _computed:
        _computed[key] = _compute(path, tokens, config_changes)
        _compare_with_recording(key)
    return relative_error(got, _computed[key])


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square of the difference over that of the expected."""
    assert got.shape == expected.shape
    return float(np.sqrt(np.mean(np.square(got - expected)) / np.mean(np.square(expected))))


def _compute(path: Path, tokens: np.ndarray, config_changes: dict) -> np.ndarray:
    import torch

    torch.set_num_threads(1)
    with torch.no_grad():
        return to_transformers(path, **config_changes)(torch.from_numpy(tokens)[None]).logits[0].numpy()


def _compare_with_recording(key: str) -> None:
    sample = _computed[key][SAMPLE]
    recorded = dict(np.load(RECORDED)) if RECORDED.exists() else {}
    if RECORDING:
        np.savez_compressed(RECORDED, **recorded | {key: sample})
        return
    assert key in recorded, f"{key} is not in {RECORDED.name}: run once with RECORD_LOGITS=1"
    assert relative_error(sample, recorded[key]) < 1e-5, f"{RECORDED.name} is out of date: remove it and record again"
