"""The state of one sequence on the CPU: caches of attention layers, recurrent state of DeltaNet layers, their pointers.

In: the state specs of a model. Out: the segments of a step, with the table of pointers that they carry.

Tentative rows (drafts to be verified) leave the recurrent state as it was and log what they would do to it; of these,
the next segment applies those that `accept` said count. Attention caches are simply overwritten.

Memory takes RAM where positions have been written, and gives it back on `release`.
"""

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tandem.errors import PlanError, SettingError, ShapeError, nearest
from tandem.native import Native, native
from tandem.ops.program import SegmentArgs

ALIGNMENT = 64
WINDOW_SLACK = 256  # positions kept beyond the window, so that a sequence can go back a little
MAX_TENTATIVE = 8  # as the chunk of delta.cpp allows, and as many rows as have the bits of rows alone
KV_TYPES = {"f32": 0, "f16": 1, "q8_0": 8}


class KvView(ctypes.Structure):
    """Mirror of KvView in program.h."""

    _fields_ = [
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("capacity", ctypes.c_int64),
        ("type", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class DeltaView(ctypes.Structure):
    """Mirror of DeltaView in program.h."""

    _fields_ = [
        ("conv", ctypes.c_void_p),
        ("state", ctypes.c_void_p),
        ("conv_log", ctypes.c_void_p),
        ("rule_log", ctypes.c_void_p),
        ("log_rows", ctypes.c_int64),
    ]


def is_recurrent(spec) -> bool:
    """Whether a layer's spec is DeltaState; by its fields, since `models` comes after `ops` in the import order."""
    return hasattr(spec, "conv_width")


def capacity(spec, ctx: int, max_rows: int) -> int:
    """Positions a layer's cache holds: all of ctx, or what a window and one step need and WINDOW_SLACK more."""
    return ctx if spec.window is None else min(ctx, spec.window + max_rows + WINDOW_SLACK)


def size_bytes(specs: Sequence, ctx: int, kv: str, max_rows: int, max_tentative: int = 0) -> int:
    """Bytes of CpuState with the same arguments, without allocating it."""
    parts: list[int] = [ALIGNMENT]
    for spec in specs:
        if is_recurrent(spec):
            parts += *_delta_bytes(spec), *_log_bytes(spec, max_tentative)
        else:
            parts += _kv_bytes(spec, ctx, kv, max_rows)
    return sum(map(_aligned, parts))


@dataclass(frozen=True)
class KvPrefix:
    """The attention caches of a sequence's first `length` positions: keys, then values of each attention layer, uint8
    [heads, length - first, bytes]. `first` has each layer's first position: a ring has lost those before it."""

    length: int
    first: tuple[int, ...]
    arrays: tuple[np.ndarray, ...]


class CpuState:
    """State of one sequence, in one allocation, zero at first.

    specs: KvState | DeltaState per layer; ctx: most positions; kv: "f16", "q8_0" or "f32"; max_rows: most rows a step;
    max_tentative: most rows of a tentative segment. library: the one whose ops advance the state, if not the best.
    `layer_state` is the address of the pointer table. Raises SettingError for a kv type that is unknown or does not fit
    the head dimensions, PlanError if the system has not as much address space.
    """

    def __init__(
        self,
        specs: Sequence,
        ctx: int,
        kv: str = "f16",
        max_rows: int = 512,
        max_tentative: int = 0,
        library: Native | None = None,
    ):
        assert 0 <= max_tentative <= MAX_TENTATIVE
        self.specs, self.ctx, self.kv = tuple(specs), ctx, kv
        self.max_rows, self.max_tentative = max_rows, max_tentative
        self.size_bytes = size_bytes(specs, ctx, kv, max_rows, max_tentative)
        self._mapping = _lazy_memory(self.size_bytes)
        self.memory = np.frombuffer(self._mapping, np.uint8)
        self._used = -self.memory.ctypes.data % ALIGNMENT
        begin = self._used
        self.views: list[KvView | DeltaView] = [
            self._delta_view(spec) if is_recurrent(spec) else KvView() for spec in self.specs
        ]
        self.recurrent_memory = self.memory[begin : self._used]
        self._place_kv()
        self._place_logs()
        self.table = (ctypes.c_void_p * len(self.views))(*map(ctypes.addressof, self.views))
        self.layer_state = ctypes.addressof(self.table)
        self._written = 0  # positions ever written since the last reset: they have replaced older ones in the rings
        self._touched = 0  # positions that take RAM
        self._tentative_rows: int | None = None  # of a tentative segment that `accept` has not judged yet
        self._pending_rows = 0  # accepted rows of the log that are yet to be applied
        self._log_half = 0  # where the next tentative segment writes
        self._commit = _commit_entry(library or native()) if max_tentative and self.recurrent else None

    def _take(self, size: int) -> int:
        address = self.memory.ctypes.data + self._used
        self._used += _aligned(size)
        return address

    def _delta_view(self, spec) -> DeltaView:
        conv, state = _delta_bytes(spec)
        return DeltaView(self._take(conv), self._take(state), log_rows=self.max_tentative)

    def _place_kv(self) -> None:
        for spec, view in self._attention_layers():
            k_bytes, v_bytes = _kv_bytes(spec, self.ctx, self.kv, self.max_rows)
            view.k, view.v = self._take(k_bytes), self._take(v_bytes)
            view.capacity, view.type = capacity(spec, self.ctx, self.max_rows), KV_TYPES[self.kv]

    def _place_logs(self) -> None:
        for spec, view in self._delta_layers():
            conv_bytes, rule_bytes = _log_bytes(spec, self.max_tentative)
            view.conv_log, view.rule_log = self._take(conv_bytes), self._take(rule_bytes)

    def segment(self, row_begin: int, rows: int, start_pos: int, tentative: bool = False) -> SegmentArgs:
        """`rows` rows of a step from row_begin on, the first at position start_pos of this sequence; to be run once.

        After tentative rows, `accept` must be called before the next segment. Raises ShapeError if the rows do not fit
        the context or a step.
        """
        if not 0 < rows <= self.max_rows or start_pos < 0 or start_pos + rows > self.ctx:
            raise ShapeError(
                f"positions {start_pos}..{start_pos + rows - 1}: the state holds 0..{self.ctx - 1}, "
                f"1 to {self.max_rows} rows a step"
            )
        assert self._tentative_rows is None, "tentative rows wait for accept"
        assert not tentative or not self.recurrent or rows <= self.max_tentative
        made = SegmentArgs(
            row_begin=row_begin,
            rows=rows,
            start_pos=start_pos,
            commit_rows=self._pending_rows,
            layer_state=self.layer_state,
            tentative=tentative,
            parity=self._log_half,
        )
        self._written = max(self._written, start_pos + rows)
        self._touched = max(self._touched, self._written)
        self._pending_rows = 0
        if tentative:
            self._tentative_rows = rows
            self._log_half ^= 1
        return made

    def accept(self, rows: int) -> None:
        """Of the last segment, which was tentative, the first `rows` rows count; the others have never been."""
        assert self._tentative_rows is not None and 0 <= rows <= self._tentative_rows
        self._tentative_rows = None
        self._pending_rows = rows if self.recurrent else 0

    @property
    def recurrent(self) -> bool:
        """Whether there are recurrent layers, whose state can only be restored from a snapshot."""
        return self.recurrent_memory.size > 0

    def snapshot(self) -> np.ndarray:
        """A copy of the recurrent part (empty without recurrent layers)."""
        assert self._tentative_rows is None, "tentative rows wait for accept"
        self._apply_pending()
        return self.recurrent_memory.copy()

    def restore(self, snapshot: np.ndarray) -> None:
        """Makes the recurrent part what it was at the snapshot. Raises ShapeError if it is another model's."""
        if snapshot.shape != self.recurrent_memory.shape:
            raise ShapeError(f"snapshot of {snapshot.nbytes} bytes, this state's has {self.recurrent_memory.nbytes}")
        self.recurrent_memory[:] = snapshot
        self._tentative_rows, self._pending_rows = None, 0

    def _apply_pending(self) -> None:
        if self._pending_rows:
            for spec, view in self._delta_layers():
                sizes = spec.num_v_heads, spec.key_dim, spec.conv_channels, spec.conv_width
                self._commit(ctypes.addressof(view), *sizes, self._pending_rows, self._log_half ^ 1)
        self._pending_rows = 0

    def can_cut(self, length: int, to: int) -> bool:
        """Whether the attention caches, filled to `length`, still hold all that the token at position `to` reads."""
        self._written = max(self._written, length)
        windows = [(spec.window, view.capacity) for spec, view in self._attention_layers() if spec.window is not None]
        return all(max(0, to - window + 1) >= self._written - kept for window, kept in windows)

    def reset(self) -> None:
        """Makes the state that of an empty sequence."""
        self.recurrent_memory[:] = 0
        self._forget()

    def release(self) -> None:
        """`reset`, and all RAM goes back to the system (on Linux); the state can be used again."""
        if sys.platform != "linux":
            return self.reset()
        self._mapping.madvise(mmap.MADV_DONTNEED)
        self._forget()
        self._touched = 0

    def _forget(self) -> None:
        self._written = 0
        self._tentative_rows, self._pending_rows = None, 0

    def resident_bytes(self, length: int) -> int:
        """RAM that the state takes once the sequence has been `length` long, in whole pages; 0 for 0."""
        if not length:
            return 0
        total = self.recurrent_memory.nbytes
        total += sum(sum(_log_bytes(spec, self.max_tentative)) for spec, _ in self._delta_layers())
        for spec, view in self._attention_layers():
            rows = min(length, view.capacity)
            for part in _kv_bytes(spec, self.ctx, self.kv, self.max_rows):
                total += spec.num_kv_heads * _in_pages(part // view.capacity // spec.num_kv_heads * rows)
        return total

    @property
    def held_bytes(self) -> int:
        """RAM that the state takes now: cutting a sequence frees none, `release` all."""
        return self.resident_bytes(self._touched)

    def prefix(self, length: int) -> KvPrefix:
        """The attention caches of the first `length` positions; views where these are contiguous, valid until the next
        step. `can_cut` must hold for it."""
        assert self.can_cut(length, length)
        first, arrays = [], []
        for spec, view in self._attention_layers():
            first.append(max(0, self._written - view.capacity))
            arrays += [_read_slots(cache, first[-1], length) for cache in self._caches(spec, view)]
        return KvPrefix(length, tuple(first), tuple(arrays))

    def load_prefix(self, prefix: KvPrefix) -> None:
        """Makes the attention caches those of that prefix; the recurrent part is the caller's to `restore`.

        Raises ShapeError, before anything is written, if the prefix is another model's or does not fit.
        """
        self._check_prefix(prefix)
        self._forget()
        self._written = prefix.length
        arrays = iter(prefix.arrays)
        for (spec, view), first in zip(self._attention_layers(), prefix.first, strict=True):
            if first:  # what a ring has lost must look replaced
                self._written = max(self._written, first + view.capacity)
            for cache in self._caches(spec, view):
                _write_slots(cache, next(arrays), prefix.length)
        self._touched = max(self._touched, prefix.length)

    def copy_prefix(self, other: "CpuState", length: int) -> None:
        """`load_prefix` of another state of the same model."""
        self.load_prefix(other.prefix(length))

    def _check_prefix(self, prefix: KvPrefix) -> None:
        layers = self._attention_layers()
        expected = [
            (spec.num_kv_heads, prefix.length - first, cache.shape[2])
            for (spec, view), first in zip(layers, prefix.first, strict=False)
            for cache in self._caches(spec, view)
        ]
        found = [array.shape for array in prefix.arrays]
        if len(prefix.first) != len(layers) or found != expected or prefix.length > self.ctx:
            raise ShapeError(
                f"a cache of {prefix.length} positions and {len(prefix.first)} layers, arrays {found[:2]}...: this "
                f"state has {len(layers)} layers of {expected[:2]}... and holds {self.ctx} positions"
            )

    def _caches(self, spec, view: KvView) -> list[np.ndarray]:
        """Keys and values of a layer, uint8 [heads, capacity, bytes]."""
        sizes = _kv_bytes(spec, self.ctx, self.kv, self.max_rows)
        starts = (address - self.memory.ctypes.data for address in (view.k, view.v))
        return [
            self.memory[start : start + size].reshape(spec.num_kv_heads, view.capacity, -1)
            for start, size in zip(starts, sizes, strict=True)
        ]

    def _attention_layers(self) -> list[tuple]:
        return [(s, v) for s, v in zip(self.specs, self.views, strict=True) if not is_recurrent(s)]

    def _delta_layers(self) -> list[tuple]:
        return [(s, v) for s, v in zip(self.specs, self.views, strict=True) if is_recurrent(s)]


def _commit_entry(library: Native):
    """The library's function that applies logged rows to one layer's state."""
    entry = library.lib.tandem_delta_commit
    entry.argtypes, entry.restype = [ctypes.c_void_p] + 6 * [ctypes.c_int32], None
    return entry


def _lazy_memory(size: int) -> mmap.mmap:
    """Zero bytes that take RAM only where they are written, by small pages: huge ones would give every head of every
    layer two megabytes, and reading the caches is no faster with them."""
    try:
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as refused:
        raise PlanError(
            f"the system refuses {size} bytes for a sequence's state ({refused.strerror}): choose a smaller ctx"
        ) from None
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_NOHUGEPAGE)
    return mapping


def _read_slots(cache: np.ndarray, first: int, end: int) -> np.ndarray:
    """Positions [first, end) of a ring [heads, capacity, bytes]; a view where they are contiguous."""
    capacity = cache.shape[1]
    begin, count = first % capacity, end - first
    if begin + count <= capacity:
        return cache[:, begin : begin + count]
    return np.concatenate((cache[:, begin:], cache[:, : begin + count - capacity]), axis=1)


def _write_slots(cache: np.ndarray, rows: np.ndarray, end: int) -> None:
    """Rows [heads, n, bytes] of the n positions before `end` into a ring, the last ones if not all fit."""
    capacity = cache.shape[1]
    rows = rows[:, max(0, rows.shape[1] - capacity) :]
    begin = (end - rows.shape[1]) % capacity
    fitting = min(rows.shape[1], capacity - begin)
    cache[:, begin : begin + fitting] = rows[:, :fitting]
    cache[:, : rows.shape[1] - fitting] = rows[:, fitting:]


def _in_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _delta_bytes(spec) -> tuple[int, int]:
    """Bytes of the conv tail and of the state."""
    return (
        4 * (spec.conv_width - 1) * spec.conv_channels,
        4 * spec.num_v_heads * spec.key_dim * spec.value_dim,
    )


def _log_bytes(spec, max_tentative: int) -> tuple[int, int]:
    """Bytes of the log of the convolution, and of the two halves of the rule's log (LogRow of delta.cpp)."""
    row_bytes = _aligned(4 * (spec.key_dim + spec.value_dim + 1))
    return 4 * max_tentative * spec.conv_channels, 2 * max_tentative * spec.num_v_heads * row_bytes


def _kv_bytes(spec, ctx: int, kv: str, max_rows: int) -> tuple[int, int]:
    """Bytes of the keys and of the values."""
    if kv not in KV_TYPES:
        raise SettingError(f"kv cache type {kv!r} is unknown{nearest(kv, KV_TYPES)}")
    if kv == "q8_0" and (spec.key_dim % 32 or spec.value_dim % 32):
        raise SettingError(
            f"kv cache q8_0 needs heads of whole 32 values, not {spec.key_dim} and {spec.value_dim}; use f16"
        )
    rows = spec.num_kv_heads * capacity(spec, ctx, max_rows)
    widths = (spec.key_dim, spec.value_dim)
    return tuple(rows * {"f32": 4 * n, "f16": 2 * n, "q8_0": n // 32 * 34}[kv] for n in widths)
