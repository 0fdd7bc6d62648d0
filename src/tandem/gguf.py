"""GGUF files: in comes a path, out come metadata and read-only views of the tensors, straight from the mapping; and
the writer for our own files.

Every count, length and offset in the file is checked against the bytes that are there before it is used, so a broken
or hostile file costs bounded time and memory and ends in a FormatError that names the file, the thing and the byte.
"""

import mmap
import os
import re
import shutil
import stat
import struct
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from tandem.errors import FormatError, ShapeError


class GGMLType(NamedTuple):
    """Geometry of one tensor type: `block_values` weights are stored in `block_bytes` bytes."""

    name: str
    block_values: int
    block_bytes: int


GGML_TYPES: dict[int, GGMLType] = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1),
    25: GGMLType("I16", 1, 2),
    26: GGMLType("I32", 1, 4),
    27: GGMLType("I64", 1, 8),
    28: GGMLType("F64", 1, 8),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
    40: GGMLType("NVFP4", 64, 36),
    41: GGMLType("Q1_0", 128, 18),
    42: GGMLType("Q2_0", 64, 18),
}

_REFUSED_TYPES = {
    **dict.fromkeys((9, 15), "is a format for activations, not for stored tensors"),
    **dict.fromkeys((4, 5, 31, 32, 33, 36, 37, 38), "was removed from the format; convert the model again"),
}

# Metadata value type id -> dtype of scalars and array elements; strings and arrays have no dtype.
_VALUE_DTYPES = {
    0: np.dtype("<u1"), 1: np.dtype("<i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"), 4: np.dtype("<u4"),
    5: np.dtype("<i4"), 6: np.dtype("<f4"), 7: np.dtype("?"), 10: np.dtype("<u8"), 11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}  # fmt: skip
_VALUE_TYPES = {dtype: type_id for type_id, dtype in _VALUE_DTYPES.items()}
_UINT32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9

DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_MAX_KEY_BYTES = 65535  # limit of the format
_MAX_NAME_BYTES = 64  # limit of the format
# The largest real headers are about 20 MB; the limits keep a sparse file of terabytes from filling RAM.
_MAX_HEADER_BYTES = 64 << 20
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 17
_MAX_SHARDS = 4096
_MAX_ALIGNMENT = 64 << 10
_MAX_TAIL_BYTES = 64 << 10  # zeros that downloaders and file systems may leave after the last tensor
_U32, _U64, _TYPE_OFFSET = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<IQ")
_SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies.

    shape: numpy order, slowest dimension first (the reverse of the order in the file), e.g. (experts, out, in).
    shard: index into GGUFFile.paths; offset: absolute byte offset in that file; size_bytes: without padding.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    shard: int
    offset: int
    size_bytes: int


class GGUFFile:
    """An open model: metadata, tensor table and the mappings of all its shards. Also a context manager.

    metadata: Python scalars, str, list[str] for string arrays, 1-D numpy arrays for numeric and bool arrays.
    size_bytes: of all files together.
    """

    def __init__(
        self,
        paths: tuple[Path, ...],
        metadata: dict[str, object],
        tensors: dict[str, TensorInfo],
        maps: list[mmap.mmap],
    ):
        self.paths = paths
        self.metadata = metadata
        self.tensors = tensors
        self.size_bytes = sum(len(mapping) for mapping in maps)
        self._maps = maps

    def blocks(self, name: str) -> np.ndarray:
        """The stored bytes of a tensor: uint8 1-D, a read-only view of the mapping. KeyError for another name."""
        assert self._maps, "blocks() after close()"
        info = self.tensors[name]
        return np.frombuffer(self._maps[info.shard], np.uint8, info.size_bytes, info.offset)

    def close(self) -> None:
        """Let go of the mappings; each is unmapped once the last view from `blocks` is gone too."""
        self._maps = []

    def __enter__(self) -> "GGUFFile":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def read_gguf(path: str | os.PathLike) -> GGUFFile:
    """Open a GGUF file, version 2 or 3, little endian; of a split model any shard will do, all are opened.

    Raises FormatError for whatever is wrong with the file, or with any of the shards.
    """
    path = Path(path)
    given = _read_shard(path)
    paths = _shard_paths(path, given.metadata)
    shards, header_bytes = [], 0
    for other in paths:
        shards.append(given if other == path else _read_shard(other))
        header_bytes += shards[-1].header_bytes
        if header_bytes > _MAX_HEADER_BYTES:
            raise FormatError(f"{other}: the headers of the shards up to here exceed {_MAX_HEADER_BYTES} bytes")
    metadata: dict[str, object] = {}
    tensors: dict[str, TensorInfo] = {}
    for number, (shard_path, shard) in enumerate(zip(paths, shards, strict=True)):
        if len(paths) > 1:
            _check_shard(shard_path, shard.metadata, number, len(paths))
            _merge_metadata(shard_path, metadata, shard.metadata)
        for name, (shape, ggml_type, offset, size_bytes) in shard.tensors.items():
            if name in tensors:
                raise FormatError(f"{shard_path}: tensor {_quote(name)} is also in {paths[tensors[name].shard].name}")
            tensors[name] = TensorInfo(name, shape, ggml_type, number, offset, size_bytes)
    if len(paths) > 1:
        expected = metadata["split.tensors.count"]
        if expected != len(tensors):
            raise FormatError(f"{path}: split.tensors.count is {expected}, but the shards hold {len(tensors)} tensors")
    return GGUFFile(paths, metadata if len(paths) > 1 else given.metadata, tensors, [s.mapping for s in shards])


def write_gguf(path: str | os.PathLike, metadata: Mapping[str, object], tensors: Iterable[tuple]) -> None:
    """Write one GGUF file; it appears under its name only when it is complete.

    metadata: str, bool, float (stored as float32), int (the first of uint32, int32, uint64, int64 that holds it), numpy
        scalars (stored with their own type), list[str], lists of bool, int (int32 first) or float, 1-D numpy arrays.
        An empty list is one of strings. general.alignment is obeyed, the default is 32.
    tensors: yields (name, shape, ggml_type, packed bytes), shape in numpy order; they are stored in that order. The
        bytes may be any contiguous buffer. They wait in a file beside `path`, as the header comes first and needs all
        names: while writing, the disk must hold the tensors twice.
    Raises FormatError for what GGUF cannot express and ShapeError for bytes that do not match shape and type.
    """
    path = Path(path)
    keys = b"".join(_packed_entry(key, value) for key, value in metadata.items())
    alignment = _checked_alignment(path, metadata)
    with tempfile.TemporaryFile(dir=path.parent) as spool:
        table, names = [], set()
        for name, shape, ggml_type, packed in tensors:
            if name in names:
                raise FormatError(f"tensor {name!r} is given twice")
            names.add(name)
            shape = tuple(map(int, shape))
            view = memoryview(packed).cast("B")
            _check_packed(name, shape, ggml_type, view.nbytes)
            spool.write(b"\0" * (-spool.tell() % alignment))
            dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
            table.append(_packed_string(name) + dims + struct.pack("<IQ", ggml_type, spool.tell()))
            spool.write(view)
        spool.write(b"\0" * (-spool.tell() % alignment))
        header = b"GGUF" + struct.pack("<IQQ", 3, len(table), len(metadata)) + keys + b"".join(table)
        spool.seek(0)
        _write_whole(path, header + b"\0" * (-len(header) % alignment), spool)


class _Shard(NamedTuple):
    mapping: mmap.mmap
    metadata: dict[str, object]
    tensors: dict[str, tuple[tuple[int, ...], int, int, int]]  # name -> shape, type, absolute offset, size
    header_bytes: int


def _read_shard(path: Path) -> _Shard:
    mapping = _map(path)
    try:
        cursor = _Cursor(path, mapping)
        num_tensors, num_keys = _read_preamble(cursor)
        metadata = _read_metadata(cursor, num_keys)
        alignment = _checked_alignment(path, metadata)
        tensors = _read_tensor_table(cursor, num_tensors, alignment)
        _check_layout(cursor, tensors, alignment)
    except BaseException:
        mapping.close()
        raise
    return _Shard(mapping, metadata, tensors, cursor.position)


def _map(path: Path) -> mmap.mmap:
    try:
        # Looked at before it is opened: opening a pipe or a device could block or have effects.
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise FormatError(f"{path}: is a directory; name the .gguf file in it")
        if not stat.S_ISREG(mode):
            raise FormatError(f"{path}: is not a regular file, so it cannot be mapped")
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise FormatError(f"{path}: the file is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise FormatError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise FormatError(f"{path}: cannot be opened: {error}") from None


class _Cursor:
    """Reads forward through one mapped header; every read is checked against the bytes left."""

    def __init__(self, path: Path, mapping: mmap.mmap):
        self.path = path
        self.mapping = mapping
        self.position = 0
        self.end = min(len(mapping), _MAX_HEADER_BYTES)

    def fail(self, message: str, position: int | None = None) -> FormatError:
        return FormatError(f"{self.path}: at byte {self.position if position is None else position}: {message}")

    def take(self, size_bytes: int, what: str) -> int:
        """Claim the next bytes; returns where they start."""
        start, left = self.position, self.end - self.position
        if size_bytes > left:
            why = "the file ends" if self.end == len(self.mapping) else "the largest header we read ends"
            raise self.fail(f"{what} takes {size_bytes} bytes, but {why} after {left}")
        self.position = start + size_bytes
        return start

    def unpack(self, layout: struct.Struct, what: str) -> tuple:
        return layout.unpack_from(self.mapping, self.take(layout.size, what))

    def string(self, what: str, max_bytes: int | None = None) -> str:
        at = self.position
        (length,) = self.unpack(_U64, f"the length of {what}")
        if max_bytes is not None and not 0 < length <= max_bytes:
            raise self.fail(f"{what} is {length} bytes long; 1 to {max_bytes} are allowed", at)
        start = self.take(length, what)
        try:
            return self.mapping[start : self.position].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not valid UTF-8: {error.reason}", start + error.start) from None

    def string_array(self, count: int, what: str) -> list[str]:
        """The hot loop of loading: vocabularies hold half a million strings."""
        if count > (self.end - self.position) // 8:
            self.take(count * 8, f"{what}, {count} strings of at least 8 bytes each,")
        mapping, position, end = self.mapping, self.position, self.end
        unpack, items = _U64.unpack_from, []
        append = items.append
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack(mapping, position)[0]
                if position > end:
                    break
                append(mapping[start:position].decode("utf-8"))
        except UnicodeDecodeError as error:
            message = f"{what}: string {len(items)} is not valid UTF-8: {error.reason}"
            raise self.fail(message, start + error.start) from None
        except struct.error:  # not even a length is left
            pass
        if len(items) < count:
            raise self.fail(f"{what}: string {len(items)} of {count} runs past the end of the file", start - 8)
        self.position = position
        return items

    def numbers(self, type_id: int, count: int, what: str) -> np.ndarray:
        dtype = _VALUE_DTYPES[type_id]
        start = self.take(count * dtype.itemsize, what)
        raw = self.mapping[start : self.position]  # a copy, because the file leaves the values unaligned
        if type_id == _BOOL and (rest := raw.lstrip(b"\0\1")):
            bad = count - len(rest)
            raise self.fail(f"{what}: bool {bad} is {rest[0]}; 0 or 1 is allowed", start + bad)
        return np.frombuffer(raw, dtype)


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    """Number of tensors and of metadata keys."""
    magic = cursor.mapping[:4]
    if magic == b"FUGG":
        raise cursor.fail("this is a big-endian GGUF file; only little-endian ones are read")
    if magic != b"GGUF":
        raise cursor.fail(f"not a GGUF file: it starts with {magic!r} instead of b'GGUF'")
    cursor.position = 4
    (version,) = cursor.unpack(_U32, "the version")
    if version and not version & 0xFFFF:
        raise cursor.fail("this is a big-endian GGUF file; only little-endian ones are read", 4)
    if version not in (2, 3):
        raise cursor.fail(f"GGUF version {version}; versions 2 and 3 are read", 4)
    (num_tensors,) = cursor.unpack(_U64, "the number of tensors")
    (num_keys,) = cursor.unpack(_U64, "the number of metadata keys")
    if num_tensors > _MAX_TENSORS:
        raise cursor.fail(f"{num_tensors} tensors; at most {_MAX_TENSORS} are read", 8)
    if num_keys > _MAX_KEYS:
        raise cursor.fail(f"{num_keys} metadata keys; at most {_MAX_KEYS} are read", 16)
    return num_tensors, num_keys


def _read_metadata(cursor: _Cursor, num_keys: int) -> dict[str, object]:
    metadata: dict[str, object] = {}
    for index in range(num_keys):
        at = cursor.position
        key = cursor.string(f"metadata key {index} of {num_keys}", _MAX_KEY_BYTES)
        if key in metadata:
            raise cursor.fail(f"metadata key {_quote(key)} occurs twice", at)
        metadata[key] = _read_value(cursor, f"metadata {_quote(key)}", key == "general.alignment")
    return metadata


def _read_value(cursor: _Cursor, what: str, must_be_uint32: bool) -> object:
    at = cursor.position
    (type_id,) = cursor.unpack(_U32, f"the type of {what}")
    if must_be_uint32 and type_id != _UINT32:
        raise cursor.fail(f"{what} has value type {type_id}; it must be uint32 (type {_UINT32})", at)
    if type_id == _STRING:
        return cursor.string(what)
    if type_id == _ARRAY:
        return _read_array(cursor, what)
    if type_id not in _VALUE_DTYPES:
        raise cursor.fail(f"{what} has unknown value type {type_id}; 0 to 12 are known", at)
    return cursor.numbers(type_id, 1, what)[0].item()


def _read_array(cursor: _Cursor, what: str) -> object:
    at = cursor.position
    (type_id,) = cursor.unpack(_U32, f"the element type of {what}")
    (count,) = cursor.unpack(_U64, f"the array length of {what}")
    if type_id == _STRING:
        return cursor.string_array(count, what)
    if type_id == _ARRAY:
        raise cursor.fail(f"{what} is an array of arrays, which no model uses", at)
    if type_id not in _VALUE_DTYPES:
        raise cursor.fail(f"{what} has unknown element type {type_id}; 0 to 12 are known", at)
    return cursor.numbers(type_id, count, what)


def _checked_alignment(path: Path, metadata: Mapping[str, object]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not 8 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise FormatError(f"{path}: general.alignment is {alignment}; a power of two, 8 to {_MAX_ALIGNMENT}, is valid")
    return alignment


def _read_tensor_table(cursor: _Cursor, num_tensors: int, alignment: int) -> dict:
    entries: dict[str, tuple[tuple[int, ...], int, int, int, int]] = {}
    for index in range(num_tensors):
        at = cursor.position
        name = cursor.string(f"the name of tensor {index} of {num_tensors}", _MAX_NAME_BYTES)
        what = f"tensor {_quote(name)}"
        if name in entries:
            raise cursor.fail(f"{what} occurs twice", at)
        shape = _read_shape(cursor, what)
        type_at = cursor.position
        ggml_type, offset = cursor.unpack(_TYPE_OFFSET, f"type and offset of {what}")
        size_bytes = _tensor_bytes(cursor, what, shape, ggml_type, type_at)
        if offset % alignment:
            raise cursor.fail(f"{what} has offset {offset}, not a multiple of the alignment {alignment}", type_at + 4)
        entries[name] = (shape, ggml_type, offset, size_bytes, type_at + 4)
    data_start = _round_up(cursor.position, alignment)
    file_bytes = len(cursor.mapping)
    tensors = {}
    for name, (shape, ggml_type, offset, size_bytes, at) in entries.items():
        if data_start + offset + size_bytes > file_bytes:
            raise cursor.fail(
                f"tensor {_quote(name)} {shape} {GGML_TYPES[ggml_type].name} lies at bytes {data_start + offset} to "
                f"{data_start + offset + size_bytes}, but the file has {file_bytes}; is the download complete?",
                at,
            )
        tensors[name] = (shape, ggml_type, data_start + offset, size_bytes)
    return tensors


def _read_shape(cursor: _Cursor, what: str) -> tuple[int, ...]:
    at = cursor.position
    (num_dims,) = cursor.unpack(_U32, f"the number of dimensions of {what}")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.fail(f"{what} has {num_dims} dimensions; 1 to {_MAX_DIMS} are allowed", at)
    dims = struct.unpack_from(f"<{num_dims}Q", cursor.mapping, cursor.take(8 * num_dims, f"the shape of {what}"))
    if 0 in dims:
        raise cursor.fail(f"{what} has shape {dims[::-1]}; no dimension may be 0", at + 4)
    return dims[::-1]


def _tensor_bytes(cursor: _Cursor, what: str, shape: tuple[int, ...], ggml_type: int, at: int) -> int:
    kind = GGML_TYPES.get(ggml_type)
    if kind is None:
        why = _REFUSED_TYPES.get(ggml_type, "is unknown; ids of llama.cpp up to 42 are read, those of forks are not")
        raise cursor.fail(f"{what}: tensor type {ggml_type} {why}", at)
    if shape[-1] % kind.block_values:
        raise cursor.fail(f"{what} {shape}: rows of {kind.name} must be a multiple of {kind.block_values} long", at)
    size_bytes = shape[-1] // kind.block_values * kind.block_bytes
    for dim in shape[:-1]:
        size_bytes *= dim
    if size_bytes > len(cursor.mapping):
        file_bytes = len(cursor.mapping)
        raise cursor.fail(f"{what} {shape} {kind.name} takes {size_bytes} bytes; the file has {file_bytes}", at)
    return size_bytes


def _check_layout(cursor: _Cursor, tensors: dict, alignment: int) -> None:
    """The tensors must cover the data section without overlap or holes, and the padding must be zero.

    Every writer lays files out so; anything else means that bytes were lost, moved or added.
    """
    previous, end = "the header", cursor.position
    for name, (_, _, offset, size_bytes) in sorted(tensors.items(), key=lambda item: item[1][2]):
        what, padded = f"tensor {_quote(name)}", _round_up(end, alignment)
        if offset < padded:
            raise cursor.fail(f"{what} overlaps {previous}, which ends at byte {end}", offset)
        if offset > padded:
            gap_bytes = offset - padded
            raise cursor.fail(f"{what} starts {gap_bytes} bytes after {previous}; they belong to no tensor", offset)
        _check_zero(cursor, end, offset, f"the padding between {previous} and {what}")
        previous, end = what, offset + size_bytes
    tail_bytes = len(cursor.mapping) - end
    if tail_bytes > _MAX_TAIL_BYTES:
        raise cursor.fail(f"{tail_bytes} bytes follow the end of {previous}; they belong to no tensor", end)
    _check_zero(cursor, end, len(cursor.mapping), f"the rest of the file after {previous}")


def _check_zero(cursor: _Cursor, start: int, end: int, what: str) -> None:
    if end > start and (junk := cursor.mapping[start:end].lstrip(b"\0")):
        raise cursor.fail(f"{what} must be zero, but holds {junk[:8]!r}", end - len(junk))


def _shard_paths(path: Path, metadata: dict[str, object]) -> tuple[Path, ...]:
    """The paths of all shards of the model that the file at `path` belongs to, in order."""
    count = _split_number(path, metadata, "split.count", default=0)
    name = _SHARD_NAME.fullmatch(path.name)
    named_count = int(name["count"]) if name else 1
    # Merged files keep the key with the value 0.
    if max(count, 1) != named_count:
        stem = name["stem"] if name else path.stem
        right = f"{stem}-{int(metadata.get('split.no', 0)) + 1:05}-of-{count:05}.gguf" if count > 1 else f"{stem}.gguf"
        raise FormatError(f"{path}: its metadata says that it is one of {max(count, 1)} files, its name one of "
                          f"{named_count}; the name should be like {right}")  # fmt: skip
    if count <= 1:
        return (path,)
    if count > _MAX_SHARDS:
        raise FormatError(f"{path}: split.count is {count}; at most {_MAX_SHARDS} are read")
    return tuple(path.with_name(f"{name['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1))


def _check_shard(path: Path, metadata: dict[str, object], number: int, count: int) -> None:
    for key, expected in (("split.no", number), ("split.count", count)):
        found = _split_number(path, metadata, key)
        if found != expected:
            raise FormatError(f"{path}: {key} is {found}, but by its name it should be {expected}")
    _split_number(path, metadata, "split.tensors.count")


def _split_number(path: Path, metadata: dict[str, object], key: str, default: int | None = None) -> int:
    value = metadata.get(key, default)
    if value is None:
        raise FormatError(f"{path}: metadata key {key} is missing; every shard of a split model has it")
    if type(value) is not int or value < 0:
        raise FormatError(f"{path}: metadata key {key} is {_quote(value)}; it must be an integer, at least 0")
    return value


def _merge_metadata(path: Path, merged: dict[str, object], shard: dict[str, object]) -> None:
    """Add a shard's metadata to the model's, in place; a key that two shards give different values is an error."""
    for key, value in shard.items():
        known = merged.setdefault(key, value)
        if key in ("split.no", "general.alignment") or known is value:  # these two describe the one file
            continue
        if type(known) is not type(value) or not np.array_equal(known, value):
            raise FormatError(f"{path}: metadata {_quote(key)} differs from that of an earlier shard")


def _quote(text: object) -> str:
    """For messages: control characters escaped, cut to a readable length."""
    quoted = repr(text)
    return quoted if len(quoted) <= 100 else quoted[:90] + "...'"


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _write_whole(path: Path, header: bytes, spool: BinaryIO) -> None:
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as out:
            out.write(header)
            shutil.copyfileobj(spool, out, 16 << 20)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _check_packed(name: str, shape: tuple[int, ...], ggml_type: int, size_bytes: int) -> None:
    kind = GGML_TYPES.get(ggml_type)
    if kind is None:
        raise FormatError(f"tensor {name!r}: {ggml_type} is not the id of a tensor type; GGML_TYPES lists them")
    if not 1 <= len(shape) <= 4 or min(shape) < 1 or not 1 <= len(name.encode()) <= 64:
        raise FormatError(f"tensor {name!r} {shape}: needs 1 to 4 dimensions above 0 and a name of 1 to 64 bytes")
    if shape[-1] % kind.block_values:
        raise ShapeError(f"tensor {name!r} {shape}: rows of {kind.name} must be a multiple of {kind.block_values} long")
    expected = prod(shape) // kind.block_values * kind.block_bytes
    if size_bytes != expected:
        raise ShapeError(f"tensor {name!r} {shape} {kind.name}: {size_bytes} bytes given, {expected} expected")


def _packed_string(text: str) -> bytes:
    encoded = text.encode("utf-8")
    return struct.pack("<Q", len(encoded)) + encoded


def _packed_entry(key: str, value: object) -> bytes:
    """Key, type id and value of one metadata entry."""
    start = _packed_string(key)
    if not 1 <= len(start) - 8 <= _MAX_KEY_BYTES:
        raise FormatError(f"metadata key {_quote(key)} must be 1 to {_MAX_KEY_BYTES} bytes long")
    if isinstance(value, str):
        return start + struct.pack("<I", _STRING) + _packed_string(value)
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return start + struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_packed_string, value))
    array = np.asarray(value, _plain_dtype(value) if not isinstance(value, (np.ndarray, np.generic)) else None)
    type_id = _VALUE_TYPES.get(array.dtype.newbyteorder("<"))
    if type_id is None or array.ndim > 1:
        raise FormatError(f"metadata {key!r}: GGUF cannot hold {_quote(value)} of type {type(value).__name__}")
    raw = array.astype(_VALUE_DTYPES[type_id], copy=False).tobytes()
    if array.ndim == 0:
        return start + struct.pack("<I", type_id) + raw
    return start + struct.pack("<IIQ", _ARRAY, type_id, array.size) + raw


def _plain_dtype(value: object) -> np.dtype | None:
    """The dtype for Python numbers; None leaves it to numpy, which then finds something GGUF refuses."""
    items = value if isinstance(value, (list, tuple)) else (value,)
    if all(type(item) is bool for item in items):
        return np.dtype("?")
    if all(type(item) is int for item in items):
        # The usual types of the format: uint32 for one number, int32 for a list.
        order = ("<i4", "<u4", "<i8", "<u8") if isinstance(value, (list, tuple)) else ("<u4", "<i4", "<u8", "<i8")
        return np.dtype(next((dtype for dtype in order if _holds(np.iinfo(dtype), items)), "O"))
    return np.dtype("<f4") if all(type(item) in (int, float) for item in items) else None


def _holds(limits: np.iinfo, items: list[int]) -> bool:
    return limits.min <= min(items) and max(items) <= limits.max
