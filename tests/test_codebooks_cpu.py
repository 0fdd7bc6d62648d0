"""Codebook, FP4 and ternary types on every instruction set: each code of each block means what numpy says, and no byte
after a block is read."""

import ctypes
import mmap
import subprocess
import sys

import numpy as np
import pytest

from tandem.native import ISAS, best_isa, load
from tandem.ops.base import Weight
from tandem.ops.matmul_cpu import hand_over_grids, record_matmul
from tandem.ops.program import Pool, Program, StepArgs
from tandem.quant import FORMATS, format_by_name, random_blocks

AVAILABLE = ISAS[: ISAS.index(best_isa()) + 1]
NAMES = ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"]
NAMES += ["MXFP4", "NVFP4", "TQ1_0", "TQ2_0"]
COLS = 256


def all_codes(form):
    """Rows of one 256-value span under plausible scales; every byte of the codes takes all 256 values, at every place.

    The bytes of a row differ by steps, so that ids, high bits and signs meet in many combinations.
    """
    rows = random_blocks(form.ggml_type, 1024 * COLS // form.block_values, np.random.default_rng(5))
    codes = {"IQ1_M": (0, 56), "MXFP4": (1, 17), "NVFP4": (4, 36), "TQ1_0": (0, 52), "TQ2_0": (0, 64)}
    part = slice(*codes.get(form.name, (2, form.block_bytes)))
    width = len(range(form.block_bytes)[part])
    number, place = np.arange(len(rows))[:, None], np.arange(width)[None, :]
    rows[:, part] = (number * (2 * (number // 256) + 1) + place * 37).astype(np.uint8)
    if form.name == "IQ1_M":  # the scale lies in the top nibbles of the last words: 0.5
        rows[:, 49::2] &= 0x0F
        rows[:, 53] |= 0x80
        rows[:, 55] |= 0x30
    return rows.reshape(1024, -1)


def values(form, rows):
    return form.unpack(rows.reshape(-1, form.block_bytes)).reshape(len(rows), COLS)


def products(native, form, rows, x):
    program = Program(native, len(x), 1)
    buffer = program.buffer(COLS)
    (out,) = record_matmul(program, buffer, [Weight("w", (len(rows), COLS), form.ggml_type, rows)])
    program.place(keep=(buffer, out))
    program.finish()
    program.rows(buffer, len(x))[:] = x
    program.run_trunk(Pool(native, 1), StepArgs(rows=len(x)))
    return program.rows(out, len(x)).copy()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("isa", AVAILABLE)
def test_rows_of_all_codes_unpack_to_the_bits_that_numpy_says(isa, name):
    native, form = load(isa), format_by_name(name)
    hand_over_grids(native)
    rows = all_codes(form)
    found = np.full((len(rows), COLS), np.nan, np.float32)
    for row, out in zip(rows, found, strict=True):
        addresses = [ctypes.c_void_p(a.ctypes.data) for a in (row, out)]
        native.lib.tandem_unpack_row(form.ggml_type, addresses[0], ctypes.c_int64(COLS), addresses[1])
    wanted = values(form, rows)
    assert np.all(np.isfinite(wanted)) and np.max(np.abs(wanted)) > 0
    # IQ1 adds its shift of 1/8 to the integers or to the result: the same number, rounded elsewhere.
    assert np.max(np.abs(found - wanted)) <= (1e-6 * np.max(np.abs(wanted)) if name.startswith("IQ1") else 0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("isa", AVAILABLE)
def test_products_with_unit_inputs_are_the_weights(isa, name):
    """An input of zeros and one 127 rounds without loss, so the product is 127 times one weight, up to its last bit."""
    native, form = load(isa), format_by_name(name)
    rows = all_codes(form)
    wanted = values(form, rows)
    for first in range(0, COLS, 8):
        x = np.zeros((8, COLS), np.float32)
        x[np.arange(8), first + np.arange(8)] = 127
        found = products(native, form, rows, x).T
        exact = 127 * wanted[:, first : first + 8].astype(np.float64)
        # An offset or a correction of 128 cancels only up to the rounding of its own products.
        room = 1e-6 * 127 * np.max(np.abs(wanted), axis=1, keepdims=True)
        assert np.all(np.abs(found - exact) <= room)


def check_page_ends(isa):
    """Weights whose last byte is the last before a page that may not be read: a read past it ends the program."""
    native, page = load(isa), mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    for form in FORMATS.values():
        for n_blocks in range(1, 10):
            cols = n_blocks * form.block_values
            if cols % 32:
                continue
            memory = mmap.mmap(-1, 8 * page)
            whole = np.frombuffer(memory, np.uint8)
            assert libc.mprotect(ctypes.c_void_p(whole.ctypes.data + 7 * page), ctypes.c_size_t(page), 0) == 0
            size = n_blocks * form.block_bytes
            blocks = whole[7 * page - size : 7 * page]
            blocks[:] = random_blocks(form.ggml_type, n_blocks, np.random.default_rng(n_blocks)).reshape(-1)
            for rows in (1, 3, 9):
                program = Program(native, rows, 1)
                buffer = program.buffer(cols)
                weight = Weight("w", (1, cols), form.ggml_type, blocks.reshape(1, size))
                (out,) = record_matmul(program, buffer, [weight])
                program.place(keep=(buffer, out))
                program.finish()
                program.rows(buffer, rows)[:] = 1
                program.run_trunk(Pool(native, 1), StepArgs(rows=rows))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs mprotect")
@pytest.mark.parametrize("isa", AVAILABLE)
def test_no_byte_after_the_last_block_is_read(isa):
    done = subprocess.run([sys.executable, __file__, isa], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


if __name__ == "__main__":
    check_page_ends(sys.argv[1])
