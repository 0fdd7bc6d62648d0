"""Checks whether this machine, its configuration and a model will do, and says what to change.

In: a model file or none, a configuration file or none. Out: a `Report` of lines that are ok, warn or fail. It reads and
measures for a few seconds; it changes nothing.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tandem.catalog import entries, model_path, models_dir
from tandem.errors import EngineError
from tandem.machine import machine
from tandem.settings import setting
from tandem.show import size

Level = Literal["ok", "warn", "fail"]
_MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}
_SLOW_RAM_GB_S = 8.0
_SLOW_DISK_MB_S = 200.0
_READ_BYTES = 128 << 20
_GPU_WAIT_S = 10.0


@dataclass(frozen=True)
class Finding:
    """One line. advice: what to do, empty where nothing is to be done."""

    topic: str
    level: Level
    text: str
    advice: str = ""

    def line(self) -> str:
        return f"{_MARKS[self.level]}  {self.topic}: {self.text}" + (f"; {self.advice}" if self.advice else "")


@dataclass(frozen=True)
class Report:
    """All findings, in the order of the checks."""

    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing failed."""
        return all(finding.level != "fail" for finding in self.findings)

    def lines(self) -> list[str]:
        counts = {level: sum(f.level == level for f in self.findings) for level in _MARKS}
        return [f.line() for f in self.findings] + [f"{counts['fail']} would fail, {counts['warn']} could be better"]

    def as_dict(self) -> dict:
        return {"healthy": self.healthy, "findings": [asdict(finding) for finding in self.findings]}


def examine(model: Path | None = None, config: str | None = None) -> Report:
    """Runs every check; a check that itself breaks is a finding. model: None for the configured or packaged one."""
    checks: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
        ("library", _library),
        ("cores", _cores),
        ("memory", _memory),
        ("memory speed", _memory_speed),
        ("huge pages", _huge_pages),
        ("gpu", _gpu),
        ("configuration", lambda: _configuration(config)),
        ("models", _models),
        ("model", lambda: _model(model, config)),
    )
    findings: list[Finding] = []
    for topic, check in checks:
        try:
            findings += check()
        except EngineError as error:
            findings.append(Finding(topic, "fail", str(error)))
        except OSError as error:
            findings.append(Finding(topic, "warn", f"could not be checked: {error}"))
    return Report(tuple(findings))


def _library() -> Iterator[Finding]:
    from tandem.native import ISAS, LIB_DIR, best_isa, native

    chosen, best = native().isa, best_isa()
    built = [isa for isa in ISAS if (LIB_DIR / f"libtandem_{isa}.so").exists()]
    text = f"{chosen}, of {', '.join(built)}; this CPU ({machine().name}) has up to {best}"
    if chosen != best:
        yield Finding("library", "warn", text, "unset TANDEM_ISA for full speed")
    elif chosen == "scalar":
        yield Finding("library", "warn", text, "without AVX2 everything is many times slower")
    else:
        yield Finding("library", "ok", text)


def _cores() -> Iterator[Finding]:
    cores, logical = machine().cores, os.cpu_count() or 1
    threads = setting("threads") or cores
    text = f"{threads} threads on {cores} physical cores that may be used ({logical} logical ones in all)"
    if threads > cores:
        yield Finding("cores", "warn", text, "threads beyond the cores slow decoding down: lower TANDEM_THREADS")
    else:
        yield Finding("cores", "ok", text)
    load = os.getloadavg()[0]
    if load > 0.5 * logical:
        yield Finding(
            "load",
            "warn",
            f"{load:.1f} threads of other programs ran in the last minute",
            "end them: they halve the speed",
        )


def _memory() -> Iterator[Finding]:
    here = machine()
    text = f"{size(here.free_bytes)} free of {size(here.memory_bytes)} that may be used"
    low = here.free_bytes < 1 << 30
    yield Finding("memory", "warn" if low else "ok", text, "close other programs" if low else "")
    swap = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    used = (int(swap["SwapTotal"].split()[0]) - int(swap["SwapFree"].split()[0])) * 1024
    if used > 1 << 30:
        yield Finding(
            "swap", "warn", f"{size(used)} in use", "memory was short: weights that are swapped out are read from disk"
        )


def _memory_speed() -> Iterator[Finding]:
    from tandem.native import native
    from tandem.ops.bandwidth import read_bandwidth_gb_s

    here = machine()
    threads = setting("threads") or here.cores
    block = min(1 << 28, here.free_bytes // 4)
    if block < 1 << 26:
        yield Finding("memory speed", "warn", "too little memory is free to measure it")
        return
    speed = read_bandwidth_gb_s(native(), threads, size_bytes=block, repeats=5)
    text = f"{speed:.1f} GB/s read with {threads} threads: decode gives at most this over the bytes of a token"
    slow = speed < _SLOW_RAM_GB_S
    yield Finding(
        "memory speed",
        "warn" if slow else "ok",
        text,
        "is the memory in one channel, or the machine busy?" if slow else "",
    )


def _huge_pages() -> Iterator[Finding]:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not path.exists():
        yield Finding(
            "huge pages", "warn", "this kernel has none", "a kernel with transparent huge pages reads weights faster"
        )
        return
    text = path.read_text()
    mode = text[text.find("[") + 1 : text.find("]")]
    if mode == "never":
        yield Finding("huge pages", "warn", "switched off", f"as root: echo madvise > {path}")
    else:
        yield Finding("huge pages", "ok", mode)


def _gpu() -> Iterator[Finding]:
    if not Path("/dev/nvidiactl").exists():
        yield Finding("gpu", "ok", "no NVIDIA card: the CPU computes everything")
        return
    ask = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free,driver_version", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=_GPU_WAIT_S, check=True).stdout
    except FileNotFoundError:
        yield Finding("gpu", "warn", "there is a card, but no nvidia-smi", "install the driver's tools")
    except (subprocess.SubprocessError, UnicodeDecodeError):
        yield Finding("gpu", "warn", "there is a card, but nvidia-smi fails", "is the driver loaded?")
    else:
        for line in answer.splitlines():
            name, total, free, driver = (part.strip() for part in line.split(","))
            yield Finding(
                "gpu", "ok", f"{name}, {free} of {total} MiB free, driver {driver}; this version computes on the CPU"
            )


def _configuration(path: str | None) -> Iterator[Finding]:
    from tandem.serve.config import config_path, load_config

    config, file = load_config({}, path=path), config_path(path=path)
    changed = {name: where for name, where in config.sources.items() if where != "default"}
    told = ", ".join(f"{name} ({where})" for name, where in changed.items()) or "all defaults"
    yield Finding("configuration", "ok", f"{file or 'no file'}: {told}")
    yield _port(config.host, config.port)
    if config.cache_dir and not os.access(_existing_parent(Path(config.cache_dir)), os.W_OK):
        yield Finding(
            "cache_dir", "fail", f"{config.cache_dir} cannot be written", "choose another folder or its owner"
        )


def _port(host: str, port: int) -> Finding:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except socket.gaierror:
            return Finding("port", "fail", f"{host} is no address of this machine", "set host to 127.0.0.1")
        except OSError as error:
            return Finding(
                "port", "fail", f"{host}:{port}: {error.strerror}", "stop what listens there, or set another port"
            )
    return Finding("port", "ok", f"{host}:{port} is free")


def _models() -> Iterator[Finding]:
    folder = models_dir()
    found = entries()
    free = shutil.disk_usage(_existing_parent(folder)).free
    taken = sum(entry.size_bytes for entry in found)
    text = f"{len(found)} pulled, {size(taken)}, in {folder}; {size(free)} of disk are free"
    low = free < 10 << 30
    yield Finding("models", "warn" if low else "ok", text, "TANDEM_MODELS_DIR can name a larger disk" if low else "")


def _model(model: Path | None, config_file: str | None) -> Iterator[Finding]:
    from tandem.runtime.plan import describe
    from tandem.serve.config import load_config
    from tandem.show import memory_bytes

    config = load_config({}, path=config_file)
    summary = describe(model or model_path(config.model))
    ctx = config.ctx or min(8192, summary.ctx_train)
    needed, here = memory_bytes(summary, ctx, config.kv), machine()
    text = f"{summary.name} with {ctx} tokens of context needs {size(needed)}, {size(here.free_bytes)} are free"
    if needed > here.memory_bytes:
        yield Finding("model", "fail", text, "take a smaller or more strongly quantized file")
    elif needed > here.free_bytes:
        yield Finding("model", "fail", text, "close other programs, lower ctx, or set kv to q8_0")
    else:
        yield Finding("model", "ok", text)
    yield _disk(summary.paths[0])


def _disk(path: Path) -> Finding:
    """How fast the file's disk is, past the page cache where the system allows it."""
    with path.open("rb", buffering=0) as file:
        length = min(os.fstat(file.fileno()).st_size, _READ_BYTES)
        os.posix_fadvise(file.fileno(), 0, length, os.POSIX_FADV_DONTNEED)
        start, left = time.perf_counter(), length
        while left > 0 and (chunk := file.read(min(left, 4 << 20))):
            left -= len(chunk)
        took_s = time.perf_counter() - start
    speed = (length - left) / max(took_s, 1e-9) / 1e6
    text = f"{path.parent} reads {speed:,.0f} MB/s (a part of it may come from memory)"
    slow = speed < _SLOW_DISK_MB_S
    return Finding(
        "disk", "warn" if slow else "ok", text, "loading will be slow: keep models on an SSD" if slow else ""
    )


def _existing_parent(path: Path) -> Path:
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if parent.exists())
