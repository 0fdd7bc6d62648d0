"""Matrix products with weights still in their blocks: unpack (remembered up to a byte limit), multiply in float32."""

from collections import OrderedDict

import numpy as np

from tandem.ops.attention import round_to_int8
from tandem.ops.base import Weight
from tandem.quant import unpack_tensor

UNQUANTIZED = {0, 1, 30}  # F32, F16, BF16


class Unpacked:
    """Float32 forms of weights, least recently used dropped first once they exceed limit_bytes."""

    def __init__(self, limit_bytes: int = 2 << 30):
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        # The weight is kept beside its values: it holds the id that is the key.
        self._entries: OrderedDict[tuple[int, int | None], tuple[Weight, np.ndarray]] = OrderedDict()

    def get(self, weight: Weight, expert: int | None = None) -> np.ndarray:
        """The whole weight, or one expert of it, as float32 of its shape; its `scale` is not applied."""
        key = (id(weight), expert)
        if key in self._entries:
            self._entries.move_to_end(key)
            return self._entries[key][1]
        values = unpack_part(weight, ... if expert is None else expert)
        self._entries[key] = (weight, values)
        self.size_bytes += values.nbytes
        while self.size_bytes > self.limit_bytes and len(self._entries) > 1:
            self.size_bytes -= self._entries.popitem(last=False)[1][1].nbytes
        return values


def unpack_part(weight: Weight, part) -> np.ndarray:
    """weight[part] as float32; part indexes the leading axes (an expert, an array of rows, or ... for all)."""
    blocks = np.ascontiguousarray(weight.blocks[part])
    return unpack_tensor(blocks.reshape(-1), weight.ggml_type, (*blocks.shape[:-1], weight.shape[-1]))


def product_scale(weight: Weight, expert: int | None = None) -> np.float32:
    """The companion factor of the weight's products, 1 if it has none."""
    if weight.scale is None:
        return np.float32(1)
    return np.float32(weight.scale[0 if expert is None or len(weight.scale) == 1 else expert])


def multiply(
    x: np.ndarray, weight: Weight, unpacked: Unpacked, expert: int | None = None, *, quantize_activations: bool = False
) -> np.ndarray:
    """x [T, K] @ weight[expert].T, times the weight's scale -> [T, N]; weight [N, K], or [E, N, K] with an expert.

    quantize_activations: x is first rounded to int8 per 32 values if the weight is quantized, as the CPU kernels do.
    """
    if quantize_activations and weight.ggml_type not in UNQUANTIZED:
        x = round_to_int8(x)
    y = x @ unpacked.get(weight, expert).T
    return y if weight.scale is None else y * product_scale(weight, expert)
