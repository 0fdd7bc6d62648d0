"""Every exception class Tandem raises for somebody else's mistake, one class per reaction.

Our own mistakes are assertions. `nearest` words the hint that goes with an unknown name.
"""

import difflib
from collections.abc import Iterable


class EngineError(Exception):
    """Base of all errors below: the message says what was found, what was expected and what to do."""


class FormatError(EngineError):
    """A model file is broken, hostile or of a kind we do not read: choose another file."""


class PlanError(EngineError):
    """What was asked for does not fit this machine: ask for less, the message says how much would fit."""


class RequestError(EngineError):
    """One generation request cannot be served (too long, bad value): change the request."""


class ShapeError(EngineError):
    """An array given to the Python API has another shape or dtype than its docstring states."""


class TemplateError(EngineError):
    """A chat template failed, ran too long or wrote too much."""


class SettingError(EngineError):
    """An option is unknown or its value is out of range."""


class NativeError(EngineError):
    """The compiled CPU library is missing, was built from other sources, or this CPU cannot run it."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """The words `; did you mean 'x'?` for the closest valid name, else `; valid: a, b, c`."""
    valid = sorted(valid)
    close = difflib.get_close_matches(name, valid, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; valid: {', '.join(valid)}"
