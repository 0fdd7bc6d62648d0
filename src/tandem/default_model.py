"""The model that comes inside the package, used where none is named."""

from pathlib import Path

from tandem.errors import RequestError

NOTICE = "no model named: using Tandem Pocket, a small demonstration; give a .gguf file for a real one"
PATH = Path(__file__).parent / "pocket" / "pocket.gguf"


def default_model() -> Path:
    """Path of the packaged model. Raises RequestError if this installation has none."""
    if not PATH.is_file():
        raise RequestError(f"{PATH} is not there and no model was named: give the path of a .gguf file")
    return PATH
