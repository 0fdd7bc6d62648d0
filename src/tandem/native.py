"""Finds and loads the compiled CPU library: one per instruction set, the best this CPU has unless settings say otherwise."""

import ctypes
import functools
from pathlib import Path

from tandem.errors import NativeError, SettingError, nearest
from tandem.settings import setting

ISAS = ("scalar", "avx2", "avx512")  # worst to best; avx512 means F, BW, DQ, VL, VBMI, VNNI, and GFNI
LIB_DIR = Path(__file__).parent / "lib"


class Native:
    """A loaded library. `isa` is its instruction set; `op(name)` the address of an op; pools run programs."""

    def __init__(self, isa: str):
        self.isa = isa
        path = LIB_DIR / f"libtandem_{isa}.so"
        if not path.exists():
            raise NativeError(f"{path} not found: install the package (pip install .) or run cmake -S . -B build && cmake --build build")
        self.lib = ctypes.CDLL(str(path))
        pointer, int64 = ctypes.c_void_p, ctypes.c_int64
        self.lib.tandem_pool_create.restype = pointer
        self.lib.tandem_pool_create.argtypes = [ctypes.c_int32]
        self.lib.tandem_pool_destroy.argtypes = [pointer]
        self.lib.tandem_pool_destroy.restype = None
        self.lib.tandem_pool_run.argtypes = [pointer, pointer, int64, pointer]
        self.lib.tandem_pool_run.restype = None

    def op(self, name: str, args_type: type[ctypes.Structure]) -> int:
        """Address of the op's entry; raises NativeError if C++ and Python disagree on its arguments' size."""
        try:
            size = getattr(self.lib, f"tandem_sizeof_{name}")
            entry = getattr(self.lib, f"tandem_op_{name}")
        except AttributeError as missing:
            raise NativeError(f"{missing}: the library is older than the package, build it again") from None
        size.restype = ctypes.c_int64
        if size() != ctypes.sizeof(args_type):
            raise NativeError(f"arguments of {name}: library has {size()} bytes, Python {ctypes.sizeof(args_type)}; build it again")
        return ctypes.cast(entry, ctypes.c_void_p).value


def best_isa() -> str:
    """The best instruction set that this CPU has."""
    lib = load("scalar").lib
    lib.tandem_cpu_features.restype = ctypes.c_int32
    bits = lib.tandem_cpu_features()
    return "avx512" if bits & 2 else "avx2" if bits & 1 else "scalar"


@functools.cache
def load(isa: str) -> Native:
    """The library of that instruction set. Raises NativeError if it is not built."""
    if isa not in ISAS:
        raise SettingError(f"TANDEM_ISA={isa!r}{nearest(isa, ISAS)}")
    return Native(isa)


def native() -> Native:
    """The library to use: TANDEM_ISA if set, else the best one; raises NativeError where the CPU cannot run it."""
    best, wanted = best_isa(), setting("isa")
    if not wanted:
        return load(best)
    chosen = load(wanted)
    if ISAS.index(wanted) > ISAS.index(best):
        raise NativeError(f"TANDEM_ISA={wanted}: this CPU has only {best}")
    return chosen
