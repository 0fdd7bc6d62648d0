"""What this computer has: memory that may be used, cores, processor name. Reads the operating system, changes nothing."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """memory_bytes: all RAM this process may use (container limit included); free_bytes: what of it is not taken now,
    page cache counted as free; cores: physical cores this process may run on."""

    name: str
    cores: int
    memory_bytes: int
    free_bytes: int


def machine() -> Machine:
    """This computer, as it is now."""
    total, free = _memory()
    return Machine(_processor_name(), _physical_cores(), total, free)


def _memory() -> tuple[int, int]:
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(lines[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    limit, used = _container_limit()
    if limit is not None and limit < total:
        return limit, min(free, limit - used)
    return total, free


def _container_limit() -> tuple[int | None, int]:
    """Limit of the control group, and what it uses without the page cache; None where there is no limit."""
    root = Path("/sys/fs/cgroup")
    try:
        raw = (root / "memory.max").read_text().strip()
        if raw == "max":
            return None, 0
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        return int(raw), int(stat["anon"]) + int(stat.get("shmem", 0))
    except (OSError, KeyError, ValueError):
        return None, 0


def _physical_cores() -> int:
    allowed = os.sched_getaffinity(0)
    cores = set()
    for cpu in allowed:
        try:
            siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            siblings = str(cpu)
        cores.add(siblings)
    return max(1, min(len(cores), _container_cpus() or len(cores)))


def _container_cpus() -> int | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return None


def _processor_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown processor"
