"""What `tandem serve` is to do: flags over environment over configuration file over defaults, all from one table.

In: the flags as texts, the environment, a TOML file. Out: a frozen `ServeConfig`, or SettingError that says where.
"""

import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.errors import SettingError, nearest
from tandem.settings import ENVIRON, SERVED, checked, from_environment, home_folder, parsed

_MIN_KEY_CHARACTERS = 8


@dataclass(frozen=True)
class ServeConfig:
    """The settings of one server, one field for each setting of the table (see there for their meaning and units).

    sources: where each value comes from: the flag, the variable, `FILE line N` or `default`. api_key: all keys, those
    of api_key_file included; never printed.
    """

    model: str
    alias: tuple[str, ...]
    ctx: int
    kv: str
    threads: int
    draft: str
    draft_max: int
    draft_fixed: bool
    draft_model: str
    host: str
    port: int
    api_key: tuple[str, ...] = field(repr=False)
    api_key_file: str
    allowed_hosts: tuple[str, ...]
    allowed_origins: tuple[str, ...]
    max_sequences: int
    max_queue: int
    deadline_s: float
    load_deadline_s: float
    ping_s: float
    sleep_after: float
    sleep_level: int
    cache_bytes: int
    cache_dir: str
    max_body_bytes: int
    max_header_bytes: int
    max_connections: int
    read_timeout_s: float
    grace_s: float
    log_level: str
    log_format: str
    log_prompts: bool
    sources: Mapping[str, str] = field(repr=False)


def load_config(flags: Mapping[str, Any], environ: Mapping[str, str] = ENVIRON, path: str | None = None) -> ServeConfig:
    """The settings to serve with.

    flags: values by setting name, None where not given; texts are read as in the environment. path: of the
    configuration file, None for TANDEM_CONFIG or the default one, which may be missing. Raises SettingError.
    """
    values: dict[str, Any] = {name: spec.default for name, spec in SERVED.items()}
    sources = dict.fromkeys(SERVED, "default")
    from_env = from_environment(environ)
    file = config_path(environ, path)
    layers = [_from_file(file)] if file else []
    layers.append({name: (value, SERVED[name].variable) for name, value in from_env.items() if name in SERVED})
    layers.append(_from_flags(flags))
    for layer in layers:
        for name, (value, where) in layer.items():
            values[name], sources[name] = value, where
    values["api_key"] = _keys(values["api_key"], values["api_key_file"], sources)
    return ServeConfig(**values, sources=sources)


def config_path(environ: Mapping[str, str] = ENVIRON, path: str | None = None) -> Path | None:
    """The configuration file to read: the one named, else the default one if it is there. Raises SettingError if the
    one named is not there."""
    named = path or environ.get("TANDEM_CONFIG", "")
    if named:
        if not Path(named).is_file():
            raise SettingError(f"configuration file {named} is not there: name an existing one or leave --config out")
        return Path(named)
    default = home_folder("XDG_CONFIG_HOME", ".config", environ) / "tandem" / "tandem.toml"
    return default if default.is_file() else None


def _from_flags(flags: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    given = {}
    for name, value in flags.items():
        if name not in SERVED:
            raise SettingError(f"unknown setting {name!r}{nearest(name, SERVED)}")
        spec = SERVED[name]
        if value is None or value == ():
            continue
        read = parsed if isinstance(value, str) else checked
        given[name] = (read(spec, value, spec.flag), spec.flag)
    return given


def _from_file(path: Path) -> dict[str, tuple[Any, str]]:
    try:
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise SettingError(f"{path}: not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise SettingError(f"{path}: cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingError(f"{path}: {error}") from None
    given = {}
    for key, value in table.items():
        where = f"{path} line {_line_of(text, key)}"
        name = key.replace("-", "_")
        if name not in SERVED:
            raise SettingError(f"{where}: unknown setting {key!r}{nearest(name, SERVED)}")
        if name in given:
            raise SettingError(f"{where}: {name} is set twice, with - and with _")
        given[name] = (checked(SERVED[name], value, where), where)
    return given


def _line_of(text: str, key: str) -> int:
    """The line at which a top-level key of a valid TOML text begins.

    The shortest run of whole lines that parses and has the key ends with its value; from there back to the key's name.
    """
    lines = text.split("\n")
    for end in range(1, len(lines) + 1):
        try:
            found = key in tomllib.loads("\n".join(lines[:end]))
        except tomllib.TOMLDecodeError:
            continue
        if found:
            starts = (n for n in range(end, 0, -1) if re.match(rf"""\s*\[*\s*["']?{re.escape(key)}\b""", lines[n - 1]))
            return next(starts, end)
    return len(lines)


def _keys(keys: tuple[str, ...], key_file: str, sources: dict[str, str]) -> tuple[str, ...]:
    if key_file:
        keys = (*keys, *_keys_of_file(Path(key_file), sources["api_key_file"]))
    for key in keys:
        if len(key) < _MIN_KEY_CHARACTERS or not key.isascii() or any(c.isspace() for c in key):
            raise SettingError(
                f"an API key has {len(key)} characters or odd ones: at least {_MIN_KEY_CHARACTERS} "
                "ASCII characters without spaces are needed; `openssl rand -hex 24` makes a good one"
            )
    return keys


def _keys_of_file(path: Path, where: str) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError):
        raise SettingError(f"{where}: key file {path} cannot be read") from None
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        raise SettingError(f"{where}: others may read key file {path}: chmod 600 it")
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise SettingError(f"{where}: key file {path} holds no key: write one a line")
    return keys
