"""Every setting: name, kind, default, bounds and meaning. The one table behind the flags and the configuration file of
`tandem serve` and behind the TANDEM_* variables; other names are errors. Nothing else reads the environment.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tandem.errors import SettingError, nearest

Kind = Literal["text", "int", "number", "switch", "bytes", "list"]
Value = str | int | float | bool | tuple[str, ...]

ENVIRON: Mapping[str, str] = os.environ
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


@dataclass(frozen=True)
class Setting:
    """One setting, also called TANDEM_<NAME> and, where `served`, --<name> and `name = ...` in the file.

    least, most: bounds of a number, in its unit. choices: the only texts. secret: has no flag, since the command
    line of a process can be read by everybody, and its value is never shown.
    """

    name: str
    kind: Kind
    default: Value
    meaning: str
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    served: bool = True
    secret: bool = False

    @property
    def variable(self) -> str:
        return f"TANDEM_{self.name.upper()}"

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def wanted(self) -> str:
        """What a good value looks like, for error messages."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        words = {
            "text": "text",
            "int": "a whole number",
            "number": "a number",
            "switch": "true or false",
            "bytes": "a number of bytes such as 8GiB",
            "list": "a list of texts",
        }[self.kind]
        if self.least is None:
            return words
        return (
            f"{words} from {self.least:g} to {self.most:g}"
            if self.most is not None
            else f"{words}, at least {self.least:g}"
        )


def _engine_settings() -> tuple[Setting, ...]:
    return (
        Setting(
            "isa",
            "text",
            "",
            "instruction set of the CPU library: scalar, avx2 or avx512; empty: the best this CPU has",
            served=False,
        ),
        Setting(
            "test_models",
            "text",
            "",
            "folder with model files for tests and benchmarks; empty: ~/.cache/tandem-test-models",
            served=False,
        ),
        Setting(
            "models_dir",
            "text",
            "",
            "where `tandem pull` keeps models; empty: ~/.local/share/tandem/models",
            served=False,
        ),
        Setting(
            "config",
            "text",
            "",
            "the configuration file; empty: ~/.config/tandem/tandem.toml if it is there",
            served=False,
        ),
        Setting("model", "text", "", ".gguf file or name of a pulled model; empty: the packaged demonstration"),
        Setting("alias", "list", (), "further names by which clients may ask for the model"),
        Setting("ctx", "int", 0, "tokens of context; 0: 8192 or what fits", least=0, most=1 << 24),
        Setting("kv", "text", "f16", "type of the cache", choices=("f16", "q8_0", "f32")),
        Setting(
            "threads",
            "int",
            0,
            "threads of the CPU engine; 0: one per physical core this process may use",
            least=0,
            most=1024,
        ),
        Setting("draft", "text", "auto", "speculation, which never changes the text: auto, off, or of mtp,ngram,model"),
        Setting("draft_max", "int", 4, "most drafts a round", least=0, most=16),
        Setting("draft_fixed", "switch", False, "always draft draft-max tokens, whether it pays or not"),
        Setting("draft_model", "text", "", "a smaller .gguf with the same vocabulary that drafts too"),
    )


def _server_settings() -> tuple[Setting, ...]:
    return (
        Setting("host", "text", "127.0.0.1", "address to listen on; others than loopback need a key"),
        Setting("port", "int", 8080, "port to listen on; 0: any free one", least=0, most=65535),
        Setting("api_key", "list", (), "keys that clients must show", secret=True),
        Setting("api_key_file", "text", "", "file with one key a line"),
        Setting("allowed_hosts", "list", (), "further names by which clients may address the server"),
        Setting(
            "allowed_origins", "list", (), "origins of web pages that may call the server, such as https://chat.example"
        ),
        Setting("max_sequences", "int", 8, "answers written at the same time", least=1, most=8),
        Setting(
            "max_queue", "int", 64, "requests that may wait; more are refused as overloaded", least=0, most=100_000
        ),
        Setting(
            "deadline_s", "number", 0.0, "longest time of one request, waiting included; 0: none", least=0, most=1e6
        ),
        Setting("load_deadline_s", "number", 600.0, "longest wait for the model to load or wake", least=1, most=1e6),
        Setting("ping_s", "number", 15.0, "seconds of silence in a stream before a ping", least=0.1, most=3600),
        Setting(
            "sleep_after", "number", 0.0, "idle seconds after which memory is given back; 0: never", least=0, most=1e9
        ),
        Setting(
            "sleep_level", "int", 1, "what sleep gives back; 1: caches and states, 2: the weights too", least=1, most=2
        ),
        Setting("cache_bytes", "bytes", 0, "memory for conversations kept for reuse; 0: what the plan leaves", least=0),
        Setting("cache_dir", "text", "", "folder where conversations survive a restart; empty: nowhere"),
        Setting("max_body_bytes", "bytes", 32 << 20, "largest request body", least=1024),
        Setting("max_header_bytes", "bytes", 64 << 10, "largest request head", least=4096, most=1 << 24),
        Setting("max_connections", "int", 512, "connections at the same time; more are refused", least=1, most=100_000),
        Setting(
            "read_timeout_s",
            "number",
            30.0,
            "seconds within which a request must have arrived in full",
            least=0.1,
            most=3600,
        ),
        Setting("grace_s", "number", 20.0, "seconds that running answers may take after SIGTERM", least=0, most=3600),
        Setting(
            "log_level", "text", "info", "least severe message to log", choices=("debug", "info", "warning", "error")
        ),
        Setting(
            "log_format", "text", "auto", "auto: console on a terminal, else json", choices=("auto", "console", "json")
        ),
        Setting(
            "log_prompts",
            "switch",
            False,
            "log what clients and model write; otherwise no text of theirs is ever logged",
        ),
    )


SETTINGS = {s.name: s for s in (*_engine_settings(), *_server_settings())}
SERVED = {name: s for name, s in SETTINGS.items() if s.served}


def setting(name: str, environ: Mapping[str, str] = ENVIRON) -> Any:
    """The value of a setting from the environment, or its default. Raises SettingError."""
    found = from_environment(environ, (name,))
    return found.get(name, SETTINGS[name].default)


def from_environment(environ: Mapping[str, str] = ENVIRON, names: tuple[str, ...] | None = None) -> dict[str, Value]:
    """Values of the settings (of all, or of these) that the environment gives; empty variables count as not given.

    Raises SettingError for TANDEM_* variables that are no settings, and for bad values of those asked for.
    """
    known = {s.variable: s for s in SETTINGS.values()}
    for variable in environ:
        if variable.startswith("TANDEM_") and variable not in known:
            raise SettingError(f"unknown environment variable {variable}{nearest(variable, known)}")
    wanted = SETTINGS if names is None else names
    given = ((s, environ.get(s.variable, "")) for s in (SETTINGS[name] for name in wanted))
    return {s.name: parsed(s, raw, s.variable) for s, raw in given if raw != ""}


def parsed(spec: Setting, raw: str, where: str) -> Value:
    """The value that a text on the command line or in the environment means. Raises SettingError naming `where`."""
    text = raw.strip()
    try:
        if spec.kind == "switch":
            if text.lower() not in _TRUE + _FALSE:
                raise ValueError
            value: Value = text.lower() in _TRUE
        elif spec.kind == "list":
            value = tuple(part.strip() for part in text.split(",") if part.strip())
        elif spec.kind == "bytes":
            value = parse_bytes(text)
        else:
            value = {"int": int, "number": float, "text": str}[spec.kind](text)
    except ValueError:
        raise _bad(spec, raw, where) from None
    return checked(spec, value, where)


def checked(spec: Setting, value: Any, where: str) -> Value:
    """A value that already has a type, as from the file, if it has the right type and range. Raises SettingError."""
    if spec.kind == "bytes" and isinstance(value, str):
        return parsed(spec, value, where)
    if spec.kind == "list" and isinstance(value, list | tuple):
        value = tuple(value)
        if not all(isinstance(part, str) and part.strip() for part in value):
            raise _bad(spec, value, where)
        return value
    types = {"text": str, "int": int, "number": (int, float), "switch": bool, "bytes": int, "list": ()}[spec.kind]
    if not isinstance(value, types) or (isinstance(value, bool) and spec.kind != "switch"):
        raise _bad(spec, value, where)
    if spec.choices and value not in spec.choices:
        raise _bad(spec, value, where, nearest(value, spec.choices))
    too_small = spec.least is not None and not value >= spec.least  # `not >=`: a NaN is refused
    if too_small or (spec.most is not None and not value <= spec.most):
        raise _bad(spec, value, where)
    if spec.kind == "text" and any(ord(c) < 0x20 for c in value):
        raise _bad(spec, value, where)
    return float(value) if spec.kind == "number" else value


def parse_bytes(text: str) -> int:
    """Bytes from a number with an optional unit (8GiB, 512 MB, 1.5gib). Raises ValueError."""
    number = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text[len(number) :].strip().lower()
    if unit not in _UNITS:
        raise ValueError(text)
    size = float(number) * _UNITS[unit] if "." in number else int(number) * _UNITS[unit]
    if not 0 <= size < 1 << 62:
        raise ValueError(text)
    return int(size)


def home_folder(variable: str, fallback: str, environ: Mapping[str, str] = ENVIRON) -> Path:
    """A folder of the user by the XDG rules: that of the variable if it is absolute, else the fallback under home."""
    given = Path(environ.get(variable, ""))
    return given if given.is_absolute() else Path.home() / fallback


def hub_endpoint(environ: Mapping[str, str] = ENVIRON) -> str:
    """Address of the model hub: HF_ENDPOINT, the variable that the hub's own tools use, or the public hub."""
    return environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


def _bad(spec: Setting, value: Any, where: str, hint: str = "") -> SettingError:
    shown = "this value" if spec.secret else repr(value)
    return SettingError(f"{where}: {shown} for {spec.name}: {spec.wanted} is needed{hint} ({spec.meaning})")
