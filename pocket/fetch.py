"""Fetches the source distributions named in sources.txt with pip, running none of their code.

In: sources.txt, and sources.lock if it exists (name==version, pinned). Out: archives in a folder, sources.lock.
One command: `python pocket/fetch.py`. pip builds the metadata of every source distribution that it downloads; here it
finds build backends that hand back the PKG-INFO lying in the archive, so nothing is compiled or executed.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
BACKENDS = """setuptools.build_meta hatchling.build flit_core.buildapi flit.buildapi poetry.core.masonry.api
poetry_dynamic_versioning.backend poetry.masonry.api pdm.backend pdm.pep517.api mesonpy scikit_build_core.build
scikit_build_core.setuptools.build_meta maturin pbr.build jupyter_packaging.build_api uv_build enscons.api
sipbuild.api hatchling.ouroboros setuptools.build_meta_legacy""".split()
STUB = '''
import os, pathlib, re
def _requires(config_settings=None): return []
get_requires_for_build_wheel = get_requires_for_build_sdist = _requires
def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    text = pathlib.Path("PKG-INFO").read_text(encoding="utf-8", errors="replace")
    name = re.search(r"^Name: *(.+?)\\s*$", text, re.M)[1]
    version = re.search(r"^Version: *(.+?)\\s*$", text, re.M)[1]
    folder = re.sub(r"[-_.]+", "_", name) + "-" + version + ".dist-info"
    out = pathlib.Path(metadata_directory, folder)
    out.mkdir()
    (out / "METADATA").write_text(text, encoding="utf-8")
    return folder
def build_wheel(*args, **kwargs): raise RuntimeError("nothing is built here")
__legacy__ = None
'''


def read_sources(path: Path = HERE / "sources.txt") -> tuple[list[str], list[str]]:
    """Names to train on and names held out, in file order."""
    train, held = [], []
    for line in path.read_text().splitlines():
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if words[0] == "=heldout":
            held += words[1:]
        else:
            train += words
    return train, held


def normal_name(name: str) -> str:
    """The registry's spelling of a project name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(path: Path) -> dict[str, str]:
    """name -> version of the pinned sources."""
    if not path.exists():
        return {}
    return dict(line.split("==") for line in path.read_text().split() if "==" in line)


def _write_backends(folder: Path) -> None:
    for module in BACKENDS:
        parts = module.split(".")
        for depth in range(1, len(parts)):
            package = folder.joinpath(*parts[:depth])
            package.mkdir(parents=True, exist_ok=True)
            (package / "__init__.py").touch()
        folder.joinpath(*parts[:-1], parts[-1] + ".py").write_text(STUB)
    meta = folder / "setuptools" / "build_meta.py"
    meta.write_text(STUB + "\nimport sys\n__legacy__ = sys.modules[__name__]\n")


def fetch(name: str, version: str | None, out: Path, backends: Path) -> str | None:
    """Downloads one source distribution; returns its version, or None with a line on stderr if pip could not."""
    before = set(os.listdir(out))
    requirement = f"{name}=={version}" if version else name
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "--use-pep517"]
    command += ["--no-build-isolation", "--no-cache-dir", "--ignore-requires-python", "--dest", str(out), requirement]
    env = os.environ | {"PYTHONPATH": str(backends), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    new = sorted(set(os.listdir(out)) - before)
    if done.returncode or len(new) != 1:
        reason = done.stderr.strip().splitlines()[-1:] or ["already there"]
        print(f"{requirement}: not fetched: {reason[0][:200]}", file=sys.stderr, flush=True)
        return None
    return re.sub(r"\.(tar\.gz|zip|tar\.bz2|tgz|tar\.xz)$", "", new[0]).rsplit("-", 1)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "data" / "sdists")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    train, held = read_sources()
    lock_path = HERE / "sources.lock"
    lock = read_lock(lock_path)
    have = {normal_name(n.rsplit("-", 1)[0]) for n in os.listdir(args.out)}
    with tempfile.TemporaryDirectory() as folder:
        _write_backends(Path(folder))
        for name in held + train:
            if normal_name(name) in have:
                continue
            version = fetch(name, lock.get(name), args.out, Path(folder))
            if version:
                lock[name] = version
                lock_path.write_text("".join(f"{n}=={v}\n" for n, v in sorted(lock.items())))


if __name__ == "__main__":
    main()
