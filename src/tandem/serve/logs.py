"""The log: one JSON object or one coloured line per event, on stderr, for our loggers and those of libraries alike.

In: structlog events and standard log records. Out: lines without keys, prompts, tool arguments or images: everything
passes through `redact`, and the messages of exceptions that may quote a client are withheld.
"""

import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TextIO

import structlog

from tandem.errors import FormatError, NativeError, PlanError, SettingError

# what clients and models write; shown only on request
TEXT_FIELDS = frozenset(
    "answer arguments body completion content image images input instructions messages output prompt reasoning "
    "system text tools url".split()
)
# never shown
SECRET_FIELDS = frozenset(
    "api_key api_keys authorization cookie key keys password proxy_authorization token x_api_key".split()
)
# their messages quote no client
SHOWN_ERRORS = (FormatError, NativeError, PlanError, SettingError, OSError, MemoryError)
_SECRETS = (
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{6,}"), r"\1 [secret]"),
    (
        re.compile(
            r"(?i)\b(x-api-key|api[-_]?key|authorization|password)(['\"]?\s*[:=]\s*['\"]?)(?!bearer|basic)[^\s'\",}]{4,}"
        ),
        r"\1\2[secret]",
    ),
    (re.compile(r"\b(sk|pk|hf|ghp|gho|xox[bap])[-_][\w-]{12,}"), "[secret]"),
)
_DATA_URL = re.compile(r"data:[\w/+.-]*;base64,[A-Za-z0-9+/=_-]{16,}")
_MAX_CHARACTERS = 2000


def redact(event: Mapping[str, Any], *, keys: Iterable[str] = (), texts: bool = False) -> dict[str, Any]:
    """The event as it may be logged.

    keys: the server's own API keys, found anywhere in any text. texts: whether what clients and models write may be
    shown. Nested values are treated like the event; texts are cut at 2000 characters.
    """
    return {name: _redacted(name, value, tuple(keys), texts) for name, value in event.items()}


def _redacted(name: str, value: Any, keys: tuple[str, ...], texts: bool) -> Any:
    field = str(name).lower().replace("-", "_")
    if field in SECRET_FIELDS and value is not None:
        return "[secret]"
    if field in TEXT_FIELDS and not texts and not isinstance(value, bool | int | float | None):
        return f"[{len(value)} characters withheld]" if isinstance(value, str | bytes) else "[withheld]"
    if isinstance(value, Mapping):
        return {str(k): _redacted(k, v, keys, texts) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_redacted("", part, keys, texts) for part in value]
    if isinstance(value, BaseException):
        return _clean(exception_text(value, texts), keys)
    if isinstance(value, bytes):
        return f"[{len(value)} bytes]"
    return _clean(value, keys) if isinstance(value, str) else value


def _clean(text: str, keys: tuple[str, ...]) -> str:
    for key in keys:
        text = text.replace(key, "[secret]")
    text = _DATA_URL.sub("[image]", text)
    for pattern, shown in _SECRETS:
        text = pattern.sub(shown, text)
    text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)  # no commands to the terminal
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}... [{len(text)} characters]"


def exception_text(error: BaseException, texts: bool) -> str:
    """Class and message of an exception; without the message where it may quote a client."""
    if texts or isinstance(error, SHOWN_ERRORS):
        return f"{type(error).__name__}: {error}"
    return f"{type(error).__name__} (message withheld; --log-prompts shows it)"


def exception_lines(error: BaseException, texts: bool) -> str:
    """Where an exception came from, innermost last, and its text by `exception_text`; its causes before it."""
    earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    before = exception_lines(earlier, texts) + "\n" if earlier is not None else ""
    places = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    return before + "\n".join([*(f"  {place}" for place in places), exception_text(error, texts)])


def configure_logs(
    level: str, layout: str, *, keys: Iterable[str] = (), texts: bool = False, stream: TextIO | None = None
) -> None:
    """Sets up structlog and the standard loggers of this process.

    level: debug, info, warning or error. layout: json, console, or auto for console where the stream is a terminal.
    """
    stream = stream or sys.stderr
    console = layout == "console" or (layout == "auto" and stream.isatty())
    safe = _safe_processor(tuple(keys), texts)
    stamps = [structlog.stdlib.add_log_level, structlog.processors.TimeStamper(fmt="iso", utc=True, key="time")]
    if console:
        renderer: Any = structlog.dev.ConsoleRenderer(
            colors=stream.isatty(),
            timestamp_key="time",
            pad_event_to=0,
            exception_formatter=structlog.dev.plain_traceback,
        )
    else:
        renderer = structlog.processors.JSONRenderer(sort_keys=False, default=str)
    handler = logging.StreamHandler(stream)
    handler.addFilter(_SafeArguments(texts))
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*stamps, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, safe, renderer],
        )
    )
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(max(logging.WARNING, _LEVELS[level]))
    logging.getLogger("tandem").setLevel(_LEVELS[level])
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], name != "uvicorn.access"
        logger.setLevel(logging.WARNING)
    structlog.configure(
        processors=[*stamps, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        cache_logger_on_first_use=False,
    )


_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def _safe_processor(keys: tuple[str, ...], texts: bool) -> Callable:
    def safe(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
        raised = event.pop("exc_info", None)
        if raised is True:
            raised = sys.exc_info()
        error = raised[1] if isinstance(raised, tuple) else raised
        event = redact(event, keys=keys, texts=texts)
        if isinstance(error, BaseException):
            event["exception"] = _clean(exception_lines(error, texts), keys)
        return event

    return safe


class _SafeArguments(logging.Filter):
    """Exceptions given as arguments of a standard log record are written by `exception_text`."""

    def __init__(self, texts: bool):
        super().__init__()
        self._texts = texts

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(
                exception_text(part, self._texts) if isinstance(part, BaseException) else part for part in record.args
            )
        return True
