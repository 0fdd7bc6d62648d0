"""Reading a model's configuration: typed look-ups of `<architecture>.<key>` metadata that fail by naming the key."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from tandem.errors import FormatError, nearest

MAX_LAYERS = 1024  # far above any model; bounds what a hostile file can make us build
_REQUIRED: Any = object()


class Keys:
    """Metadata under one architecture's prefix. All look-ups raise FormatError for a missing key or a bad value."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str):
        self.metadata = metadata
        self.architecture = architecture
        self.block_count = self.integer("block_count")
        if self.block_count > MAX_LAYERS:
            raise FormatError(f"{architecture}.block_count is {self.block_count}, at most {MAX_LAYERS} is supported")

    def integer(self, key: str, default: Any = _REQUIRED, *, least: int = 1) -> Any:
        """A whole number of at least `least`, or the default."""
        return self._look_up(key, default, lambda value: self._whole(key, value, least))

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        """A finite number above zero as float, or the default."""
        return self._look_up(key, default, lambda value: self._positive(key, value))

    def text(self, key: str, default: Any = _REQUIRED) -> Any:
        """A string, or the default."""
        return self._look_up(
            key, default, lambda value: value if isinstance(value, str) else self._bad(key, "a string")
        )

    def per_layer(self, key: str, default: Any = _REQUIRED, *, least: int = 1) -> Any:
        """A whole number for each block: an array of block_count entries, or one number that holds for all."""

        def convert(value: Any) -> tuple[int, ...]:
            if not isinstance(value, np.ndarray):
                return (self._whole(key, value, least),) * self.block_count
            if len(value) != self.block_count:
                self._bad(key, f"one value or {self.block_count}, one per block")
            return tuple(self._whole(key, entry, least) for entry in value.tolist())

        return self._look_up(key, default, convert)

    def same_in(self, key: str, layers: Iterable[int], default: Any = _REQUIRED) -> Any:
        """The one whole number that all `layers` have: arrays may hold anything (0, as a rule) for other layers."""
        values = self.per_layer(key, default, least=0)
        if values is default:
            return default
        distinct = {values[layer] for layer in layers}
        if len(distinct) != 1:
            self._bad(key, "the same in every layer that it describes")
        return self._whole(key, distinct.pop(), 1)

    def array(self, key: str, default: Any = _REQUIRED) -> Any:
        """A numeric or boolean array, as a list of Python values, or the default."""
        return self._look_up(
            key, default, lambda value: value.tolist() if isinstance(value, np.ndarray) else self._bad(key, "an array")
        )

    def allow(self, key: str, *allowed: Any) -> None:
        """Refuse the file if the key is present with a value that changes the maths in a way that is not supported."""
        value = self.metadata.get(f"{self.architecture}.{key}", allowed[0])
        if isinstance(value, np.ndarray) or value not in allowed:
            self._bad(key, " or ".join(str(entry) for entry in allowed))

    def vocab_size(self, tensors: Mapping[str, Any]) -> int:
        """Number of tokens: of the tokenizer, else of `<architecture>.vocab_size`, else rows of token_embd.weight."""
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        if tokens is not None:
            return len(tokens)
        embedding = tensors.get("token_embd.weight")
        return self.integer("vocab_size", _REQUIRED if embedding is None else embedding.shape[0])

    def rotated_dims(self, head_dim: int, *, whole: bool = False) -> int:
        """`rope.dimension_count`: even, at most head_dim (its default); whole: only head_dim will do."""
        dims = self.integer("rope.dimension_count", head_dim)
        if dims % 2 or dims > head_dim or (whole and dims != head_dim):
            self._bad("rope.dimension_count", f"{head_dim}" if whole else f"an even number up to head dim {head_dim}")
        return dims

    def _look_up(self, key: str, default: Any, convert: Callable[[Any], Any]) -> Any:
        name = f"{self.architecture}.{key}"
        if name in self.metadata:
            return convert(self.metadata[name])
        if default is _REQUIRED:
            present = [other for other in self.metadata if other.startswith(f"{self.architecture}.")]
            raise FormatError(
                f"metadata key {name} is missing: a {self.architecture} model needs it{close_name(name, present)}"
            )
        return default

    def _whole(self, key: str, value: Any, least: int) -> int:
        whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
        return int(value) if whole and value >= least else self._bad(key, f"a whole number of at least {least}")

    def _positive(self, key: str, value: Any) -> float:
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if numeric and 0 < value < float("inf") else self._bad(key, "a finite number above 0")

    def _bad(self, key: str, expected: str) -> Any:
        name = f"{self.architecture}.{key}"
        shown = repr(self.metadata.get(name))
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        raise FormatError(f"metadata key {name} is {shown}, supported: {expected}")


def close_name(name: str, valid: Iterable[str]) -> str:
    """The hint of `errors.nearest` if one name is close, else nothing: lists of all names would run to pages."""
    hint = nearest(name, valid)
    return hint if "did you mean" in hint else ""
