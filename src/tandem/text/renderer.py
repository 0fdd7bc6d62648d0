"""The child process that renders chat templates, seen from the parent: template text and values in, text out.

Jinja2's sandbox keeps a template from reaching the program, not from using it up: `{{ [0] * 10**10 }}` is one legal
expression. A process of its own has limits that the kernel enforces, on processor time and memory.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tandem.errors import TemplateError

# Longest wait for a child that starts, or that renders but gets no processor; only a stopped machine takes so long.
_PATIENCE_S = 60.0


@dataclass(frozen=True)
class TemplateLimits:
    """What one rendering may use: seconds of processor time, bytes of memory of the child, characters of output."""

    time_s: float = 5.0
    memory_bytes: int = 1 << 29
    output_chars: int = 1 << 24


class LimitExceeded(TemplateError):
    """A template used more than it may. Other values would not help, so nothing is tried again."""


class TemplateRenderer:
    """Renders templates one at a time in a child process, which starts when needed and is replaced when it dies.

    One renderer can serve any number of templates and threads. `close`, or the end of this object, ends the child.
    """

    def __init__(self, limits: TemplateLimits = TemplateLimits()):
        self.limits = limits
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._finalizer: weakref.finalize | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the child, None while there is none."""
        return None if self._child is None else self._child.pid

    def start(self) -> None:
        """Start the child now, without waiting for it, so that the first rendering need not."""
        with self._lock:
            self._start()

    def close(self) -> None:
        """End the child. A later rendering starts a new one."""
        with self._lock:
            self._stop()

    def render(self, source: str, values: Mapping[str, object]) -> str:
        """The text that the template `source` makes of `values` (plain JSON values).

        Raises TemplateError for what the template does wrong, and LimitExceeded for what it uses up.
        """
        line = _json_line({"source": source, "values": values})
        with self._lock:
            self._start()
            if not self._ready:
                self._exchange(b"")
                self._ready = True
            reply = self._exchange(line)
        if "text" in reply:
            return str(reply["text"])
        wrong = LimitExceeded if reply.get("limit") else TemplateError
        raise wrong(f"chat template: {reply.get('error', 'no answer')}")

    def _start(self) -> None:
        if self._child is not None and self._child.poll() is None:
            return
        self._stop()
        limits = self.limits
        numbers = [str(limits.time_s), str(limits.memory_bytes), str(limits.output_chars)]
        script = Path(__file__).with_name("template_worker.py")
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script), *numbers, *_library_paths()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={key: os.environ[key] for key in ("TZ", "LD_LIBRARY_PATH") if key in os.environ},
            start_new_session=True,
            cwd="/",
        )
        self._ready = False
        self._finalizer = weakref.finalize(self, _end, self._child)
        for stream in (self._child.stdin, self._child.stdout):
            os.set_blocking(stream.fileno(), False)

    def _stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._child = self._finalizer = None

    def _exchange(self, line: bytes) -> dict[str, object]:
        """Write `line` and read one line of JSON. Raises LimitExceeded, and ends the child, if none comes."""
        limits, child = self.limits, self._child
        try:
            deadline = time.monotonic() + _PATIENCE_S + limits.time_s
            return json.loads(_talk(child, line, deadline, limits.output_chars * 12 + 65536))
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            self._stop()
            if isinstance(error, TimeoutError) or child.returncode == -signal.SIGPROF:
                raise LimitExceeded(f"chat template: ran too long (limit {limits.time_s:g} s)") from None
            raise LimitExceeded(f"chat template: the process that renders it ended ({error})") from None


def _talk(child: subprocess.Popen[bytes], line: bytes, deadline: float, limit_bytes: int) -> bytes:
    """Send `line` and receive up to a newline, both before `deadline`. Raises TimeoutError and OSError."""
    received = bytearray()
    pending = memoryview(line)
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        if pending:
            selector.register(child.stdin, selectors.EVENT_WRITE)
        while True:
            left_s = deadline - time.monotonic()
            events = selector.select(max(left_s, 0))
            if not events and left_s <= 0:
                raise TimeoutError
            for key, _ in events:
                if key.fileobj is child.stdin:
                    pending = pending[os.write(child.stdin.fileno(), pending) :]
                    if not pending:
                        selector.unregister(child.stdin)
                    continue
                chunk = os.read(child.stdout.fileno(), 1 << 20)
                if not chunk:
                    raise OSError(f"exit status {child.wait(timeout=5)}")
                received += chunk
                if chunk.endswith(b"\n"):
                    return bytes(received)
                if len(received) > limit_bytes:
                    raise OSError("it wrote more than its limit")


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for stream in (child.stdin, child.stdout):
        stream.close()


def _library_paths() -> list[str]:
    """Folders from which the child imports Jinja2 and what it needs."""
    found = [find_spec(name) for name in ("jinja2", "markupsafe")]
    return sorted({str(Path(spec.origin).parent.parent) for spec in found if spec is not None})


def _json_line(value: object) -> bytes:
    try:
        # Lone surrogates pass, as in JSON escapes; what cannot be encoded is told where text becomes tokens.
        return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise TemplateError(f"chat template: messages, tools and options must be plain JSON values: {error}") from None
