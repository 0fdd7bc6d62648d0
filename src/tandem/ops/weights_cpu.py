"""Small weights as float32 for the C++ ops: the file's own memory where it is that, else a copy the program keeps."""

import numpy as np

from tandem.errors import ShapeError
from tandem.ops.base import Weight
from tandem.ops.program import Program
from tandem.quant import unpack_tensor

F32 = 0


def float_values(weight: Weight) -> np.ndarray:
    """The weight as a contiguous, aligned float32 array of its shape; `scale` is not applied."""
    blocks = weight.blocks
    if weight.ggml_type == F32 and blocks.flags.c_contiguous and blocks.ctypes.data % 4 == 0:
        return blocks.reshape(-1).view(np.float32).reshape(weight.shape)
    return unpack_tensor(np.ascontiguousarray(blocks).reshape(-1), weight.ggml_type, weight.shape)


def float_address(program: Program, weight: Weight, *shape: int) -> int:
    """Address of the weight's float32 values, kept by the program. Raises ShapeError if `shape` has another number."""
    if np.prod(weight.shape, dtype=np.int64) != np.prod(shape, dtype=np.int64):
        raise ShapeError(f"{weight.name}: shape {weight.shape}, the op needs {shape}")
    return program.address(float_values(weight))


def product_scale(weight: Weight) -> float:
    """The companion factor of the weight's products, 1 if it has none."""
    return 1.0 if weight.scale is None else float(weight.scale[0])
