"""Measured RAM read bandwidth of this machine, with the threads that decode would use."""

import ctypes
import time

import numpy as np

from tandem.native import Native
from tandem.ops.program import Pool, Program, StepArgs


class ReadArgs(ctypes.Structure):
    """Mirror of `ReadArgs` in bandwidth.cpp."""

    _fields_ = [("data", ctypes.c_void_p), ("sums", ctypes.c_void_p), ("size_bytes", ctypes.c_int64)]


def read_bandwidth_gb_s(native: Native, threads: int, size_bytes: int = 1 << 29, repeats: int = 9) -> float:
    """Best of `repeats` reads of a block far larger than the caches, in 10^9 bytes a second."""
    block = np.full(size_bytes // 8, 1, np.uint64)
    sums = np.zeros(threads, np.uint64)
    program = Program(native, 1, 1)
    program.call("read_bytes", ReadArgs(program.address(block), program.address(sums), block.nbytes))
    program.place()
    program.finish()
    pool = Pool(native, threads)
    best_s = float("inf")
    try:
        for _ in range(repeats):
            start = time.perf_counter()
            program.run_trunk(pool, StepArgs(1))
            best_s = min(best_s, time.perf_counter() - start)
    finally:
        pool.close()
    assert int(sums.sum()) == len(block), "the read skipped memory"
    return block.nbytes / best_s / 1e9
