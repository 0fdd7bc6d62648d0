"""Bytes <-> numbers: every GGUF tensor type that we read, as numpy functions over blocks. They define the meaning.

In: raw blocks of a tensor (`tandem.gguf`). Out: float32. The CPU and GPU kernels are tested against these.
"""

import math
from collections.abc import Sequence

import numpy as np

from tandem.errors import FormatError, ShapeError, nearest
from tandem.quant import floats, iquant, kquant, legacy, mxfp, ternary
from tandem.quant.format import Format

__all__ = ["FORMATS", "Format", "format_by_name", "pack_tensor", "random_blocks", "unpack_tensor"]

FORMATS: dict[int, Format] = {
    f.ggml_type: f for family in (floats, legacy, kquant, iquant, ternary, mxfp) for f in family.FORMATS
}

# Values converted at a time: temporaries stay in the cache and small against the tensor.
_CHUNK_VALUES = 1 << 17


def format_by_name(name: str) -> Format:
    """The Format spelled as GGUF spells it ("Q4_K"), in any case. Raises FormatError naming the nearest."""
    by_name = {f.name: f for f in FORMATS.values()}
    if name.upper() not in by_name:
        raise FormatError(f"{name!r} is not a tensor type that we read{nearest(name.upper(), by_name)}")
    return by_name[name.upper()]


def _format(ggml_type: int) -> Format:
    if ggml_type not in FORMATS:
        known = ", ".join(f"{f.ggml_type} {f.name}" for f in sorted(FORMATS.values(), key=lambda f: f.ggml_type))
        raise FormatError(f"tensor type id {ggml_type} is not one that we read; known: {known}")
    return FORMATS[ggml_type]


def unpack_tensor(blocks: np.ndarray, ggml_type: int, shape: Sequence[int]) -> np.ndarray:
    """The numbers of a whole tensor, float32 of `shape` (slowest dimension first).

    blocks: uint8, the tensor's bytes in file order, any shape. Raises FormatError for a type that we do not read or a
    last dimension that is not whole blocks, ShapeError if the bytes are not what `shape` needs.
    """
    form = _format(ggml_type)
    values = math.prod(shape)
    row = shape[-1] if len(shape) else 1
    if row % form.block_values:
        raise FormatError(f"rows of {row} values are not whole {form.name} blocks of {form.block_values}")
    blocks = np.asarray(blocks)
    if blocks.dtype != np.uint8 or blocks.size * form.block_values != values * form.block_bytes:
        needed = values // form.block_values * form.block_bytes
        raise ShapeError(f"{form.name} {tuple(shape)} needs uint8 [{needed}], got {blocks.dtype} {blocks.shape}")
    rows = np.ascontiguousarray(blocks).reshape(-1, form.block_bytes)
    out = np.empty((len(rows), form.block_values), np.float32)
    step = _CHUNK_VALUES // form.block_values
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(rows), step):
            out[start : start + step] = form.unpack(rows[start : start + step])
    return out.reshape(tuple(shape))


def pack_tensor(values: np.ndarray, ggml_type: int) -> np.ndarray:
    """A whole tensor as uint8 [bytes] in file order.

    values: real numbers, any shape whose last dimension is whole blocks. F16 rounds what is over 65504 to infinity.
    Raises FormatError for a type that we cannot write, rows that are not whole blocks, and, for quantized types, for
    NaN, infinity and magnitudes over `Format.largest`, which no code stands for.
    """
    form = _format(ggml_type)
    if form.pack is None:
        writable = {f.name for f in FORMATS.values() if f.pack}
        raise FormatError(f"{form.name} can be read but not written{nearest(form.name, writable)}")
    values = np.asarray(values)
    if values.ndim and values.shape[-1] % form.block_values:
        raise FormatError(f"rows of {values.shape[-1]} values are not whole {form.name} blocks of {form.block_values}")
    rows = np.ascontiguousarray(values).reshape(-1, form.block_values)
    out = np.empty((len(rows), form.block_bytes), np.uint8)
    step = _CHUNK_VALUES // form.block_values
    with np.errstate(over="ignore"):
        for start in range(0, len(rows), step):
            part = rows[start : start + step].astype(np.float32)
            if form.block_values > 1 and not (np.abs(part) <= form.largest).all():
                worst = part[~(np.abs(part) <= form.largest)][0]
                raise FormatError(f"{form.name} holds magnitudes up to {form.largest:g}, found {worst}")
            out[start : start + step] = form.pack(part)
    return out.reshape(-1)


def random_blocks(ggml_type: int, n: int, rng: np.random.Generator) -> np.ndarray:
    """n valid random blocks, uint8 [n, block_bytes]: every code and small scale is random, f16 scales are finite.

    The values are around 1 in size, of both signs. For tests of kernels and for files with the right shapes.
    """
    form = _format(ggml_type)
    blocks = rng.integers(0, 256, (n, form.block_bytes), np.uint8)
    form.settle(blocks, rng)
    return blocks
