"""Records op calls into a program and runs it on a thread pool: buffers are planned once, the number of rows varies by run."""

import ctypes
import threading
from dataclasses import dataclass

import numpy as np

from tandem.errors import EngineError
from tandem.native import Native

ALIGNMENT = 64


class SegmentArgs(ctypes.Structure):
    """Mirror of `Segment` in program.h."""

    _fields_ = [
        ("row_begin", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("start_pos", ctypes.c_int32),
        ("commit_rows", ctypes.c_int32),
        ("layer_state", ctypes.c_void_p),
        ("tentative", ctypes.c_int32),
        ("parity", ctypes.c_int32),
    ]


class StepArgs(ctypes.Structure):
    """Mirror of `Step` in program.h."""

    _fields_ = [
        ("rows", ctypes.c_int32),
        ("n_segments", ctypes.c_int32),
        ("n_out", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("tokens", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("out_rows", ctypes.c_void_p),
        ("segments", ctypes.c_void_p),
    ]


class CallArgs(ctypes.Structure):
    """Mirror of `Call` in program.h."""

    _fields_ = [("fn", ctypes.c_void_p), ("args", ctypes.c_void_p)]


class Pool:
    """Native threads; the calling thread is one of them."""

    def __init__(self, native: Native, threads: int):
        self.native, self.threads = native, threads
        self.handle = native.lib.tandem_pool_create(threads)
        self._busy = threading.Lock()  # closing from another thread waits for the run

    def run(self, calls, count: int, step: StepArgs) -> None:
        """Runs `count` calls, with the interpreter lock released. Raises EngineError if the pool is closed."""
        with self._busy:
            if not self.handle:
                raise EngineError("the engine was closed while it was in use: load it again")
            self.native.lib.tandem_pool_run(self.handle, calls, count, ctypes.byref(step))

    def close(self) -> None:
        """Joins the threads; safe to call twice."""
        with self._busy:
            if self.handle:
                self.native.lib.tandem_pool_destroy(self.handle)
                self.handle = None

    def __del__(self):
        self.close()


@dataclass(eq=False)
class Buffer:
    """Intermediate rows of a program: bytes = rows * row_bytes + fixed_bytes. width counts values of dtype."""

    index: int
    width: int
    dtype: np.dtype
    row_bytes: int
    fixed_bytes: int
    first_call: int | None = None
    last_call: int | None = None
    keep: bool = False
    offset: int = -1

    def size_bytes(self, rows: int) -> int:
        return rows * self.row_bytes + self.fixed_bytes


class Program:
    """A list of op calls with their buffers. Record with `buffer` and `call`, then `finish`, then `run` many times.

    `split` divides the program: the calls before it (trunk) run on all rows of the step, those after it (head) on
    at most max_out chosen rows at a time, as often as the step asks.
    """

    def __init__(self, native: Native, max_rows: int, max_out: int):
        self.native, self.max_rows, self.max_out = native, max_rows, max_out
        self.head_start: int | None = None
        self.input: Buffer | None = None
        self.hidden: Buffer | None = None  # what `split` got
        self.buffers: list[Buffer] = []
        self.calls: list[tuple[int, ctypes.Structure, dict[str, Buffer]]] = []
        self.kept: list[object] = []  # arrays whose addresses the calls hold
        self.arena: np.ndarray | None = None
        self.arena_bytes = 0
        self.entries: dict[str, int] = {}
        self._views: dict[tuple[int, int], np.ndarray] = {}

    def split(self, x: Buffer) -> None:
        """The calls recorded from here on are the head; x is the trunk's last result, kept for every run of the head."""
        if self.head_start is not None:
            raise ValueError("a program has one head")
        self.head_start = len(self.calls)
        x.keep = True
        self.hidden = x

    def buffer(self, width: int, dtype=np.float32, fixed_bytes: int = 0) -> Buffer:
        """A new intermediate of `width` values a row, plus fixed_bytes; contents undefined until a call writes it."""
        dtype = np.dtype(dtype)
        made = Buffer(len(self.buffers), width, dtype, width * dtype.itemsize, fixed_bytes)
        self.buffers.append(made)
        return made

    def input_rows(self, width: int) -> Buffer:
        """The rows [T, width] float32 that the caller writes into `rows(program.input, T)` before each run."""
        if self.input is not None:
            raise ValueError("a program has one input")
        self.input = self.buffer(width)
        self.input.first_call = 0
        return self.input

    def address(self, array: np.ndarray) -> int:
        """Address of an array that must outlive the program; the program keeps it."""
        self.kept.append(array)
        return array.ctypes.data

    def call(self, name: str, args: ctypes.Structure, **buffers: Buffer) -> None:
        """Record op `name`. Each keyword is a pointer field of args and the buffer it will point to."""
        if name not in self.entries:
            self.entries[name] = self.native.op(name, type(args))
        here = len(self.calls)
        for used in buffers.values():
            used.first_call = here if used.first_call is None else used.first_call
            used.last_call = here
        self.calls.append((self.entries[name], args, buffers))

    def place(self, keep: tuple[Buffer, ...] = ()) -> int:
        """Places the buffers in one arena, those with disjoint lifetimes in the same memory; returns its bytes.

        Greedy interval placement, largest buffer first. `keep` stay readable after a run.
        """
        for kept in keep:
            kept.keep = True
        placed: list[tuple[int, int, int, int]] = []  # offset, end, first, last
        live = [b for b in self.buffers if b.first_call is not None]
        for b in sorted(live, key=lambda b: -self._size_bytes(b)):
            last = len(self.calls) if b.keep else b.last_call
            size = -(-self._size_bytes(b) // ALIGNMENT) * ALIGNMENT + ALIGNMENT
            offset = 0
            for o, end, first, until in sorted(placed):
                if first <= last and b.first_call <= until and o < offset + size and offset < end:
                    offset = end
            b.offset = offset
            placed.append((offset, offset + size, b.first_call, last))
        self.arena_bytes = max((end for _, end, _, _ in placed), default=0) + ALIGNMENT
        return self.arena_bytes

    def _size_bytes(self, b: Buffer) -> int:
        in_head = self.head_start is not None and b.first_call >= self.head_start
        return b.size_bytes(self.max_out if in_head else self.max_rows)

    def finish(self) -> None:
        """Allocates the arena (after `place`) and fixes all addresses."""
        self.arena = np.zeros(self.arena_bytes, np.uint8)
        self.base_offset = -self.arena.ctypes.data % ALIGNMENT
        base = self.arena.ctypes.data + self.base_offset
        self.call_array = (CallArgs * len(self.calls))()
        for slot, (entry, args, buffers) in zip(self.call_array, self.calls, strict=True):
            for field, used in buffers.items():
                setattr(args, field, base + used.offset)
            slot.fn, slot.args = entry, ctypes.addressof(args)

    def rows(self, buffer: Buffer, n: int) -> np.ndarray:
        """View of a kept buffer's first n rows, [n, width]; the next run overwrites it."""
        view = self._views.get((buffer.index, n))
        if view is None:
            start = self.base_offset + buffer.offset
            view = self.arena[start : start + n * buffer.row_bytes].view(buffer.dtype).reshape(n, buffer.width)
            if n <= self.max_out:
                self._views[buffer.index, n] = view
        return view

    def release(self) -> None:
        """Frees the arena; views of it that are still held keep it alive."""
        self.arena, self._views = None, {}

    def run_trunk(self, pool: Pool, step: StepArgs) -> None:
        """Runs the calls before the split on all rows of the step; blocks, with the interpreter lock released."""
        assert 0 < step.rows <= self.max_rows
        self._run(pool, step, 0, len(self.calls) if self.head_start is None else self.head_start)

    def run_head(self, pool: Pool, step: StepArgs) -> None:
        """Runs the calls after the split; step.rows = step.n_out rows, chosen by step.out_rows from the last trunk run."""
        assert self.head_start is not None and 0 < step.rows == step.n_out <= self.max_out
        self._run(pool, step, self.head_start, len(self.calls))

    def run_all(self, pool: Pool, step: StepArgs) -> None:
        """Trunk and head in one go, for steps that want every row's output: step.out_rows counts up from 0."""
        assert 0 < step.rows == step.n_out <= self.max_out
        self._run(pool, step, 0, len(self.calls))

    def _run(self, pool: Pool | None, step: StepArgs, begin: int, end: int) -> None:
        arena = self.arena  # stays alive for the run, should another thread release it
        if arena is None or pool is None:
            raise EngineError("the engine was closed while it was in use: load it again")
        calls = ctypes.byref(self.call_array, begin * ctypes.sizeof(CallArgs))
        pool.run(calls, end - begin, step)
