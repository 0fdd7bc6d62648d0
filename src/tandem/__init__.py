"""Tandem: local inference for mixture-of-experts models larger than the graphics card.

`tandem.load(path)` gives an `Engine`; `Sampling` holds the settings of a generation; every error is an `EngineError`.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["Engine", "EngineError", "Sampling", "load"]

if TYPE_CHECKING:
    from tandem.engine import Engine
    from tandem.errors import EngineError
    from tandem.runtime.sampling import Sampling


def load(path=None, **options) -> "Engine":
    """Opens a GGUF model, or the packaged demonstration model; options: those of `Engine.load` (device, ctx, ...)."""
    from tandem.default_model import default_model
    from tandem.engine import Engine

    return Engine.load(default_model() if path is None else path, **options)


def __getattr__(name: str):
    """Imports the public classes on first use, so that `import tandem` itself loads nothing."""
    homes = {"Engine": "tandem.engine", "EngineError": "tandem.errors", "Sampling": "tandem.runtime.sampling"}
    if name not in homes:
        raise AttributeError(f"module 'tandem' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(homes[name]), name)
