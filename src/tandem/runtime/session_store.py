"""Conversations on disk, so that they survive a restart: idle sessions go out to a folder and come back from it.

One file a conversation: a header of fixed fields, a table of arrays with a CRC-32 each, the arrays. A file of another
model, or one that is broken in any way, is left out with one line in the log.
"""

import contextlib
import hashlib
import logging
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tandem.errors import ShapeError
from tandem.gguf import GGUFFile
from tandem.ops.state_cpu import KvPrefix
from tandem.runtime.session import Checkpoint, Session

MAGIC, VERSION = b"TANDEMCV", 1
SUFFIX = ".conversation"
STALE_S = 3600  # an unfinished file this old belongs to no process that still writes it
KEPT_CHECKPOINTS = 3  # the first, which others may share, and the last ones
MAX_ARRAYS = 1 << 16
_HEADER = struct.Struct("<8sI32s32sIIIqQ")  # magic, version, then the fields of _Contents and the file's bytes
_ENTRY = struct.Struct("<BBHI3Q")  # dtype, dimensions, 0, CRC-32, shape
_DTYPES = (np.dtype(np.uint8), np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.float32))
_log = logging.getLogger("tandem")


class _Unusable(Exception):
    """A file that cannot be used, and why."""


def model_fingerprint(file: GGUFFile) -> bytes:
    """32 bytes that tell models apart: a hash of metadata, tensor table and samples of the weights; not of where the
    file is or when it was written."""
    digest = hashlib.sha256()

    def add(*values: object) -> None:
        for value in values:
            part = value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
            digest.update(struct.pack("<Q", len(part)) + part)

    for key in sorted(file.metadata):
        add(key, file.metadata[key])
    for name in sorted(file.tensors):
        info = file.tensors[name]
        add(name, tuple(info.shape), info.ggml_type)
    names = sorted(file.tensors)
    for name in names[:: max(1, len(names) // 16)]:
        blocks = file.blocks(name)
        add(np.array(blocks[len(blocks) // 2 :][:256]))
    return digest.digest()


class SessionStore:
    """A folder of conversations. cap_bytes: most bytes of all files in it, those of other models included.

    model: `model_fingerprint` of the loaded file. Nothing here raises for what is or is not in the folder or on the
    disk: saving and loading are a convenience, their failures are logged.
    """

    def __init__(self, folder: str | Path, model: bytes, cap_bytes: int | None = None):
        assert len(model) == 32
        self.folder, self.model, self.cap_bytes = Path(folder), model, cap_bytes
        self._known: set[Path] = set()  # files that this process has written or loaded

    def save_all(self, sessions: Sequence[Session]) -> int:
        """Saves these, least recently used first, in place of what this store knew before; returns how many.

        If not all fit the cap, those used last do; files of other models and processes go first, the oldest first.
        """
        kept: list[Session] = []
        left = float("inf") if self.cap_bytes is None else self.cap_bytes
        for session in reversed(sessions):
            size = _saved_bytes(session)
            if not session.tokens:
                continue
            if size <= left:
                kept.insert(0, session)
                left -= size
            else:
                _log.info("conversation of %d tokens not saved: %d bytes, %d left", len(session.tokens), size, left)
        wanted = {self._path(session) for session in kept}
        for path in self._known - wanted:
            _remove(path)
        self._known &= wanted
        self._make_room(wanted, left)
        self._known = {path for session in kept if (path := self._save(session))}
        return len(self._known)

    def load_all(self, make_session: Callable[[], Session], limit: int) -> list[Session]:
        """The saved conversations of this model, those saved last, at most `limit` of them and no more bytes than the
        cap; the least recently used first."""
        self._sweep()
        sessions: list[Session] = []
        left = float("inf") if self.cap_bytes is None else self.cap_bytes
        for path in reversed(self._files(self._prefix)):
            left -= _size(path)
            if len(sessions) >= limit or left < 0:
                break
            session = make_session()
            try:
                with path.open("rb") as file:
                    _load(file, self.model, session)
            except (OSError, _Unusable, ShapeError) as problem:
                session.clear()
                _log.warning("saved conversation %s is not used: %s", path.name, problem)
                continue
            self._known.add(path)
            sessions.insert(0, session)
        return sessions

    @property
    def _prefix(self) -> str:
        return self.model.hex()[:16]

    def _path(self, session: Session) -> Path:
        """Named by model and text: one conversation has one file."""
        tokens = hashlib.sha256(np.asarray(session.tokens, np.int32).tobytes() + _layout(session)).hexdigest()
        return self.folder / f"{self._prefix}-{tokens[:16]}{SUFFIX}"

    def _files(self, prefix: str = "") -> list[Path]:
        """Finished files, oldest first."""
        found = []
        with contextlib.suppress(OSError):
            for path in self.folder.glob(f"{prefix}*{SUFFIX}"):
                with contextlib.suppress(OSError):
                    found.append((path.stat().st_mtime_ns, path))
        return [path for _, path in sorted(found)]

    def _make_room(self, wanted: set[Path], left: float) -> None:
        """Removes the oldest of the other files until they take at most `left` bytes."""
        sizes = {path: _size(path) for path in self._files() if path not in wanted}
        total = sum(sizes.values())
        for path, size in sizes.items():
            if total <= left:
                break
            _remove(path)
            total -= size

    def _save(self, session: Session) -> Path | None:
        """Writes under another name and renames, so that a file is either whole or not there. No fsync: after a power
        cut the checksums tell."""
        path = self._path(session)
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            if path in self._known and path.exists():
                os.utime(path)
                return path
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove(unfinished)
            handle = os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with os.fdopen(handle, "wb") as file:
                _Contents.of(session, self.model).write(file)
            os.replace(unfinished, path)
        except OSError as problem:
            _log.warning("conversation not saved in %s: %s", self.folder, problem)
            _remove(unfinished)
            return None
        return path

    def _sweep(self) -> None:
        """Removes what interrupted saves left behind."""
        with contextlib.suppress(OSError):
            for path in self.folder.glob("*.tmp"):
                with contextlib.suppress(OSError):
                    if path.stat().st_mtime < time.time() - STALE_S:
                        path.unlink()


def _size(path: Path) -> int:
    """Bytes of a file, 0 if it is gone."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _layout(session: Session) -> bytes:
    """32 bytes that tell apart what the arrays of a file mean."""
    return hashlib.sha256(repr((session.state.specs, session.state.kv)).encode()).digest()


def _kept_checkpoints(session: Session) -> list[Checkpoint]:
    """The first and the last ones before the end."""
    checkpoints = [c for c in session.checkpoints if c.length < len(session.tokens)]
    if len(checkpoints) > KEPT_CHECKPOINTS:
        checkpoints = [checkpoints[0], *checkpoints[1 - KEPT_CHECKPOINTS :]]
    return checkpoints


def _saved_bytes(session: Session) -> int:
    """Bytes of the session's file, nearly."""
    caches = session.state.prefix(len(session.tokens)).arrays
    if session.mtp:
        caches += session.mtp.state.prefix(session.mtp.length).arrays
    checkpoints = _kept_checkpoints(session)
    states = sum(c.size_bytes for c in checkpoints) + session.state.recurrent_memory.nbytes
    arrays = len(caches) + 2 * len(checkpoints) + 6
    return sum(a.nbytes for a in caches) + states + 4 * len(session.tokens) + arrays * _ENTRY.size + 4096


@dataclass(frozen=True)
class _Contents:
    """What goes into a file. arrays: tokens; first positions of the trunk's layers, its keys and values; the same of
    the drafts; lengths of the checkpoints, for each its recurrent and hidden state (empty: none), the last is the end.
    trunk, drafts: numbers of arrays of keys and values."""

    model: bytes
    layout: bytes
    arrays: tuple[np.ndarray, ...]
    trunk: int
    drafts: int
    checkpoints: int
    pairs: int  # of the drafts' cache; -1: there is none

    @classmethod
    def of(cls, session: Session, model: bytes) -> "_Contents":
        """Views of the session where possible, valid until its next step."""
        trunk = session.state.prefix(len(session.tokens))
        drafts = session.mtp.cached() if session.mtp else None
        checkpoints = [*_kept_checkpoints(session), session.place()]
        states = []
        for c in checkpoints:
            states += [c.recurrent.reshape(-1), np.empty(0, np.float32) if c.hidden is None else c.hidden.reshape(-1)]
        arrays = (
            np.asarray(session.tokens, np.int32),
            *_cache_arrays(trunk),
            *(_cache_arrays(drafts) if drafts else ()),
            np.asarray([c.length for c in checkpoints], np.int64),
            *states,
        )
        counts = len(trunk.arrays), len(drafts.arrays) if drafts else 0, len(checkpoints)
        return cls(model, _layout(session), arrays, *counts, drafts.length if drafts else -1)

    @property
    def size_bytes(self) -> int:
        table = _HEADER.size + len(self.arrays) * _ENTRY.size + 4
        return table + sum(array.nbytes for array in self.arrays)

    def write(self, file: BinaryIO) -> None:
        counts = self.trunk, self.drafts, self.checkpoints, self.pairs
        header = _HEADER.pack(MAGIC, VERSION, self.model, self.layout, *counts, self.size_bytes)
        table = header + b"".join(map(_entry, self.arrays))
        file.write(table + struct.pack("<I", zlib.crc32(table)))
        for array in self.arrays:
            for piece in _pieces(array):
                file.write(piece)


def _cache_arrays(prefix: KvPrefix) -> tuple[np.ndarray, ...]:
    return np.asarray(prefix.first, np.int64), *prefix.arrays


def _pieces(array: np.ndarray) -> Iterator[memoryview]:
    """The array's bytes in order, without copying it whole."""
    if array.nbytes == 0:
        return
    parts: Iterable[np.ndarray] = [array] if array.flags.c_contiguous else array
    for part in parts:
        yield memoryview(np.ascontiguousarray(part)).cast("B")


def _entry(array: np.ndarray) -> bytes:
    crc = 0
    for piece in _pieces(array):
        crc = zlib.crc32(piece, crc)
    shape = (*array.shape, 0, 0, 0)[:3]
    return _ENTRY.pack(_DTYPES.index(array.dtype), array.ndim, 0, crc, *shape)


def _load(file: BinaryIO, model: bytes, session: Session) -> None:
    """Makes the session what was saved. Raises _Unusable, OSError or ShapeError; the session is then to be cleared."""
    contents = _read(file, model, _layout(session))
    arrays = iter(contents.arrays)
    tokens = _tokens(next(arrays), session)
    trunk = _prefix(arrays, contents.trunk, len(tokens))
    drafts = _prefix(arrays, contents.drafts, contents.pairs) if contents.pairs >= 0 else None
    checkpoints = _checkpoints(arrays, contents.checkpoints, len(tokens), session)
    end = checkpoints.pop()
    if drafts and drafts.length >= len(tokens):
        raise _Unusable(f"{drafts.length} pairs of {len(tokens)} tokens")
    session.clear()
    session.state.load_prefix(trunk)
    session.state.restore(end.recurrent)
    if session.mtp:
        if drafts:
            session.mtp.restore(drafts, len(tokens), end.hidden)
        else:
            session.mtp.cut(len(tokens), end.hidden)
    session.tokens, session.checkpoints = tokens, checkpoints if session.recurrent else []


def _read(file: BinaryIO, model: bytes, layout: bytes) -> _Contents:
    """The contents of a file whose every byte has been checked."""
    size = os.fstat(file.fileno()).st_size
    header = _exactly(file, _HEADER.size)
    magic, version, its_model, its_layout, trunk, drafts, checkpoints, pairs, its_size = _HEADER.unpack(header)
    if (magic, version) != (MAGIC, VERSION):
        raise _Unusable(f"not a conversation of format {VERSION}")
    if its_model != model:
        raise _Unusable("it is another model's")
    if its_layout != layout:
        raise _Unusable("it has another cache type or other layers")
    if its_size != size:
        raise _Unusable(f"{size} bytes, {its_size} expected")
    count = 3 + trunk + 2 * checkpoints + (1 + drafts if pairs >= 0 else 0)
    if count > MAX_ARRAYS or count * _ENTRY.size > size or checkpoints < 1:
        raise _Unusable(f"{count} arrays in {size} bytes")
    table = _exactly(file, count * _ENTRY.size)
    (crc,) = struct.unpack("<I", _exactly(file, 4))
    if zlib.crc32(table, zlib.crc32(header)) != crc:
        raise _Unusable("the header's checksum is wrong")
    left = size - file.tell()
    arrays = []
    for entry in _ENTRY.iter_unpack(table):
        arrays.append(_read_array(file, entry, left))
        left -= arrays[-1].nbytes
    if left:
        raise _Unusable(f"{left} bytes too many")
    return _Contents(model, layout, tuple(arrays), trunk, drafts, checkpoints, pairs)


def _read_array(file: BinaryIO, entry: tuple[int, ...], left: int) -> np.ndarray:
    dtype, dimensions, _, crc, *shape = entry
    if dtype >= len(_DTYPES) or not 1 <= dimensions <= 3:
        raise _Unusable(f"an array of dtype {dtype} with {dimensions} dimensions")
    shape = shape[:dimensions]
    size = _DTYPES[dtype].itemsize
    for extent in shape:
        size *= extent
    if size > left or max(shape) > left:
        raise _Unusable(f"an array of {size} bytes, {left} are left")
    array = np.empty(shape, _DTYPES[dtype])
    if array.nbytes:
        data = memoryview(array).cast("B")
        if file.readinto(data) != len(data):
            raise _Unusable("the file ends too early")
        if zlib.crc32(data) != crc:
            raise _Unusable("a checksum is wrong")
    return array


def _exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise _Unusable("the file ends too early")
    return data


def _tokens(array: np.ndarray, session: Session) -> list[int]:
    if array.dtype != np.int32 or array.ndim != 1 or not 0 < len(array) <= session.ctx:
        raise _Unusable(f"{array.size} tokens, the context holds 1 to {session.ctx}")
    if array.min() < 0 or array.max() >= session.vocab_size:
        raise _Unusable(f"token ids beyond the {session.vocab_size} of the model")
    return array.tolist()


def _prefix(arrays: Iterator[np.ndarray], count: int, length: int) -> KvPrefix:
    first, parts = next(arrays), tuple(next(arrays) for _ in range(count))
    if first.dtype != np.int64 or first.ndim != 1 or len(first) * 2 != count:
        raise _Unusable(f"caches of {first.size} layers, {count} arrays")
    if any(part.dtype != np.uint8 or part.ndim != 3 for part in parts) or np.any((first < 0) | (first > length)):
        raise _Unusable("caches that cannot be")
    return KvPrefix(length, tuple(first.tolist()), parts)


def _checkpoints(arrays: Iterator[np.ndarray], count: int, length: int, session: Session) -> list[Checkpoint]:
    lengths = next(arrays)
    if lengths.dtype != np.int64 or lengths.shape != (count,):
        raise _Unusable(f"{lengths.size} lengths of {count} checkpoints")
    order = lengths.tolist()
    if order != sorted(set(order)) or order[0] < 0 or order[-1] != length:
        raise _Unusable(f"checkpoints at {order[:4]}... of {length} tokens")
    made = []
    for at in order:
        recurrent, hidden = next(arrays), next(arrays)
        if recurrent.dtype != np.uint8 or hidden.dtype != np.float32 or hidden.ndim != 1:
            raise _Unusable("checkpoints that cannot be")
        if session.recurrent and recurrent.shape != session.state.recurrent_memory.shape:
            raise _Unusable(f"a checkpoint of {recurrent.nbytes} bytes")
        made.append(Checkpoint(at, recurrent, hidden if hidden.size else None))
    return made
