"""The web page at `/`, and what shows the server's state: `/status` for the page, `/metrics` for Prometheus.

In: files of this package and the worker's snapshot. Out: routes to add to the app. Nothing here wakes a model.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem.serve.metrics import CONTENT_TYPE, Metrics, status
from tandem.serve.snapshot import WorkerSnapshot

FOLDER = Path(__file__).parent / "page"
# whom the browser lets this page talk to: its own server, nobody else; no script or style within the page's text
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/markdown.js": ("markdown.js", "text/javascript; charset=utf-8"),
    "/page/stream.js": ("stream.js", "text/javascript; charset=utf-8"),
    "/page/state.js": ("state.js", "text/javascript; charset=utf-8"),
    "/page/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
PUBLIC_PATHS = frozenset(FILES)  # they hold nothing of anybody and need no key


def page_routes() -> list[Route]:
    """The page and its files; the set of paths is fixed, none is made from a request."""
    return [_file_route(path, *file) for path, file in FILES.items()]


def state_routes(take_snapshot: Callable[[], WorkerSnapshot], metrics: Metrics, model: str) -> list[Route]:
    """`/status` and `/metrics`. take_snapshot: of the worker."""

    async def show_status(_request: Request) -> Response:
        body = msgspec.json.encode(status(take_snapshot(), model))
        return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})

    async def show_metrics(_request: Request) -> Response:
        return Response(metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    return [Route("/status", show_status), Route("/metrics", show_metrics)]


def _file_route(path: str, name: str, kind: str) -> Route:
    body = (FOLDER / name).read_bytes()

    async def send(_request: Request) -> Response:
        return Response(body, headers=HEADERS | {"Content-Type": kind})

    return Route(path, send)
