"""The `Format` dataclass and the few bit manipulations that every family's layout is made of.

In: uint8 blocks [n, block_bytes]. Out: float32 values [n, block_values], and back.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tandem.gguf import GGML_TYPES

Unpack = Callable[[np.ndarray], np.ndarray]
Pack = Callable[[np.ndarray], np.ndarray]
Settle = Callable[[np.ndarray, np.random.Generator], None]

_IDS = {geometry.name: ggml_type for ggml_type, geometry in GGML_TYPES.items()}


@dataclass(frozen=True)
class Format:
    """One GGUF tensor type: block geometry, and the numpy functions that define its meaning.

    unpack: uint8 [n, block_bytes] -> float32 [n, block_values]. pack: the reverse, for finite float32, or None.
    settle: overwrites the scales inside random blocks with moderate finite ones, in place.
    largest: magnitude up to which `pack` keeps its error; what is beyond saturates, so `pack_tensor` refuses it.
    """

    name: str
    ggml_type: int
    block_values: int
    block_bytes: int
    unpack: Unpack
    pack: Pack | None
    settle: Settle
    largest: float = 65504.0


def define(name: str, unpack: Unpack, settle: Settle, pack: Pack | None = None, **limits: float) -> Format:
    """The Format of a type, with the geometry that the GGUF reader states for that name."""
    geometry = GGML_TYPES[_IDS[name]]
    return Format(name, _IDS[name], geometry.block_values, geometry.block_bytes, unpack, pack, settle, **limits)


def split_bits(packed: np.ndarray, bits: int, run: int) -> np.ndarray:
    """The codes of `bits` bits in uint8 [n, m], as uint8 [n, m * 8 // bits].

    Every `run` bytes hold 8 // bits runs of `run` codes, the first run in the lowest bits: run 1 is plain bit order,
    run 16 is "low nibbles are the first half of 32 values".
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    codes = packed.reshape(len(packed), -1, 1, run) >> shifts & np.uint8(2**bits - 1)
    return codes.reshape(len(packed), -1)


def join_bits(codes: np.ndarray, bits: int, run: int) -> np.ndarray:
    """The inverse of `split_bits`; codes must be below 2**bits."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs = codes.astype(np.uint8).reshape(len(codes), -1, 8 // bits, run) << shifts
    return np.bitwise_or.reduce(runs, axis=2).reshape(len(codes), -1)


def read_half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The f16 at byte `at` of each block, as float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def half_bytes(values: np.ndarray) -> np.ndarray:
    """float32 [n, k] as f16 in uint8 [n, 2k]."""
    return values.astype("<f2").view(np.uint8)


def repeat_scales(scales: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """codes [n, v] times scales [n, k], each scale covering v // k codes in a row; float32 [n, v]."""
    n, count = scales.shape
    return (scales[:, :, None] * codes.reshape(n, count, -1).astype(np.float32)).reshape(n, -1)


def settle_halves(*fields: tuple[int, float]) -> Settle:
    """A `settle` for f16 fields given as (byte offset, factor): each gets factor * d, |d| in 0.5..1.5 * 2**-6."""

    def settle(blocks: np.ndarray, rng: np.random.Generator) -> None:
        scale = rng.uniform(0.5, 1.5, (len(blocks), 1)) * rng.choice([-1, 1], (len(blocks), 1)) * 2.0**-6
        for at, factor in fields:
            blocks[:, at : at + 2] = half_bytes((scale * factor).astype(np.float32))

    return settle
