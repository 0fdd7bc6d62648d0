"""The meaning of every tensor type (`gguf` package, hand-made blocks), and the error of every quantizer."""

import warnings

import gguf
import numpy as np
import pytest
from close import assert_close

from tandem.errors import FormatError, ShapeError
from tandem.gguf import GGML_TYPES
from tandem.quant import FORMATS, format_by_name, pack_tensor, random_blocks, unpack_tensor
from tandem.quant.format import join_bits, split_bits
from tandem.quant.iquant_grids import GRIDS

ALL = [pytest.param(f, id=f.name) for f in FORMATS.values()]
QUANTIZED = [pytest.param(f, id=f.name) for f in FORMATS.values() if f.block_values > 1]

NAMES = """F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS
IQ3_S IQ4_NL IQ4_XS TQ1_0 TQ2_0 MXFP4 NVFP4""".split()

# Relative RMS error of pack on Gaussian values: what was measured, rounded up by under 1 %.
ERROR_CEILING = {
    "F32": 0, "F16": 0.000211, "BF16": 0.00168,
    "Q4_0": 0.0814, "Q4_1": 0.0697, "Q5_0": 0.0406, "Q5_1": 0.0337, "Q8_0": 0.0051,
    "Q2_K": 0.268, "Q3_K": 0.147, "Q4_K": 0.0704, "Q5_K": 0.0351, "Q6_K": 0.0172,
    "IQ1_S": 0.449, "IQ1_M": 0.416, "IQ2_XXS": 0.329, "IQ2_XS": 0.287, "IQ2_S": 0.24, "IQ3_XXS": 0.18, "IQ3_S": 0.13,
    "IQ4_NL": 0.074, "IQ4_XS": 0.0749, "TQ1_0": 0.438, "TQ2_0": 0.438, "MXFP4": 0.113, "NVFP4": 0.089,
}  # fmt: skip

# Relative RMS change when values that already went through the type go through it again. K types weigh large values
# more and refit two scales at once, which moves the small ones a little.
REPACK_CEILING = {
    "Q4_0": 0, "Q4_1": 0, "Q5_0": 0, "Q5_1": 0, "Q8_0": 0.00051,
    "Q2_K": 0.012, "Q3_K": 0.0037, "Q4_K": 0.005, "Q5_K": 0.0048, "Q6_K": 0.0028,
    "IQ1_S": 0.002, "IQ1_M": 0.002, "IQ2_XXS": 0.002, "IQ2_XS": 0.015, "IQ2_S": 0.002, "IQ3_XXS": 0.023, "IQ3_S": 0.0036,
    "IQ4_NL": 0, "IQ4_XS": 0.0032, "MXFP4": 0, "NVFP4": 0,
}  # fmt: skip


def oracle(blocks, form):
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(form.ggml_type))
    return values.reshape(len(blocks), form.block_values)


def rows(form, n, seed=0, scale=0.02):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((n, max(form.block_values, 256))) * scale).astype(np.float32)


def through(form, values):
    return unpack_tensor(pack_tensor(values, form.ggml_type), form.ggml_type, values.shape)


def error(actual, expected):
    return assert_close(actual, expected, np.inf)


def test_every_type_that_files_use_is_there():
    assert sorted(f.name for f in FORMATS.values()) == sorted(NAMES)
    assert all(f.pack for f in FORMATS.values())


@pytest.mark.parametrize("form", ALL)
def test_geometry_is_the_readers_and_the_gguf_packages(form):
    assert GGML_TYPES[form.ggml_type] == (form.name, form.block_values, form.block_bytes)
    known = gguf.GGMLQuantizationType[form.name]
    assert (known, *gguf.GGML_QUANT_SIZES[known]) == (form.ggml_type, form.block_values, form.block_bytes)


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("n", [1, 63, 1000])
def test_unpack_equals_the_gguf_package_to_the_bit(form, n):
    blocks = random_blocks(form.ggml_type, n, np.random.default_rng(n))
    values = form.unpack(blocks)
    assert values.dtype == np.float32 and values.shape == (n, form.block_values)
    assert np.array_equal(values, oracle(blocks, form))


@pytest.mark.parametrize("form", ALL)
def test_unpack_equals_the_gguf_package_on_any_bytes(form):
    """Also infinite and NaN scales, and codes that no quantizer writes."""
    blocks = np.random.default_rng(1).integers(0, 256, (1000, form.block_bytes), np.uint8)
    values = unpack_tensor(blocks, form.ggml_type, (1000, form.block_values))
    assert np.array_equal(values, oracle(blocks, form), equal_nan=True)


def half(x):
    return np.float16(x).tobytes()


def words(*numbers, size=2):
    return b"".join(int(x).to_bytes(size, "little") for x in numbers)


# Blocks written by hand: name -> (bytes, value of most elements, {index: value of the others}).
BY_HAND = {
    "F32": (bytes.fromhex("0000c03f"), 1.5, {}),
    "F16": (bytes.fromhex("00be"), -1.5, {}),
    "BF16": (bytes.fromhex("c03f"), 1.5, {}),
    # d 0.5; first byte: low nibble 15 is value 0, high nibble 1 is value 16; (q - 8) / 2
    "Q4_0": (half(0.5) + b"\x1f" + bytes(15), -4.0, {0: 3.5, 16: -3.5}),
    # d 0.5, m -1; q / 2 - 1
    "Q4_1": (half(0.5) + half(-1) + b"\x1f" + bytes(15), -1.0, {0: 6.5, 16: -0.5}),
    # fifth bits of values 0, 9 and 31; q - 16
    "Q5_0": (half(1) + b"\x01\x02\x00\x80" + b"\x1f" + bytes(15), -16.0, {0: 15, 9: 0, 16: -15, 31: 0}),
    "Q5_1": (half(1) + half(2) + b"\x01\x02\x00\x80" + b"\x1f" + bytes(15), 2.0, {0: 33, 9: 18, 16: 3, 31: 18}),
    "Q8_0": (half(0.25) + b"\x80\x7f" + bytes(30), 0.0, {0: -32.0, 1: 31.75}),
    # all scales 2, all mins 3; byte 0: q of values 0, 32, 64, 96 is 3, 0, 1, 2; byte 33: value 129 is 1
    "Q2_K": (
        b"\x32" * 16 + b"\x93" + bytes(32) + b"\x01" + bytes(30) + half(0.5) + half(2),
        -6.0,
        {0: 3 - 6, 64: 1 - 6, 96: 2 - 6, 129: 1 - 6},
    ),
    # high bits set but for value 32 (byte 0, bit 1); scale 0 is 33 - 32 = 1, scale 1 is 63 - 32 = 31, others 0 - 32
    "Q3_K": (
        b"\xfd" + b"\xff" * 31 + b"\x03" + bytes(15) + b"\x02" + bytes(47)
        + b"\x01\x0f" + bytes(6) + b"\x02\x03\x00\x00" + half(1),
        0.0,
        {0: 1 * 3, 16: 31 * 2, 32: -32 * -4},
    ),
    # scales 0..7: 1, 0, 0, 63, 0x12, 0, 0, 0; mins 0..7: 0, 2, 0, 0, 0, 0x23, 0, 0
    "Q4_K": (
        half(0.5) + half(1) + bytes([0x41, 0, 0, 0x3F]) + bytes([0, 0x82, 0, 0]) + bytes([0x02, 0x30, 0, 0])
        + b"\x7f" + bytes(31) + b"\xe0" + bytes(31) + b"\x05" + bytes(63),
        0.0,
        {0: 7.5} | {i: -2.0 for i in range(32, 64)} | {96: 0.5 * 63 * 14, 128: 0.5 * 0x12 * 5}
        | {i: -35.0 for i in range(160, 192)},
    ),
    # scale 0 is 1, min 7 is 1; fifth bits of byte 0: values 0 and 224
    "Q5_K": (
        half(1) + half(2) + bytes([1, 0, 0, 0]) + bytes(4) + bytes([0, 0, 0, 0x10])
        + b"\x81" + bytes(31) + b"\x03" + bytes(127),
        0.0,
        {0: 19.0} | {i: -2.0 for i in range(224, 256)},
    ),
    # low nibbles: byte 0 is values 0 and 64, byte 33 values 33 and 97; high bits of byte 0: values 0, 32, 64, 96
    "Q6_K": (
        b"\x5f" + bytes(32) + b"\x21" + bytes(94) + b"\xe4" + bytes(63) + b"\x01" * 15 + b"\xfe" + half(0.5),
        -16.0,
        {0: (15 - 32) / 2, 32: (16 - 32) / 2, 64: (5 + 32 - 32) / 2, 96: (48 - 32) / 2}
        | {33: (1 - 32) / 2, 97: (2 - 32) / 2} | {i: 32.0 for i in range(240, 256)},
    ),
    # d 8; scale 15 in the first 32 values: 8 * 15.5 / 4 * 8 = 248, elsewhere 8 * 0.5 / 4 * 8 = 8; row 1 starts with 43
    # signs 1 of values 0-7: bits 0 and 7; signs 3 of values 8-15: bits 0 and 1
    "IQ2_XXS": (
        half(8) + words(1, 1 | 3 << 7 | 15 << 28, size=4) + bytes(56),
        8.0,
        {i: 248.0 for i in range(32)} | {0: -31 * 43, 7: -248, 8: -248, 9: -248},
    ),
    # word 0: row 1, signs 1; scale nibbles: values 0-15 have 1, 16-31 have 2
    "IQ2_XS": (
        half(8) + words(1 | 1 << 9) + bytes(62) + b"\x21" + bytes(7),
        8.0,
        {i: 24.0 for i in range(16)} | {i: 40.0 for i in range(16, 32)} | {0: -3 * 43, 7: -24},
    ),
    # row 1, and row 1023 (all 43 but one) for values 8-15 from its high bits; sign byte 0 has bit 7
    "IQ2_S": (
        half(8) + b"\x01\x00\x01" + bytes(29) + b"\x80" + bytes(31) + bytes(8) + b"\x21" + bytes(7),
        8.0,
        {i: 24.0 for i in range(16)} | {i: 40.0 for i in range(16, 32)} | {0: 3 * 43, 7: -24, 16: 5 * 43},
    ),
    # row 0 is 4 4 4 4, row 1 is 20 4 4 4; d 2 * 0.5 / 2 * 4 = 2, first 32 with scale 1: 6
    "IQ3_XXS": (
        half(2) + b"\x00\x01" + bytes(62) + words(1 | 1 << 28, size=4) + bytes(28),
        2.0,
        {i: 6.0 for i in range(32)} | {0: -6, 4: 30, 7: -6},
    ),
    # row 0 is 1 1 1 1, row 1 is 3 1 1 1; scale nibbles 1 and 2: d * 3, d * 5
    "IQ3_S": (
        half(0.5) + b"\x00\x01" + bytes(62) + bytes(8) + b"\x81" + bytes(31) + b"\x21" + bytes(3),
        0.5,
        {i: 1.5 for i in range(32)} | {i: 2.5 for i in range(32, 64)} | {0: -1.5, 4: 4.5, 7: -1.5},
    ),
    # row 0 is all -1, row 1 is 1 -1 .. -1; shift up: -7/8, 9/8; values 32-63: scale 2, shift down: -9/8
    "IQ1_S": (
        half(8) + b"\x01" + bytes(31) + words(0, 2 << 12 | 1 << 15) + bytes(12),
        -7.0,
        {0: 9.0} | {i: -45.0 for i in range(32, 64)},
    ),
    # as IQ1_S; d 8 is 0x4800, spread over four words; scale 3 for values 16-31; shift down for values 8-15
    "IQ1_M": (
        b"\x01" + bytes(31) + b"\x80" + bytes(15) + words(3 << 3, 0, 8 << 12, 4 << 12),
        -7.0,
        {0: 9.0} | {i: -9.0 for i in range(8, 16)} | {i: -49.0 for i in range(16, 32)},
    ),
    "IQ4_NL": (half(0.5) + b"\xf8" + b"\x88" * 15, 0.5, {16: 56.5}),
    # scales: 0 is 0x21 - 32 = 1, 1 is 0x3f - 32 = 31, others 32 - 32 = 0
    "IQ4_XS": (
        half(0.5) + words(0b1010_1010_1010_1110) + b"\xf1" + bytes(3) + b"\x0f" + bytes(15) + b"\xf7" + bytes(111),
        0.0,
        {i: -63.5 for i in range(32)} | {i: 31 * -63.5 for i in range(32, 64)}
        | {0: 56.5, 32: 31 * -5.0, 48: 31 * 56.5},
    ),
    # byte ceil(n * 256 / 243): n 242 (digits 2 2 2 2 2) is 255; 0 is all -1; 121 (1 1 1 1 1) is 128
    # last 4 bytes carry 4 digits: n 1 0 0 0 0 = 81 is 86
    "TQ1_0": (
        b"\xff" + b"\x80" * 47 + b"\x56\x80\x80\x80" + half(2),
        0.0,
        {0: 2, 32: 2, 64: 2, 96: 2, 128: 2, 244: -2, 248: -2, 252: -2},
    ),
    "TQ2_0": (b"\x24" + b"\x55" * 63 + half(2), 0.0, {0: -2, 64: 2, 96: -2}),
    # 2**(129 - 127) * E2M1; codes 1 and 0xf
    "MXFP4": (b"\x81\xf1" + bytes(15), 0.0, {0: 2.0, 16: -24.0}),
    # scales 0x38 = 1, 0x40 = 2, 1 = 2**-9, 0x7f = 0; codes 7 (6.0) and 0xf (-6.0)
    "NVFP4": (
        b"\x38\x40\x01\x7f" + (b"\xf7" + bytes(7)) * 4,
        0.0,
        {0: 6, 8: -6, 16: 12, 24: -12, 32: 6 / 512, 40: -6 / 512},
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", ALL)
def test_blocks_written_by_hand(form):
    block, default, others = BY_HAND[form.name]
    assert len(block) == form.block_bytes
    expected = np.full(form.block_values, default, np.float32)
    for index, value in others.items():
        expected[index] = value
    assert form.unpack(np.frombuffer(block, np.uint8)[None])[0].tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("name", "owner", "shape"),
    [
        ("IQ2XXS", "IQ2_XXS", (256, 8)),
        ("IQ2XS", "IQ2_XS", (512, 8)),
        ("IQ2S", "IQ2_S", (1024, 8)),
        ("IQ3XXS", "IQ3_XXS", (256, 4)),
        ("IQ3S", "IQ3_S", (512, 4)),
        ("IQ1S", "IQ1_S", (2048, 8)),
    ],
)
def test_codebooks_equal_the_gguf_packages(name, owner, shape):
    known = getattr(gguf.quants, owner)
    known.init_grid()
    grid = GRIDS[name]
    assert grid.shape == shape and grid.dtype == (np.int8 if name == "IQ1S" else np.uint8)
    assert grid.flags.c_contiguous and not grid.flags.writeable
    assert np.array_equal(grid, known.grid.reshape(shape))


def test_small_tables_equal_the_gguf_packages():
    assert GRIDS["KSIGNS"].tobytes() == gguf.quants.IQ2_XXS.ksigns
    assert tuple(GRIDS["IQ4NL"]) == gguf.quants.IQ4_NL.kvalues
    assert tuple(GRIDS["E2M1"]) == gguf.quants.MXFP4.kvalues
    assert len(GRIDS) == 9 and all(table.dtype.itemsize == 1 for table in GRIDS.values())


@pytest.mark.parametrize(("bits", "run"), [(1, 1), (1, 32), (2, 1), (2, 32), (4, 1), (4, 16), (4, 64)])
def test_join_bits_undoes_split_bits(bits, run):
    packed = np.random.default_rng(0).integers(0, 256, (5, 128), np.uint8)
    codes = split_bits(packed, bits, run)
    assert codes.shape == (5, 128 * 8 // bits) and codes.max() == 2**bits - 1
    assert np.array_equal(join_bits(codes, bits, run), packed)


@pytest.mark.parametrize("form", ALL)
def test_pack_error_on_gaussian_values_is_under_its_ceiling(form):
    values = rows(form, 63)
    assert_close(through(form, values), values, ERROR_CEILING[form.name])


@pytest.mark.parametrize("name", "F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 TQ1_0 TQ2_0 MXFP4".split())
@pytest.mark.parametrize("kind", ["gaussian", "heavy tails"])
def test_pack_is_no_worse_than_the_gguf_package(name, kind):
    form = format_by_name(name)
    values = rows(form, 63)
    if kind == "heavy tails":
        values = np.random.default_rng(2).standard_t(3, values.shape).astype(np.float32)
    known = gguf.GGMLQuantizationType(form.ggml_type)
    theirs = gguf.quants.dequantize(gguf.quants.quantize(values, known), known)
    assert error(through(form, values), values) <= error(theirs, values)


@pytest.mark.parametrize("form", QUANTIZED)
def test_packing_twice_changes_little(form):
    once = through(form, rows(form, 64))
    assert_close(through(form, once), once, REPACK_CEILING.get(form.name, 0))


@pytest.mark.parametrize("form", ALL)
def test_zeros_stay_zeros(form):
    values = rows(form, 4)
    values[1] = 0
    values[2, 3:] = 0
    unpacked = through(form, values)
    assert (unpacked[1] == 0).all()
    assert (through(form, np.zeros_like(values)) == 0).all()
    assert np.abs(unpacked[0]).max() > 0


@pytest.mark.parametrize("form", ALL)
def test_awkward_blocks_stay_finite_and_no_worse_than_zeros(form):
    gaussian = rows(form, 4, scale=1.0)
    single = np.zeros_like(gaussian)
    single[:, 5] = 1
    blocks = {
        "constant": np.full_like(gaussian, 0.3),
        "negative constant": np.full_like(gaussian, -0.3),
        "one value": single,
        "all positive": np.abs(gaussian),
        "all negative": -np.abs(gaussian),
        "far from zero": gaussian + 10,
        "largest": gaussian / np.abs(gaussian).max() * np.float32(min(form.largest, 65504)),
        "below f16": gaussian * 1e-12,
        "subnormal": gaussian * 1e-42,
        "wide": gaussian * np.logspace(-8, 3, gaussian.shape[1], dtype=np.float32),
    }
    for name, values in blocks.items():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            unpacked = through(form, values)
        assert np.isfinite(unpacked).all(), name
        assert np.linalg.norm(unpacked - values) <= 1.0001 * np.linalg.norm(values), name


@pytest.mark.parametrize("form", QUANTIZED)
@pytest.mark.parametrize("constant", [0.3, -0.3, 65504.0, -65504.0])
def test_blocks_of_one_value_are_kept(form, constant):
    """Exact but for the rounding of f16 scales, where a code stands for it; E2M1 and the IQ3_S rows are coarser."""
    values = np.full((3, form.block_values), constant, np.float32)
    if abs(constant) > form.largest:
        values *= np.float32(form.largest / abs(constant))
    assert_close(through(form, values), values, {"MXFP4": 0.17, "NVFP4": 0.03, "IQ3_S": 0.12}.get(form.name, 2e-3))


@pytest.mark.parametrize("form", QUANTIZED)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_pack_refuses_what_no_code_stands_for(form, bad):
    values = rows(form, 3)
    values[2, 7] = bad
    with pytest.raises(FormatError, match=f"{form.name} holds magnitudes up to .*, found"):
        pack_tensor(values, form.ggml_type)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_plain_floats_keep_nan_and_infinity(name):
    form = format_by_name(name)
    # A NaN whose payload is only in the low bits must not become infinity.
    low_nan = np.array([0x7F800001], np.uint32).view(np.float32)[0]
    values = np.array([np.nan, low_nan, np.inf, -np.inf, -0.0, 1.0], np.float32)
    unpacked = through(form, values)
    assert np.array_equal(unpacked, values, equal_nan=True) and np.signbit(unpacked[4])


@pytest.mark.parametrize("form", QUANTIZED)
def test_unpack_of_broken_scales_spares_the_other_blocks(form):
    blocks = random_blocks(form.ggml_type, 3, np.random.default_rng(3))
    clean = form.unpack(blocks)
    blocks[1] = 255
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = unpack_tensor(blocks, form.ggml_type, (3, form.block_values))
    assert np.array_equal(values[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("form", ALL)
def test_a_tensor_is_its_blocks_in_order(form):
    """Over more than one conversion chunk, in three dimensions, from a read-only view."""
    shape = (3, 65, max(form.block_values, 256) * 5)
    blocks = random_blocks(form.ggml_type, int(np.prod(shape)) // form.block_values, np.random.default_rng(4))
    values = unpack_tensor(np.frombuffer(blocks.tobytes(), np.uint8), form.ggml_type, shape)
    assert values.shape == shape and values.dtype == np.float32
    assert np.array_equal(values.reshape(-1, form.block_values), form.unpack(blocks))


@pytest.mark.parametrize("name", ["F16", "Q8_0", "Q4_K", "IQ4_XS"])
def test_packing_a_tensor_is_packing_its_rows(name):
    form = format_by_name(name)
    values = rows(form, 66).reshape(2, 33, -1)
    packed = pack_tensor(values, form.ggml_type)
    assert packed.dtype == np.uint8 and packed.shape == (values.size // form.block_values * form.block_bytes,)
    one_by_one = [pack_tensor(row, form.ggml_type) for row in values.reshape(66, -1)]
    assert np.array_equal(packed, np.concatenate(one_by_one))
    assert np.array_equal(pack_tensor(values.astype(np.float64), form.ggml_type), packed)


@pytest.mark.parametrize("form", ALL)
def test_random_blocks_are_finite_two_sided_and_repeatable(form):
    n = 100_000 // form.block_values
    blocks = random_blocks(form.ggml_type, n, np.random.default_rng(5))
    values = form.unpack(blocks)
    assert np.isfinite(values).all()
    assert 0.3 < np.sqrt((values**2).mean()) < 3
    assert abs(values.mean()) < 0.05 and (values > 0).any() and (values < 0).any()
    assert np.array_equal(blocks, random_blocks(form.ggml_type, n, np.random.default_rng(5)))


def test_unknown_names_and_ids_name_the_nearest():
    assert format_by_name("q4_k") is FORMATS[12]
    with pytest.raises(FormatError, match="'Q4_KM' is not a tensor type that we read; did you mean 'Q4_K'"):
        format_by_name("Q4_KM")
    with pytest.raises(FormatError, match="type id 31 is not one that we read; known: 0 F32, 1 F16"):
        unpack_tensor(np.zeros(18, np.uint8), 31, (32,))


def test_shapes_that_do_not_fit_the_bytes_are_refused():
    with pytest.raises(FormatError, match="rows of 48 values are not whole Q4_0 blocks of 32"):
        unpack_tensor(np.zeros(54, np.uint8), 2, (2, 48))
    with pytest.raises(FormatError, match="rows of 48 values are not whole Q4_0 blocks of 32"):
        pack_tensor(np.zeros((2, 48)), 2)
    with pytest.raises(ShapeError, match=r"Q4_0 \(2, 32\) needs uint8 \[36\], got uint8 \(54,\)"):
        unpack_tensor(np.zeros(54, np.uint8), 2, (2, 32))
    with pytest.raises(ShapeError, match="got float32"):
        unpack_tensor(np.zeros(36, np.float32), 2, (2, 32))
    assert unpack_tensor(np.zeros(0, np.uint8), 2, (0, 32)).shape == (0, 32)
