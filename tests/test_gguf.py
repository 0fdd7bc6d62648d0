"""The GGUF reader and writer: equal to the `gguf` package both ways, and a FormatError for every damaged file."""

import os
import re
import struct
import tempfile
import time
from pathlib import Path

import fuzz_gguf as make
import gguf
import numpy as np
import pytest
from fuzz_gguf import EXTREMES, OPERATIONS, apply, check, check_against_package, file_bytes, rich_file
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.errors import FormatError, ShapeError
from tandem.gguf import GGML_TYPES, GGUFFile, read_gguf, write_gguf

F32, Q8_0, Q4_K = 0, 8, 12


def packed_tensors(seed: int = 0) -> list[tuple[str, tuple[int, ...], int, np.ndarray]]:
    """One tensor of every type, with random bytes, shapes of 1 to 4 dimensions."""
    rng = np.random.default_rng(seed)
    tensors = []
    for index, (ggml_type, kind) in enumerate(sorted(GGML_TYPES.items())):
        shape = ((3,), (5,), (2, 3), (2, 1, 3))[index % 4][: index % 4] + (kind.block_values * (1 + index % 3),)
        size_bytes = int(np.prod(shape)) // kind.block_values * kind.block_bytes
        tensors.append((f"blk.{index}.{kind.name}", shape, ggml_type, rng.integers(0, 256, size_bytes, np.uint8)))
    return tensors


# --- what the reader returns -----------------------------------------------------------------------------------------


def test_every_type_has_the_geometry_of_the_gguf_package():
    sizes = {kind.name: (int(kind), *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    for ggml_type, kind in GGML_TYPES.items():
        assert sizes.get(kind.name, (42, 64, 18)) == (ggml_type, kind.block_values, kind.block_bytes), kind
    assert set(sizes) - {kind.name for kind in GGML_TYPES.values()} == {"Q8_1", "Q8_K"}


def test_our_file_reads_back_equal_in_our_reader_and_in_the_gguf_package(tmp_path):
    metadata = {
        "general.architecture": "llama", "small": 3, "negative": -1, "large": 1 << 40, "very.negative": -(1 << 40),
        "float": 1.5, "yes": True, "words": ["", "é", "\0", "Ġthe", "👍"], "none": [], "ints": [3, -1],
        "floats": [1.5, 2],
        "bools": [True, False, True], "forced": np.uint8(3), "double": np.float64(1e300), "no": np.bool_(False),
        "array": np.arange(-2, 3, dtype=np.int16), "empty": np.zeros(0, np.float64), "big": np.arange(3, dtype=">i8"),
    }  # fmt: skip
    path = tmp_path / "model.gguf"
    tensors = [entry for entry in packed_tensors() if entry[2] != 42]  # the package does not know that type yet
    write_gguf(path, metadata, iter(tensors))
    model = read_gguf(path)
    check_against_package(path, model)
    assert list(model.metadata) == list(metadata)
    for key, value in metadata.items():
        found = model.metadata[key]
        assert np.array_equal(found, value), key
        if not isinstance(value, list | np.ndarray | np.generic):
            assert type(found) is type(value), key
    assert model.metadata["words"] == metadata["words"] and model.metadata["none"] == []
    for name, shape, ggml_type, packed in tensors:
        assert model.tensors[name].shape == shape and model.tensors[name].ggml_type == ggml_type
        assert np.array_equal(model.blocks(name), packed)
    assert model.size_bytes == path.stat().st_size and model.paths == (path,)


def test_numbers_get_the_value_types_other_readers_expect(tmp_path):
    path = tmp_path / "types.gguf"
    chosen = {"a": 3, "b": -1, "c": 1 << 32, "d": -(1 << 33), "e": 0.5, "f": np.uint8(3), "g": np.float64(1), "h": True}
    write_gguf(path, {**chosen, "list": [1, 2]}, [])
    types = {key: [t.name for t in field.types] for key, field in gguf.GGUFReader(path).fields.items()}
    names = ("UINT32", "INT32", "UINT64", "INT64", "FLOAT32", "UINT8", "FLOAT64", "BOOL")
    assert [types[key] for key in chosen] == [[name] for name in names]
    assert types["list"] == ["ARRAY", "INT32"]


def test_a_file_of_the_gguf_package_reads_equal(tmp_path):
    path = tmp_path / "theirs.gguf"
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_custom_alignment(64)
    writer.add_uint8("u8", 255)
    writer.add_int64("i64", -(1 << 62))
    writer.add_float64("f64", 0.1)
    writer.add_bool("bool", True)
    writer.add_token_list(["a", "é", ""])
    writer.add_array("ints", [1, -2])
    writer.add_array("bools", [True, False])
    weights = rng.standard_normal((2, 5, 64)).astype(np.float32)
    quantized = gguf.quantize(weights, gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("plain", weights)
    writer.add_tensor("q4", quantized, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("odd", np.arange(63, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = read_gguf(path)
    check_against_package(path, model)
    assert model.metadata["i64"] == -(1 << 62) and model.metadata["f64"] == 0.1 and model.metadata["bool"] is True
    assert model.metadata["tokenizer.ggml.tokens"] == ["a", "é", ""]
    assert model.metadata["ints"].tolist() == [1, -2] and model.metadata["bools"].tolist() == [True, False]
    assert {name: (i.shape, i.ggml_type) for name, i in model.tensors.items()} == {
        "plain": ((2, 5, 64), 0), "q4": ((2, 5, 64), 2), "odd": ((63,), 1)}  # fmt: skip
    assert np.array_equal(model.blocks("plain").view(np.float32).reshape(2, 5, 64), weights)
    assert np.array_equal(model.blocks("q4"), quantized.reshape(-1))


@pytest.mark.parametrize("version", [2, 3])
def test_versions_2_and_3_read_alike(tmp_path, version):
    (tmp_path / "m.gguf").write_bytes(rich_file(version))
    model = read_gguf(str(tmp_path / "m.gguf"))
    assert model.metadata["scalar.7"] is True and model.metadata["array.12"].tolist() == [1.0, 0.0, 1.0]
    assert model.blocks("a.weight").tolist() == list(range(1, 103))
    assert model.tensors["c"].shape == (2, 1, 256)


def mapped_ranges(path: Path) -> list[range]:
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    return [range(*(int(address, 16) for address in line[0].split("-"))) for line in lines]


def test_blocks_are_read_only_views_of_the_mapping_and_outlive_close(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(rich_file())
    with read_gguf(path) as model:
        view = model.blocks("a.weight")
        assert not view.flags.writeable and view.dtype == np.uint8 and view.ndim == 1
        with pytest.raises(ValueError):
            view.flags.writeable = True
        assert any(view.ctypes.data in mapped for mapped in mapped_ranges(path))
    assert view.tolist() == list(range(1, 103)) and mapped_ranges(path)
    with pytest.raises(AssertionError, match="close"):
        model.blocks("a.weight")
    del view
    assert not mapped_ranges(path)


def test_a_vocabulary_of_248_000_tokens_and_merges_is_read_in_half_a_second(tmp_path):
    rng = np.random.default_rng(2)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyzĠéЖ中"))
    words = ["".join(word) for word in np.split(rng.choice(letters, 248_000 * 6), 248_000)]
    merges = [f"{left} {right}" for left, right in zip(words, words[1:], strict=False)]
    metadata = {"tokens": words, "merges": merges, "types": np.ones(248_000, np.int32)}
    path = tmp_path / "vocabulary.gguf"
    write_gguf(path, metadata, [])
    cpu_s, wall_s = [], []
    for _ in range(5):
        start = time.process_time(), time.perf_counter()
        model = read_gguf(path)
        cpu_s.append(time.process_time() - start[0])
        wall_s.append(time.perf_counter() - start[1])
    print(f"\n{path.stat().st_size / 1e6:.1f} MB of metadata, best of 5: {min(wall_s):.3f} s, CPU {min(cpu_s):.3f} s")
    assert model.metadata["tokens"] == words and model.metadata["merges"] == merges
    assert min(cpu_s) < 0.5  # CPU time, so that a busy machine does not fail the test; the file is in the page cache


# --- split models ----------------------------------------------------------------------------------------------------


def write_split(folder: Path, count: int = 3) -> list[Path]:
    """Shards written by the `gguf` package, 2 tensors each."""
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama", split_max_tensors=2)
    writer.add_uint32("llama.block_count", 5)
    for index in range(2 * count):
        writer.add_tensor(f"t{index}", np.full(9, index, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return [folder / f"model-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


@pytest.mark.parametrize("given_shard", [0, 1, 2])
def test_any_shard_opens_the_whole_model(tmp_path, given_shard):
    paths = write_split(tmp_path)
    model = read_gguf(paths[given_shard])
    assert model.paths == tuple(paths) and model.size_bytes == sum(p.stat().st_size for p in paths)
    assert model.metadata["general.architecture"] == "llama" and model.metadata["llama.block_count"] == 5
    assert [(i.name, i.shard) for i in model.tensors.values()] == [(f"t{n}", n // 2) for n in range(6)]
    for index in range(6):
        assert model.blocks(f"t{index}").view(np.float32).tolist() == [index] * 9


def test_a_missing_shard_is_named(tmp_path):
    paths = write_split(tmp_path)
    paths[1].unlink()
    for given_path in (paths[0], paths[2]):
        with pytest.raises(FormatError, match=re.escape(f"{paths[1]}: no such file")):
            read_gguf(given_path)


def test_a_damaged_shard_is_named(tmp_path):
    paths = write_split(tmp_path)
    paths[2].write_bytes(paths[2].read_bytes()[:-40])
    with pytest.raises(FormatError, match=re.escape(str(paths[2])) + ".*'t5'.*download"):
        read_gguf(paths[0])


def shards(folder: Path, *extra: dict[str, object], no=(0, 1), count=(2, 2), total=(2, 2), names=("t0", "t1")) -> Path:
    """Two shards of one tensor each, whose split metadata can be wrong; returns the first."""
    for index, name in enumerate(make.SPLIT_NAMES):
        split = {"split.no": no[index], "split.count": count[index], "split.tensors.count": total[index]}
        metadata = {key: np.uint16(value) if value in range(1 << 16) else value for key, value in split.items()}
        metadata = {key: value for key, value in metadata.items() if value is not None}
        metadata |= extra[index] if extra else {}
        write_gguf(folder / name, metadata, [(names[index], (1,), F32, bytes(4))])
    return folder / make.SPLIT_NAMES[0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"no": (0, 0)}, r"seed-00002-of-00002.gguf: split.no is 0, but by its name it should be 1"),
        ({"no": (1, 0)}, r"seed-00001-of-00002.gguf: split.no is 1, but by its name it should be 0"),
        ({"no": (0, None)}, r"seed-00002-of-00002.gguf: metadata key split.no is missing"),
        ({"count": (2, 3)}, r"seed-00002-of-00002.gguf: split.count is 3, but by its name it should be 2"),
        ({"count": (3, 3)}, r"one of 3 files, its name one of 2; .*like seed-00001-of-00003.gguf"),
        ({"count": (None, 2)}, r"one of 1 files, its name one of 2; .*like seed.gguf"),
        ({"count": (-1, 2)}, r"split.count is -1; it must be an integer, at least 0"),
        ({"count": ("2", 2)}, r"split.count is '2'; it must be an integer"),
        ({"total": (3, 3)}, r"split.tensors.count is 3, but the shards hold 2 tensors"),
        ({"total": (2, 3)}, r"seed-00002-of-00002.gguf: metadata 'split.tensors.count' differs"),
        ({"total": (None, None)}, r"split.tensors.count is missing"),
        ({"names": ("t0", "t0")}, r"seed-00002-of-00002.gguf: tensor 't0' is also in seed-00001-of-00002.gguf"),
    ],
)
def test_contradicting_shards_are_refused(tmp_path, wrong, message):
    with pytest.raises(FormatError, match=message):
        read_gguf(shards(tmp_path, **wrong))


def test_shards_must_agree_on_metadata_and_may_add_to_it(tmp_path):
    first = shards(tmp_path, {"a": [1.0, 2.0], "general.alignment": 64}, {"a": [1.0, 2.0], "b": "x"})
    assert read_gguf(first).metadata["b"] == "x"
    for other in ([1.0, 3.0], ["1.0"], 1.0):
        with pytest.raises(FormatError, match="seed-00002-of-00002.gguf: metadata 'a' differs"):
            read_gguf(shards(tmp_path, {"a": [1.0, 2.0]}, {"a": other}))


def test_shards_are_bounded_in_number_and_in_the_size_of_all_headers(tmp_path):
    path = tmp_path / "m-00001-of-05000.gguf"
    write_gguf(path, {"split.no": np.uint16(0), "split.count": np.uint16(5000)}, [])
    with pytest.raises(FormatError, match="split.count is 5000; at most 4096 are read"):
        read_gguf(path)
    with pytest.raises(FormatError, match="seed-00002-of-00002.gguf: the headers of the shards up to here exceed"):
        read_gguf(shards(tmp_path, *[{"zeros": np.zeros(40 << 20, np.uint8)}] * 2))


def test_a_renamed_shard_says_how_it_should_be_called(tmp_path):
    path = tmp_path / "my model.gguf"
    shards(tmp_path).rename(path)
    with pytest.raises(FormatError, match=r"the name should be like my model-00001-of-00002.gguf"):
        read_gguf(path)


@pytest.mark.parametrize("count", [0, 1])
def test_a_merged_model_keeps_its_split_keys_and_is_one_file(tmp_path, count):
    write_gguf(tmp_path / "m.gguf", {"split.count": np.uint16(count), "split.no": np.uint16(0)}, [])
    assert len(read_gguf(tmp_path / "m.gguf").paths) == 1


# --- hostile files ---------------------------------------------------------------------------------------------------

HUGE = (1 << 64) - 1
ONE_KEY = [make.scalar("k", 4, 7)]
Q8_ROW = bytes(range(1, 35)) + bytes(30)


def with_tensors(*entries: bytes, data: bytes = bytes(range(1, 129)), **options: object) -> bytes:
    return file_bytes(ONE_KEY, entries, data, **options)


HOSTILE = {
    "empty": (b"", "the file is empty"),
    "three bytes": (b"GGU", "at byte 0: not a GGUF file: it starts with b'GGU'"),
    "text": (b"<!DOCTYPE html>", "at byte 0: not a GGUF file: it starts with b'<!DO'"),
    "safetensors": (b"\x40\0\0\0\0\0\0\0{}", "not a GGUF file"),
    "only the magic": (b"GGUF", "at byte 4: the version takes 4 bytes, but the file ends after 0"),
    "version 0": (file_bytes(version=0), "at byte 4: GGUF version 0; versions 2 and 3"),
    "version 1": (file_bytes(version=1), "at byte 4: GGUF version 1"),
    "version 4": (file_bytes(version=4), "at byte 4: GGUF version 4"),
    "big endian": (file_bytes(version=3 << 24), "at byte 4: this is a big-endian GGUF file"),
    "big-endian magic": (file_bytes(magic=b"FUGG"), "this is a big-endian GGUF file"),
    "more keys than bytes": (file_bytes(ONE_KEY, num_keys=60000), "at byte 41: the length of metadata key 1 of 60000"),
    "2^64-1 keys": (file_bytes(ONE_KEY, num_keys=HUGE), f"at byte 16: {HUGE} metadata keys"),
    "2^64-1 tensors": (file_bytes(num_tensors=HUGE), f"at byte 8: {HUGE} tensors"),
    "more tensors than bytes": (file_bytes(num_tensors=99), "at byte 24: the length of the name of tensor 0 of 99"),
    "fewer keys than stored": (file_bytes(ONE_KEY * 2, num_keys=1), "the rest of the file after the header must be"),
    "key length 2^64-1": (file_bytes([struct.pack("<Q", HUGE)]), f"at byte 24: metadata key 0 of 1 is {HUGE} bytes"),
    "key length past the end": (
        file_bytes([struct.pack("<Q", 100) + b"abc"]), "at byte 32: metadata key 0 of 1 takes 100 bytes, .* after 3"),
    "empty key": (file_bytes([make.scalar("", 4, 1)]), "at byte 24: metadata key 0 of 1 is 0 bytes long"),
    "key not UTF-8": (file_bytes([make.scalar(b"ab\xff", 4, 1)]), "at byte 34: metadata key 0 of 1 is not valid UTF-8"),
    "key twice": (file_bytes(ONE_KEY * 2), "at byte 41: metadata key 'k' occurs twice"),
    "value type 13": (
        file_bytes([make.string("k") + struct.pack("<II", 13, 0)]), "byte 33: .*'k' has unknown value type 13"),
    "value type 2^32-1": (file_bytes([make.string("k") + b"\xff" * 8]), "'k' has unknown value type 4294967295"),
    "string value not UTF-8": (
        file_bytes([make.scalar("k", 8, b"\xc3(")]), "at byte 45: metadata 'k' is not valid UTF-8"),
    "surrogate in a string": (file_bytes([make.scalar("k", 8, b"\xed\xa0\x80")]), "metadata 'k' is not valid UTF-8"),
    "overlong UTF-8": (file_bytes([make.scalar("k", 8, b"\xc0\x80")]), "metadata 'k' is not valid UTF-8"),
    "string value length 2^64-1": (
        file_bytes([make.string("k") + struct.pack("<IQ", 8, HUGE)]), f"at byte 45: metadata 'k' takes {HUGE} bytes"),
    "string array of 2^64-1": (
        file_bytes([make.array("k", 8, ["a"], HUGE)]), f"'k', {HUGE} strings of at least 8 bytes"),
    "string array one too long": (
        file_bytes([make.array("k", 8, ["abcdefghijkl"], 2)]),
        "at byte 69: metadata 'k': string 1 of 2 runs past the end"),
    "string in an array past the end": (
        file_bytes([make.array("k", 8, ["a", "bcd"])])[:-1],
        "at byte 58: metadata 'k': string 1 of 2 runs past the end"),
    "string of 2^64-1 in an array": (
        file_bytes([make.array("k", 8, [""] * 2)])[:-8] + b"\xff" * 8,
        "at byte 57: .*'k': string 1 of 2 runs past the end"),
    "string in an array not UTF-8": (
        file_bytes([make.array("k", 8, ["a", b"x\x80"])]), "at byte 67: metadata 'k': string 1 is not valid UTF-8"),
    "number array of 2^64-1": (
        file_bytes([make.array("k", 10, [1], HUGE)]), f"at byte 49: metadata 'k' takes {8 * HUGE} bytes, .* after 8"),
    "number array whose size overflows to 8": (
        file_bytes([make.array("k", 10, [1], (1 << 61) + 1)]), f"metadata 'k' takes {(1 << 64) + 8} bytes"),
    "array of arrays": (
        file_bytes([make.string("k") + struct.pack("<IIQIQ", 9, 9, 1, 4, 0)]), "'k' is an array of arrays"),
    "arrays nested a million deep": (
        file_bytes([make.string("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 1_000_000]),
        "'k' is an array of"),
    "array of unknown type": (
        file_bytes([make.string("k") + struct.pack("<IIQ", 9, 99, 0)]), "unknown element type 99"),
    "bool 2": (file_bytes([make.scalar("k", 7, 2)]), "at byte 37: metadata 'k': bool 0 is 2; 0 or 1 is allowed"),
    "bool 255 in an array": (file_bytes([make.array("k", 7, [1, 0, 255])]), "at byte 51: metadata 'k': bool 2 is 255"),
    "alignment 0": (file_bytes([make.scalar("general.alignment", 4, 0)]), "general.alignment is 0; a power of two"),
    "alignment 24": (file_bytes([make.scalar("general.alignment", 4, 24)]), "general.alignment is 24; a power of two"),
    "alignment 2^31": (file_bytes([make.scalar("general.alignment", 4, 1 << 31)]), "general.alignment is 2147483648"),
    "alignment of another type": (
        file_bytes([make.scalar("general.alignment", 10, 32)]), "value type 10; it must be uint32"),
    "alignment a string": (file_bytes([make.scalar("general.alignment", 8, "32")]), "value type 8; it must be uint32"),
    "alignment an array": (file_bytes([make.array("general.alignment", 4, [32])]), "value type 9; it must be uint32"),
    "empty tensor name": (with_tensors(make.tensor("", (1,), F32, 0)), "the name of tensor 0 of 1 is 0 bytes long"),
    "tensor name of 65 bytes": (
        with_tensors(make.tensor("x" * 65, (1,), F32, 0)), "the name of tensor 0 of 1 is 65 bytes"),
    "tensor name not UTF-8": (
        with_tensors(make.tensor(b"\xfe", (1,), F32, 0)), "at byte 49: the name of tensor 0 of 1 is not"),
    "tensor name length 2^64-1": (file_bytes([], [struct.pack("<Q", HUGE)]), f"tensor 0 of 1 is {HUGE} bytes"),
    "tensor twice": (
        with_tensors(make.tensor("t", (1,), F32, 0), make.tensor("t", (1,), F32, 32)),
        "at byte 74: tensor 't' occurs twice"),
    "0 dimensions": (with_tensors(make.tensor("t", (), F32, 0)), "tensor 't' has 0 dimensions"),
    "5 dimensions": (with_tensors(make.tensor("t", (1,) * 5, F32, 0)), "at byte 50: tensor 't' has 5 dimensions"),
    "2^32-1 dimensions": (
        with_tensors(make.tensor("t", (1,), F32, 0, 0xFFFFFFFF)), "tensor 't' has 4294967295 dimensions"),
    "dimension 0": (
        with_tensors(make.tensor("t", (8, 0, 2), F32, 0)), r"tensor 't' has shape \(2, 0, 8\); no dimension"),
    "dimension 2^64-1": (with_tensors(make.tensor("t", (HUGE,), F32, 0)), f"tensor 't' .* takes {4 * HUGE} bytes"),
    "product overflows to 0": (
        with_tensors(make.tensor("t", (1 << 32, 1 << 32), F32, 0)), f"takes {1 << 66} bytes; the file has"),
    "product overflows to 16": (
        with_tensors(make.tensor("t", (4, (1 << 62) + 1), F32, 0)), f"takes {(1 << 66) + 16} bytes; the file has"),
    "row not whole blocks": (
        with_tensors(make.tensor("t", (33, 32), Q8_0, 0)),
        r"tensor 't' \(32, 33\): rows of Q8_0 must be a multiple of 32"),
    "row of half a K block": (
        with_tensors(make.tensor("t", (128, 2), Q4_K, 0)), "rows of Q4_K must be a multiple of 256"),
    "Q8_1 tensor": (
        with_tensors(make.tensor("t", (32,), 9, 0)), "tensor 't': tensor type 9 is a format for activations"),
    "Q8_K tensor": (with_tensors(make.tensor("t", (256,), 15, 0)), "tensor type 15 is a format for activations"),
    "tensor type 43": (
        with_tensors(make.tensor("t", (32,), 43, 0)), "at byte 62: tensor 't': tensor type 43 is unknown"),
    "tensor type 139 of a fork": (
        with_tensors(make.tensor("t", (256,), 139, 0)), "tensor type 139 is unknown; .*forks"),
    "offset misaligned": (
        with_tensors(make.tensor("t", (8,), F32, 4)),
        "at byte 66: tensor 't' has offset 4, not a multiple of the alignment"),
    "offset past the end": (
        with_tensors(make.tensor("t", (8,), F32, 128)),
        "at byte 66: tensor 't' .* lies at bytes 224 to 256, .* file has 224"),
    "offset 2^64-32": (
        with_tensors(make.tensor("t", (8,), F32, HUGE - 31)), "tensor 't' .* lies at bytes 18446744073709551"),
    "last tensor cut": (with_tensors(make.tensor("t", (33,), F32, 0)), "lies at bytes 96 to 228, but the file has 224"),
    "tensors overlap": (
        with_tensors(make.tensor("t", (16,), F32, 0), make.tensor("u", (16,), F32, 32)),
        "tensor 'u' overlaps tensor 't'"),
    "tensors at one place": (
        with_tensors(make.tensor("t", (32,), F32, 0), make.tensor("u", (32,), F32, 0)),
        "tensor 'u' overlaps tensor 't'"),
    "hole before the first tensor": (
        with_tensors(make.tensor("t", (8,), F32, 32)),
        "tensor 't' starts 32 bytes after the header; they belong to no"),
    "hole between tensors": (
        with_tensors(make.tensor("t", (8,), F32, 0), make.tensor("u", (8,), F32, 64)),
        "'u' starts 32 bytes after tensor 't'"),
    "junk between header and tensors": (
        with_tensors(make.tensor("t", (32,), F32, 0))[:95] + b"\1" + bytes(128),
        "at byte 95: the padding between the header"),
    "junk between tensors": (
        with_tensors(make.tensor("t", (7,), F32, 0), make.tensor("u", (24,), F32, 32)),
        "padding between tensor 't' and tens"),
    "junk after the last tensor": (
        with_tensors(make.tensor("t", (16,), F32, 0)),
        "at byte 160: the rest of the file after tensor 't' must be zero"),
    "zeros without end after the last tensor": (
        with_tensors(make.tensor("t", (32,), F32, 0)) + bytes(65537), "65537 bytes follow the end of tensor 't'"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_refused_with_what_and_where(tmp_path, case):
    blob, message = HOSTILE[case]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(blob)
    with pytest.raises(FormatError, match=message) as caught:
        read_gguf(path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("ggml_type", [4, 5, 31, 32, 33, 36, 37, 38])
def test_removed_tensor_types_are_refused(tmp_path, ggml_type):
    (tmp_path / "m.gguf").write_bytes(with_tensors(make.tensor("t", (32,), ggml_type, 0)))
    with pytest.raises(FormatError, match=f"tensor 't': tensor type {ggml_type} was removed"):
        read_gguf(tmp_path / "m.gguf")


def test_paths_that_are_no_files_are_refused_without_blocking(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    cases = {tmp_path: "is a directory", tmp_path / "no.gguf": "no such file", tmp_path / "pipe": "not a regular file",
             Path("/dev/zero"): "not a regular file", tmp_path / "dangling": "no such file",
             tmp_path / "loop": "cannot be opened", tmp_path / "a\0b": "cannot be opened",
             tmp_path / ("x" * 300): "cannot be opened"}  # fmt: skip
    for path, message in cases.items():
        with pytest.raises(FormatError, match=message):
            read_gguf(path)


@pytest.mark.parametrize("version", [2, 3])
def test_a_file_cut_anywhere_is_refused(ram_path, version):
    path, blob = ram_path / "cut.gguf", rich_file(version)
    for length in range(len(blob)):
        path.write_bytes(blob[:length])
        assert isinstance(check(path), FormatError), length


def test_every_header_field_overwritten_with_extremes_is_refused_or_valid(ram_path, small_memory):
    path, blob = ram_path / "extreme.gguf", rich_file()
    header_bytes = blob.index(bytes(range(1, 103)))
    outcomes = []
    for at in range(0, header_bytes):
        for value in EXTREMES:
            for operation in ("u32", "u64"):
                path.write_bytes(apply(blob, operation, at, value))
                outcomes.append(isinstance(check(path), GGUFFile))
    assert 0 < sum(outcomes) < len(outcomes) / 5


@pytest.fixture
def ram_path():
    """A folder in RAM: some file systems flush whenever a file is written again, which these tests do all the time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        yield Path(folder)


@pytest.fixture
def small_memory():
    """While a hostile file is read, the process may map no more than a little beyond what it has."""
    previous = make.limit_memory(make.MEMORY_BYTES)
    yield
    make.resource.setrlimit(make.resource.RLIMIT_AS, previous)


def sparse(path: Path, header: bytes, size_bytes: int) -> Path:
    path.write_bytes(header)
    os.truncate(path, size_bytes)
    return path


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (file_bytes([make.array("k", 8, [], 1 << 36)]), "68719476736 strings .* largest header we read ends"),
        (file_bytes([make.array("k", 8, [], 8_000_000)]), "bytes follow the end of the header"),
        (file_bytes([make.array("k", 12, [], 1 << 36)]),
        "takes 549755813888 bytes, but the largest header we read ends"),
        (file_bytes([make.string("k") + struct.pack("<IQ", 8, 1 << 39)]), "takes 549755813888 bytes, but the largest"),
        (file_bytes([make.string("k") + struct.pack("<IQ", 8, 1 << 20)]), "bytes follow the end of the header"),
        (file_bytes(num_keys=60_000), "metadata key 0 of 60000 is 0 bytes"),
        (file_bytes(num_tensors=100_000), "the name of tensor 0 of 100000 is 0 bytes"),
        (with_tensors(make.tensor("t", (1 << 38,), 24, 1 << 39), data=b"\0"),
        "starts 549755813888 bytes after the header"),
    ],
)
def test_a_sparse_file_of_a_terabyte_costs_little_time_and_memory(tmp_path, header, message, small_memory):
    path = sparse(tmp_path / "sparse.gguf", header, 1 << 40)
    # The mapping itself takes address space, not memory.
    make.resource.setrlimit(make.resource.RLIMIT_AS, (make.resource.RLIM_INFINITY,) * 2)
    make.limit_memory((1 << 40) + make.MEMORY_BYTES)
    start = time.perf_counter()
    with pytest.raises(FormatError, match=message):
        read_gguf(path)
    assert time.perf_counter() - start < 10


def test_refused_files_are_closed_even_while_their_errors_are_kept(ram_path):
    path, kept = ram_path / "bad.gguf", []
    blobs = [blob for blob, _ in HOSTILE.values() if blob]
    before = len(os.listdir("/proc/self/fd"))
    for blob in blobs:
        path.write_bytes(blob)
        with pytest.raises(FormatError) as caught:
            read_gguf(path)
        kept.append(caught.value)
    assert len(os.listdir("/proc/self/fd")) == before and not mapped_ranges(path)


def test_messages_escape_and_shorten_names_from_the_file(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(file_bytes([make.scalar("\x1b[31m" + "x" * 60_000, 7, 2)]))
    with pytest.raises(FormatError) as caught:
        read_gguf(path)
    assert "\x1b" not in str(caught.value) and len(str(caught.value)) < 300 + len(str(path))


# --- mutation --------------------------------------------------------------------------------------------------------

numbers = st.sampled_from(EXTREMES) | st.integers(0, 255) | st.integers(0, (1 << 64) - 1)
mutations = st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 2000), numbers), min_size=1, max_size=6)


@settings(max_examples=5_000, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
@given(seed=st.sampled_from(make.seeds()), mutations=mutations)
def mutate_and_check(folder: Path, seed: tuple[str, bytes], mutations: list[tuple[str, int, int]]) -> None:
    name, blob = seed
    for operation, at, value in mutations:
        blob = apply(blob, operation, at, value)
    for shard, intact in zip(make.SPLIT_NAMES, make.split_files(), strict=True):
        (folder / shard).write_bytes(intact)
    (folder / name).write_bytes(blob)
    outcome = check(folder / name)
    if isinstance(outcome, GGUFFile) and name not in make.SPLIT_NAMES:
        check_against_package(folder / name, outcome)


def test_mutated_files_are_valid_or_refused_in_bounded_time_and_memory(ram_path, small_memory):
    mutate_and_check(ram_path)


def test_mutants_bred_towards_new_errors_are_valid_or_refused(ram_path, small_memory):
    outcomes = make.fuzz(ram_path, 20_000, seed=3)
    assert sum(outcomes.values()) == 20_000 and len(outcomes) > 40 and outcomes["accepted"] > 500


# --- writer ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "error", "message"),
    [
        (("t", (2, 33), Q8_0, bytes(68)), ShapeError, "rows of Q8_0 must be a multiple of 32"),
        (("t", (2, 32), Q8_0, bytes(67)), ShapeError, "67 bytes given, 68 expected"),
        (("t", (2,), 9, bytes(72)), FormatError, "9 is not the id of a tensor type"),
        (("t", (), F32, bytes(4)), FormatError, "needs 1 to 4 dimensions"),
        (("t", (0,), F32, b""), FormatError, "needs 1 to 4 dimensions above 0"),
        (("t" * 65, (1,), F32, bytes(4)), FormatError, "name of 1 to 64 bytes"),
        (("first", (1,), F32, bytes(4)), FormatError, "tensor 'first' is given twice"),
    ],
)
def test_the_writer_refuses_bad_tensors_and_leaves_no_file(tmp_path, entry, error, message):
    with pytest.raises(error, match=message):
        write_gguf(tmp_path / "m.gguf", {}, [("first", (1,), F32, bytes(4)), entry])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "value", [None, 1 << 64, [1, "a"], [1, 1 << 64], {"a": 1}, np.float16(1), np.zeros((2, 2)), 1j, [[1], [2]], b"x"]
)
def test_the_writer_refuses_metadata_that_gguf_cannot_hold(tmp_path, value):
    with pytest.raises(FormatError, match="metadata 'key'"):
        write_gguf(tmp_path / "m.gguf", {"key": value}, [])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("metadata", [{"general.alignment": 24}, {"": 1}, {"k" * 65536: 1}])
def test_the_writer_refuses_what_the_reader_would(tmp_path, metadata):
    with pytest.raises(FormatError):
        write_gguf(tmp_path / "m.gguf", metadata, [])


def test_the_writer_obeys_the_alignment_and_replaces_an_old_file(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"old")
    write_gguf(path, {"general.alignment": 4096}, packed_tensors())
    model = read_gguf(path)
    assert all(info.offset % 4096 == 0 for info in model.tensors.values())
    assert all(np.array_equal(model.blocks(name), packed) for name, _, _, packed in packed_tensors())


def test_the_writer_streams_tensors_without_holding_them(tmp_path):
    block = np.arange(8 << 20, dtype=np.uint8)
    path = tmp_path / "large.gguf"
    previous = make.limit_memory(96 << 20)
    try:
        write_gguf(path, {}, ((f"t{i}", (8, 1 << 20), 24, block + np.uint8(i)) for i in range(20)))
    finally:
        make.resource.setrlimit(make.resource.RLIMIT_AS, previous)
    assert np.array_equal(read_gguf(path).blocks("t19"), block + np.uint8(19))
    path.unlink()
