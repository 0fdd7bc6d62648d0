"""Mutation fuzzing of the GGUF reader: small valid files are damaged, and each must be read or refused cleanly.

`python tests/fuzz_gguf.py --mutants 1000000` is the long run; tests/test_gguf.py runs the same mutations briefly.
Mutants that reach a new error, or are accepted, are mutated further, so the run works its way into the reader.
"""

import argparse
import collections
import random
import resource
import shutil
import struct
import tempfile
import time
import traceback
from pathlib import Path

import gguf
import numpy as np

from tandem.errors import FormatError
from tandem.gguf import GGML_TYPES, GGUFFile, read_gguf

MEMORY_BYTES = 256 << 20  # what reading any of these tiny files may allocate at most, with room for the allocator
SLOWEST_S = 2.0
EXTREMES = (
    0, 1, 2, 7, 8, 9, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 32, (1 << 40) + 1, 1 << 61,
    (1 << 63) - 1, 1 << 63, (1 << 64) - 32, (1 << 64) - 8, (1 << 64) - 1,
)  # fmt: skip
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
SPLIT_NAMES = ("seed-00001-of-00002.gguf", "seed-00002-of-00002.gguf")


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def scalar(key: str | bytes, type_id: int, value: object) -> bytes:
    """One metadata entry; type 8 is a string."""
    packed = string(value) if type_id == 8 else struct.pack(SCALARS[type_id], value)
    return string(key) + struct.pack("<I", type_id) + packed


def array(key: str, type_id: int, values: list, count: int | None = None) -> bytes:
    items = b"".join(string(v) if type_id == 8 else struct.pack(SCALARS[type_id], v) for v in values)
    return string(key) + struct.pack("<IIQ", 9, type_id, len(values) if count is None else count) + items


def tensor(name: str | bytes, dims: tuple[int, ...], ggml_type: int, offset: int, num_dims: int | None = None) -> bytes:
    """One entry of the tensor table; dims in the order of the file."""
    num_dims = len(dims) if num_dims is None else num_dims
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", num_dims, *dims, ggml_type, offset)


def file_bytes(keys=(), tensors=(), data=b"", version=3, alignment=32, num_keys=None, num_tensors=None, magic=b"GGUF"):
    """A GGUF file from its parts, written without the code under test."""
    counts = (len(tensors) if num_tensors is None else num_tensors, len(keys) if num_keys is None else num_keys)
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return header + (b"\0" * (-len(header) % alignment) if data else b"") + data


def rich_file(version: int = 3) -> bytes:
    """Every kind of metadata, three tensors of awkward shapes, padding between them."""
    keys = [scalar("general.architecture", 8, "llama"), array("tokens", 8, ["a", "", "é", "Ġthe"])]
    keys += [scalar(f"scalar.{type_id}", type_id, 1) for type_id in SCALARS]
    keys += [array(f"array.{type_id}", type_id, [1, 0, 1]) for type_id in SCALARS]
    table = [tensor("a.weight", (32, 3), 8, 0), tensor("b", (5,), 0, 128), tensor("c", (256, 1, 2), 12, 160)]
    data = bytes(range(1, 103)) + bytes(26) + bytes(range(20)) + bytes(12) + bytes(i % 251 for i in range(288))
    return file_bytes(keys, table, data, version)


def aligned_file() -> bytes:
    keys = [scalar("general.alignment", 4, 64), scalar("general.name", 8, "x")]
    table = [tensor("u", (7,), 24, 0), tensor("v", (1,), 27, 64)]
    return file_bytes(keys, table, bytes([9] * 7) + bytes(57) + bytes(8), alignment=64)


def split_files() -> list[bytes]:
    def shard(number: int, keys: list[bytes]) -> bytes:
        split = [scalar("split.no", 2, number), scalar("split.count", 2, 2), scalar("split.tensors.count", 5, 2)]
        return file_bytes(keys + split, [tensor(f"t{number}", (2,), 0, 0)], bytes(8))

    return [shard(0, [scalar("general.architecture", 8, "qwen3")]), shard(1, [])]


def apply(blob: bytes, operation: str, at: int, value: int) -> bytes:
    """One mutation; every (operation, at, value) is valid for every blob."""
    at %= len(blob) + 1
    little = (value & (1 << 64) - 1).to_bytes(8, "little")
    match operation:
        case "flip":
            if at < len(blob):
                return blob[:at] + bytes([blob[at] ^ 1 << value % 8]) + blob[at + 1 :]
        case "byte":
            return blob[:at] + little[:1] + blob[at + 1 :]
        case "u32":
            return blob[:at] + little[:4] + blob[at + 4 :]
        case "u64":
            return blob[:at] + little + blob[at + 8 :]
        case "truncate":
            return blob[:at]
        case "insert":
            return blob[:at] + little[: 1 + value % 8] + blob[at:]
        case "delete":
            return blob[:at] + blob[at + 1 + value % 16 :]
        case "repeat":
            return blob[:at] + blob[at - value % 32 if at > 32 else 0 : at] + blob[at:]
        case "append":
            return blob + little * (value % 5)
    return blob


OPERATIONS = ("flip", "byte", "u32", "u64", "truncate", "insert", "delete", "repeat", "append")


def check(path: Path) -> GGUFFile | FormatError:
    """Read one damaged file: FormatError naming it, or a model that holds together. Anything else raises."""
    start = time.perf_counter()
    try:
        model = read_gguf(path)
    except FormatError as error:
        assert str(path.parent) in str(error), f"the message does not name the file: {error}"
        assert len(str(error)) < 1000, f"{len(str(error))} characters of message"
        return error
    finally:
        assert time.perf_counter() - start < SLOWEST_S, "too slow"
    for key, value in model.metadata.items():
        assert key and isinstance(value, (str, bool, int, float, np.ndarray, list)), (key, value)
        assert not isinstance(value, list) or all(type(item) is str for item in value), key
        assert not isinstance(value, np.ndarray) or value.ndim == 1 and value.dtype != object, key
    ends = collections.defaultdict(int)
    for info in sorted(model.tensors.values(), key=lambda info: info.offset):
        kind = GGML_TYPES[info.ggml_type]
        assert info.size_bytes * kind.block_values == np.prod(info.shape, dtype=object) * kind.block_bytes > 0, info
        assert ends[info.shard] <= info.offset, f"{info} overlaps"
        ends[info.shard] = info.offset + info.size_bytes
        assert model.blocks(info.name).nbytes == info.size_bytes
    return model


def check_against_package(path: Path, model: GGUFFile) -> None:
    """A single file that we accept must be the same to the `gguf` package."""
    theirs = gguf.GGUFReader(path)
    fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert fields.keys() | model.metadata.keys() == fields.keys()
    for key, value in model.metadata.items():
        other = fields[key].contents() if fields[key].data else []
        assert np.array_equal(np.asarray(other), np.asarray(value), equal_nan=not isinstance(value, (str, list))), key
    assert [t.name for t in theirs.tensors] == list(model.tensors)
    for other in theirs.tensors:
        info = model.tensors[other.name]
        assert (other.data_offset, other.n_bytes, int(other.tensor_type)) == (
            info.offset, info.size_bytes, info.ggml_type)  # fmt: skip
        assert tuple(int(n) for n in other.shape) == info.shape[::-1]


def limit_memory(extra_bytes: int) -> tuple[int, int]:
    """Let this process map at most `extra_bytes` more than now; returns the previous limits."""
    previous = resource.getrlimit(resource.RLIMIT_AS)
    now_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now_bytes + extra_bytes, previous[1]))
    return previous


def seeds() -> list[tuple[str, bytes]]:
    """(file name, content); the shards are mutated one at a time beside their intact partner."""
    single = [("seed.gguf", blob) for blob in (rich_file(), rich_file(2), aligned_file(), file_bytes())]
    return single + list(zip(SPLIT_NAMES, split_files(), strict=True))


def reached(error: FormatError) -> tuple:
    """Where in the reader an error was raised: the call stack as line numbers."""
    return tuple(line for _, line in traceback.walk_tb(error.__traceback__))


def random_mutant(rng: random.Random, blob: bytes) -> bytes:
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
        value = rng.choice(EXTREMES) if rng.random() < 0.5 else rng.getrandbits(rng.choice((3, 8, 16, 64)))
        blob = apply(blob, rng.choice(OPERATIONS), rng.randrange(len(blob) + 1), value)
    return blob


def fuzz(folder: Path, mutants: int, seed: int) -> collections.Counter:
    """Run; returns how often each outcome came. Raises with the mutant saved as `finding.gguf` in the folder."""
    rng = random.Random(seed)
    corpus = seeds()
    originals, outcomes, started = len(corpus), collections.Counter(), time.perf_counter()
    for name, blob in corpus:
        (folder / name).write_bytes(blob)
    intact = dict(zip(SPLIT_NAMES, split_files(), strict=True))
    for index in range(mutants):
        name, blob = corpus[rng.randrange(len(corpus) if rng.random() < 0.5 else originals)]
        blob = random_mutant(rng, blob)
        path = folder / name
        path.write_bytes(blob)
        try:
            outcome = check(path)
            accepted = isinstance(outcome, GGUFFile)
            if accepted and name not in intact and outcomes["accepted"] % 16 == 0:
                check_against_package(path, outcome)
        except BaseException:
            (folder / "finding.gguf").write_bytes(blob)
            raise
        key = "accepted" if accepted else reached(outcome)
        if (not outcomes[key] or accepted and rng.random() < 0.01) and len(blob) < 4096:
            corpus.append((name, blob))
            if len(corpus) > 2000:
                del corpus[originals + rng.randrange(len(corpus) - originals)]
        outcomes[key] += 1
        if name in intact:
            path.write_bytes(intact[name])
        if (index + 1) % 100_000 == 0:
            print(f"{index + 1} mutants, {len(outcomes)} outcomes, {outcomes['accepted']} accepted, "
                  f"{time.perf_counter() - started:.0f} s", flush=True)  # fmt: skip
    return outcomes


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--mutants", type=int, default=1_000_000)
    options.add_argument("--seed", type=int, default=1)
    chosen = options.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fuzz_gguf.", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    limit_memory(MEMORY_BYTES)
    try:
        outcomes = fuzz(folder, chosen.mutants, chosen.seed)
    except BaseException:
        print(f"finding kept in {folder}/finding.gguf")
        raise
    shutil.rmtree(folder)
    places = len({key[-1] for key in outcomes if key != "accepted"})
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{sum(outcomes.values())} mutants: {outcomes['accepted']} accepted, the others refused in {places} places; "
          f"no crash, no other exception; peak RSS {peak_mib:.0f} MiB")  # fmt: skip


if __name__ == "__main__":
    main()
