"""Imports go down one order of folders, importing does nothing, and files stay small."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "tandem"
ORDER = ["errors", "settings", "machine", "native", "gguf", "quant", "ops", "models", "runtime", "text", "requests", "generation", "engine", "batch"]
ALONE = {"text": {"errors", "gguf"}}
TOP = {"bench", "serve", "doctor", "pull", "catalog", "cli", "default_model", "chat", "show", "__init__", "__main__"}  # may use anything below, nothing below may use them
MAX_LINES = 700
CODEBOOKS = {"iquant_grids.py"}


def imported_layers(path: Path) -> set[str]:
    """First components after `tandem.` of everything that the file imports, at any depth of it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno} names other modules relatively"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("tandem.")}
    return found


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down_only(path):
    layer = layer_of(path)
    if layer in TOP:
        return
    assert layer in ORDER, f"{layer} has no place in the import order"
    allowed = ALONE.get(layer) or set(ORDER[: ORDER.index(layer)])
    assert imported_layers(path) - {layer} <= allowed


def test_the_rule_sees_an_upward_import(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from tandem.engine import Engine\n")
    assert imported_layers(bad) == {"engine"}


@pytest.mark.parametrize("module", ["tandem", "tandem.cli", "tandem.text.tokenizer", "tandem.engine"])
def test_importing_loads_neither_torch_nor_the_native_library(module):
    code = (
        f"import sys, {module}\n"
        "assert 'torch' not in sys.modules\n"
        "native = sys.modules.get('tandem.native')\n"
        "assert native is None or native.load.cache_info().currsize == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_the_package_alone_loads_no_numpy():
    subprocess.run([sys.executable, "-c", "import sys, tandem; assert 'numpy' not in sys.modules"], check=True)


@pytest.mark.parametrize("path", sorted(p for e in ("*.py", "*.cpp", "*.h") for p in ROOT.rglob(e)), ids=lambda p: p.name)
def test_files_stay_readable(path):
    if path.name not in CODEBOOKS:
        assert len(path.read_text().splitlines()) <= MAX_LINES


def test_settings_are_read_in_one_place():
    readers = {p.name for p in ROOT.rglob("*.py") if "os.environ" in p.read_text() or "getenv" in p.read_text()}
    assert readers <= {"settings.py", "template.py", "renderer.py"}  # the template's child process is given an environment of two names
