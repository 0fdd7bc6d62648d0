"""Trained weights as files of less than 16 MB: bf16, the high bytes (sign and exponent) compressed.

`save` writes `weights.json` (config, tensors) and `weights.NN`; `load` gives float32 tensors back. Two bytes of a
bf16 number behave very differently: exponents repeat, mantissas are noise; compressing only the first is lossless.
"""

import json
import zlib
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from model import Config, Tensors

PART_BYTES = 15_500_000


def save(folder: Path, weights: Tensors, config: Config) -> list[Path]:
    """Writes all weights; returns the paths of the parts."""
    folder.mkdir(parents=True, exist_ok=True)
    flat = torch.cat([t.to(torch.bfloat16).reshape(-1) for t in weights.values()]).view(torch.int16).numpy()
    raw = flat.view(np.uint8).reshape(-1, 2)
    high = zlib.compress(np.ascontiguousarray(raw[:, 1]).tobytes(), 6)
    blob = high + np.ascontiguousarray(raw[:, 0]).tobytes()
    index = {"config": asdict(config), "high_bytes": len(high), "tensors": {n: list(t.shape) for n, t in weights.items()}}
    (folder / "weights.json").write_text(json.dumps(index))
    paths = []
    for number, start in enumerate(range(0, len(blob), PART_BYTES)):
        paths.append(folder / f"weights.{number:02}")
        paths[-1].write_bytes(blob[start : start + PART_BYTES])
    return paths


def load(folder: Path) -> tuple[Tensors, Config]:
    """The weights as float32 and their config."""
    index = json.loads((folder / "weights.json").read_text())
    blob = b"".join(path.read_bytes() for path in sorted(folder.glob("weights.[0-9][0-9]")))
    count = sum(int(np.prod(shape)) for shape in index["tensors"].values())
    raw = np.empty((count, 2), np.uint8)
    raw[:, 1] = np.frombuffer(zlib.decompress(blob[: index["high_bytes"]]), np.uint8)
    raw[:, 0] = np.frombuffer(blob[index["high_bytes"] :], np.uint8)
    flat = torch.from_numpy(raw.reshape(-1).view(np.int16)).view(torch.bfloat16)
    out, start = {}, 0
    for name, shape in index["tensors"].items():
        size = int(np.prod(shape))
        out[name] = flat[start : start + size].float().reshape(shape)
        start += size
    return out, Config(**index["config"])
