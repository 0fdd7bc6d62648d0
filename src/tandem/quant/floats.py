"""Plain float types: F32, F16, BF16. One value is one block."""

from math import inf

import numpy as np

from tandem.quant.format import define


def unpack_f32(blocks: np.ndarray) -> np.ndarray:
    """uint8 [n, 4] -> float32 [n, 1]."""
    return np.ascontiguousarray(blocks).view("<f4").astype(np.float32)


def pack_f32(values: np.ndarray) -> np.ndarray:
    """float32 [n, 1] -> uint8 [n, 4]."""
    return np.ascontiguousarray(values, "<f4").view(np.uint8)


def unpack_f16(blocks: np.ndarray) -> np.ndarray:
    """uint8 [n, 2] -> float32 [n, 1]."""
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float32)


def pack_f16(values: np.ndarray) -> np.ndarray:
    """float32 [n, 1] -> uint8 [n, 2], to nearest even; over 65504 becomes infinite."""
    return np.ascontiguousarray(values, "<f2").view(np.uint8)


def unpack_bf16(blocks: np.ndarray) -> np.ndarray:
    """uint8 [n, 2] -> float32 [n, 1]: the upper 16 bits of a float32."""
    return (np.ascontiguousarray(blocks).view("<u2").astype(np.uint32) << 16).view(np.float32)


def pack_bf16(values: np.ndarray) -> np.ndarray:
    """float32 [n, 1] -> uint8 [n, 2], to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = bits + 0x7FFF + (bits >> 16 & 1)
    # A NaN whose payload lies in the low half would round to infinity: keep it and set the quiet bit.
    rounded = np.where((bits & 0x7FFFFFFF) > 0x7F800000, bits | 0x400000, rounded)
    return (rounded >> 16).astype("<u2").view(np.uint8)


def _settle_with(pack):
    def settle(blocks: np.ndarray, rng: np.random.Generator) -> None:
        blocks[:] = pack(rng.standard_normal((len(blocks), 1), np.float32))

    return settle


FORMATS = (
    define("F32", unpack_f32, _settle_with(pack_f32), pack_f32, largest=inf),
    define("F16", unpack_f16, _settle_with(pack_f16), pack_f16, largest=inf),
    define("BF16", unpack_bf16, _settle_with(pack_bf16), pack_bf16, largest=inf),
)
