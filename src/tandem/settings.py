"""Every setting that comes from the environment: name, type, default and meaning. Unknown TANDEM_* names are errors."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tandem.errors import SettingError, nearest


@dataclass(frozen=True)
class Setting:
    """One environment variable `TANDEM_<NAME>`; kind is str or int."""

    name: str
    kind: type
    default: str | int | None
    meaning: str

    @property
    def variable(self) -> str:
        return f"TANDEM_{self.name.upper()}"


SETTINGS = {
    s.name: s
    for s in (
        Setting("isa", str, "", "instruction set of the CPU library: scalar, avx2 or avx512; empty: the best this CPU has"),
        Setting("threads", int, 0, "threads of the CPU engine; 0: one per physical core this process may use"),
        Setting("test_models", str, "", "folder with model files for tests and benchmarks; empty: ~/.cache/tandem-test-models"),
    )
}


def setting(name: str, environ: Mapping[str, str] = os.environ) -> str | int | None:
    """The value of a setting from the environment, or its default. Raises SettingError on unknown names and bad values."""
    known = {s.variable for s in SETTINGS.values()}
    for variable in environ:
        if variable.startswith("TANDEM_") and variable not in known:
            raise SettingError(f"unknown environment variable {variable}{nearest(variable, known)}")
    spec = SETTINGS[name]
    raw = environ.get(spec.variable, "")
    if raw == "":
        return spec.default
    try:
        return spec.kind(raw)
    except ValueError:
        raise SettingError(f"{spec.variable}={raw!r} is not {spec.kind.__name__}: {spec.meaning}") from None
