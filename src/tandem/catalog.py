"""The models that were pulled, by name: one small file each in the models folder.

A name is never used as a path by itself: only names of the catalogue's own alphabet are looked up.
"""

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from tandem.default_model import default_model
from tandem.errors import RequestError, nearest
from tandem.settings import home_folder, setting

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")  # no separator, so no name leaves its folder


@dataclass(frozen=True)
class CatalogEntry:
    """One model. files: its parts in order, relative to the models folder; sha256, size_bytes: of all parts."""

    name: str
    repo: str
    revision: str
    files: tuple[str, ...]
    sha256: tuple[str, ...]
    sizes_bytes: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return sum(self.sizes_bytes)

    @property
    def path(self) -> Path:
        """The first part; the reader finds the others beside it."""
        return models_dir() / self.files[0]

    def as_dict(self) -> dict:
        return asdict(self) | {"path": str(self.path)}


def models_dir() -> Path:
    """The folder of pulled models, which may not exist yet."""
    return Path(setting("models_dir") or home_folder("XDG_DATA_HOME", ".local/share") / "tandem" / "models")


def valid_name(name: str) -> bool:
    """Whether a text can be a model's name: lower-case letters, digits, dots, dashes, underscores; no dot twice."""
    return NAME.fullmatch(name) is not None and ".." not in name


def find(name: str) -> CatalogEntry | None:
    """The model of that name, in any case; None if there is none, also for texts that cannot be names."""
    name = name.lower()
    return _read(_entry_path(name)) if valid_name(name) else None


def model_path(model: str | None) -> Path:
    """The file that is meant: a path, the name of a pulled model, None for the packaged one. Raises RequestError."""
    if not model:
        return default_model()
    path = Path(model)
    if path.is_file():
        return path
    if entry := find(model):
        return entry.path
    folder = path.parent if path.parent.is_dir() else Path()
    others = [other.name for other in folder.glob("*.gguf")] + names()
    what = "a folder" if path.is_dir() else "not there"
    hint = nearest(path.name, others) if others else ""
    raise RequestError(f"{model} is {what}: MODEL is a .gguf file or the name of a pulled model{hint}")


def entries() -> list[CatalogEntry]:
    """All models whose first file is still there, by name."""
    found = (_read(path) for path in sorted((models_dir() / "catalog").glob("*.json")))
    return [entry for entry in found if entry and entry.path.is_file()]


def names() -> list[str]:
    """Names of all models."""
    return [entry.name for entry in entries()]


def add(entry: CatalogEntry) -> None:
    """Writes an entry, over one of the same name. Raises RequestError for a text that cannot be a name."""
    if not valid_name(entry.name):
        raise RequestError(f"{entry.name!r} cannot be a model's name: use lower-case letters, digits and . _ -")
    path = _entry_path(entry.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps(asdict(entry), indent=1) + "\n")
    draft.replace(path)


def _entry_path(name: str) -> Path:
    return models_dir() / "catalog" / f"{name}.json"


def _read(path: Path) -> CatalogEntry | None:
    try:
        fields = json.loads(path.read_text())
        entry = CatalogEntry(**{key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError):
        raise RequestError(f"{path} is not a catalogue entry: delete it and pull the model again") from None
    return entry
