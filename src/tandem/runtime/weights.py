"""From an open GGUF file and a model's tensor table to named weights, still in their blocks in the mapping.

Every tensor of the table must be there with its shape, and nothing else: a file that differs is refused by name.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np

from tandem.errors import FormatError
from tandem.gguf import GGML_TYPES, GGUFFile, TensorInfo
from tandem.models.base import Fused, TensorSpec
from tandem.models.keys import close_name
from tandem.ops.base import Weight
from tandem.quant import FORMATS, unpack_tensor

# Calibrated scales of activations for hardware that multiplies FP4 by FP4; here activations give their own scales.
IGNORED_SUFFIXES = (".input_scale",)


def load_weights(file: GGUFFile, model: ModuleType, config: Any) -> dict[str, Weight]:
    """Weights by their names in the model's table, views of the mapped file; a tied head is the embedding's weight.

    Raises FormatError naming the tensor that is missing, has another shape or an unsupported type, or is left over.
    """
    specs = {spec.name: spec for spec in model.tensors(config)}
    unread = set(file.tensors)
    weights: dict[str, Weight] = {}
    for fusion in model.fused(config):
        if fusion.name in file.tensors:
            weights.update(_split(file, fusion, specs, unread))
    for spec in specs.values():
        if spec.name in file.tensors:
            weights[spec.name] = _read(file, spec, unread)
        elif spec.required and spec.name not in weights:
            raise FormatError(
                f"{spec.name} is missing: a {_architecture(file)} file needs it with shape {_shown(spec.shape)}"
            )
    if "output.weight" in specs:
        weights.setdefault("output.weight", weights["token_embd.weight"])
    _refuse_left_over(unread, specs, _architecture(file))
    return weights


def _architecture(file: GGUFFile) -> str:
    return str(file.metadata.get("general.architecture"))


def _read(file: GGUFFile, spec: TensorSpec, unread: set[str]) -> Weight:
    """One tensor as the table has it, with its companion scale; both leave `unread`."""
    tensor = file.tensors[spec.name]
    _check_type(tensor, spec)
    if _without_ones(tensor.shape) != _without_ones(spec.shape):
        raise FormatError(
            f"{spec.name}: the file says {_shown(tensor.shape)}, the model needs {_shown(spec.shape)}; "
            f"is this a {_architecture(file)} file?"
        )
    unread.discard(spec.name)
    kind = GGML_TYPES[tensor.ggml_type]
    row_bytes = spec.shape[-1] // kind.block_values * kind.block_bytes
    blocks = file.blocks(spec.name).reshape(*spec.shape[:-1], row_bytes)
    return Weight(spec.name, spec.shape, tensor.ggml_type, blocks, _scale(file, spec, unread))


def _check_type(tensor: TensorInfo, spec: TensorSpec) -> None:
    kind = GGML_TYPES[tensor.ggml_type]
    if tensor.ggml_type not in FORMATS:
        names = ", ".join(form.name for form in FORMATS.values())
        raise FormatError(f"{spec.name} has type {kind.name}, which is not supported; supported: {names}")
    if len(spec.shape) == 1 and kind.block_values != 1:
        raise FormatError(f"{spec.name} has type {kind.name}; a vector must be F32, F16 or BF16")
    if spec.shape[-1] % kind.block_values:
        raise FormatError(
            f"{spec.name}: rows of {spec.shape[-1]} values are not whole {kind.name} blocks of {kind.block_values}"
        )


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    # Writers differ in whether they keep dimensions of 1; the bytes are the same.
    return tuple(size for size in shape if size != 1)


def _scale(file: GGUFFile, spec: TensorSpec, unread: set[str]) -> np.ndarray | None:
    """The factor on a matrix's products, float32 [1] or [experts], if the file has one beside it."""
    name = spec.name.removesuffix(".weight") + ".scale"
    if name not in file.tensors or len(spec.shape) < 2:
        return None
    tensor = file.tensors[name]
    values = int(np.prod(tensor.shape))
    allowed = {1, spec.shape[0]} if len(spec.shape) == 3 else {1}
    if values not in allowed or GGML_TYPES[tensor.ggml_type].block_values != 1:
        expected = " or ".join(str(count) for count in sorted(allowed))
        found = f"{GGML_TYPES[tensor.ggml_type].name} {_shown(tensor.shape)}"
        raise FormatError(f"{name}: the file says {found}, the model needs {expected} F32 values")
    unread.discard(name)
    return unpack_tensor(file.blocks(name), tensor.ggml_type, (values,))


def _split(
    file: GGUFFile, fusion: Fused, specs: dict[str, TensorSpec], unread: set[str]
) -> Iterator[tuple[str, Weight]]:
    """The parts of a fused tensor: slices along its rows, without a copy."""
    doubled = next((part for part in fusion.parts if part in file.tensors), None)
    if doubled:
        raise FormatError(f"{fusion.name} and {doubled} are both in the file, one of them is wanted")
    parts = [specs[name] for name in fusion.parts]
    *leading, _, width = parts[0].shape
    rows = sum(part.shape[-2] for part in parts)
    whole = _read(file, TensorSpec(fusion.name, (*leading, rows, width), parts[0].role), unread)
    begin = 0
    for part in parts:
        end = begin + part.shape[-2]
        yield part.name, replace(whole, name=part.name, shape=part.shape, blocks=whole.blocks[..., begin:end, :])
        begin = end


def _refuse_left_over(unread: set[str], specs: Iterable[str], architecture: str) -> None:
    left_over = sorted(name for name in unread if not name.endswith(IGNORED_SUFFIXES))
    if left_over:
        more = f" (and {len(left_over) - 1} more)" if len(left_over) > 1 else ""
        raise FormatError(
            f"{left_over[0]}{more} is in the file, and a {architecture} model of its configuration has no such tensor"
            f"{close_name(left_over[0], specs)}"
        )


def _shown(shape: tuple[int, ...]) -> str:
    """Numpy order (out, in), as everywhere in our messages."""
    return str(list(shape))
