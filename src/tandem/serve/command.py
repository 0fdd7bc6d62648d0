"""What `tandem serve` runs: the model's worker, the app, the HTTP server, until a signal ends them.

In: a ServeConfig. Out: an exit code. The server answers while the model is still being loaded.
"""

import asyncio
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import structlog

import tandem
from tandem.batch import Batch
from tandem.catalog import model_path, valid_name
from tandem.default_model import NOTICE
from tandem.engine import Engine
from tandem.errors import FormatError, NativeError, PlanError, SettingError
from tandem.runtime.decode import NO_DRAFTS, SOURCES, DraftSettings
from tandem.serve.app import ENDPOINTS, AppSettings, create_app
from tandem.serve.config import ServeConfig
from tandem.serve.http import HttpLimits, Server, listening_socket
from tandem.serve.lifecycle import SleepPolicy
from tandem.serve.logs import configure_logs
from tandem.serve.metrics import Metrics
from tandem.serve.model import Offer, ServedModel
from tandem.serve.observe import ObservedApp, ObservedWorker
from tandem.serve.page import PUBLIC_PATHS as PAGE_PATHS
from tandem.serve.page import page_routes, state_routes
from tandem.serve.scheduler import Limits
from tandem.serve.security import check_exposure
from tandem.serve.worker import Worker

_log = structlog.get_logger("tandem.serve")
_BODY_MARGIN_S = 5.0  # the app refuses a slow body in the shape of its API; the connection is cut only after that
_HOPELESS = (FormatError, PlanError, NativeError, SettingError)  # loading again would fail in the same way


def serve(config: ServeConfig) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code. Raises SettingError, RequestError, FormatError at once for
    what can be known before: a model that is not there, an address in use, a missing key."""
    check_exposure(config.host, config.api_key)
    path = model_path(config.model)
    if not config.model:
        print(NOTICE, file=sys.stderr)
    configure_logs(config.log_level, config.log_format, keys=config.api_key, texts=config.log_prompts)
    worker = Worker(batch_maker(config, path), worker_limits(config))
    model = ServedModel.from_file(path, _offer(config, path), worker)
    listener = listening_socket(config.host, config.port)
    try:
        return asyncio.run(_serve(config, worker, model, listener))
    finally:
        listener.close()
        model.close()


async def _serve(config: ServeConfig, worker: Worker, model: ServedModel, listener: socket.socket) -> int:
    metrics = Metrics(worker.snapshot, model.name, tandem.__version__)
    model.worker = ObservedWorker(worker, metrics, model.name, config.log_prompts)
    routes = [*page_routes(), *state_routes(worker.snapshot, metrics, model.name)]
    inner = create_app([model], app_settings(config), routes)
    app = ObservedApp(inner, metrics, ENDPOINTS | {"/", "/status", "/metrics"})
    address = _address(listener)

    def listening() -> None:
        print(f"{model.name} at {address} (page there, API under {address}/v1); Ctrl-C or SIGTERM stops it", flush=True)
        _log.info("listening", address=address, model=model.name)

    async def stop() -> None:
        inner.stopping = True
        await worker.stop(config.grace_s)

    server = Server(app, http_limits(config), listening, stop)
    await worker.start()
    loading = asyncio.ensure_future(_watch_load(worker, server))
    try:
        await server.serve(sockets=[listener])
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not kill what is just being freed
        await worker.stop(0)
    return 2 if loading.done() and not loading.cancelled() and loading.result() else 0


async def _watch_load(worker: Worker, server: Server) -> bool:
    """Ends the server if the first load shows that it can never succeed; returns whether it did."""
    try:
        await worker.wait_loaded()
    except _HOPELESS as error:
        print(f"tandem: {error}", file=sys.stderr, flush=True)
        server.should_exit = True
        return True
    except Exception as error:
        _log.error("the model could not be loaded; the next request tries again", error=error)
        return False
    _log.info("ready", memory=dict(worker.snapshot().memory))
    return False


def batch_maker(config: ServeConfig, path: Path) -> Callable[[], Batch]:
    """What opens the model for the worker, on the worker's thread."""
    drafts = draft_settings(config)
    small_path = model_path(config.draft_model) if config.draft_model else None

    def load() -> Engine:
        options = {"ctx": config.ctx or None, "threads": config.threads or None, "kv": config.kv}
        small = Engine.load(small_path, **options, drafts=NO_DRAFTS) if small_path else None
        engine = Engine.load(path, **options, drafts=drafts, draft_model=small, on_plan=_log_plan)
        if small:
            close = engine.close

            def close_both() -> None:
                close()
                small.close()

            engine.close = close_both  # deep sleep frees the weights of both
        return engine

    return lambda: Batch(
        load,
        max_sequences=config.max_sequences,
        cache_bytes=config.cache_bytes or None,
        cache_dir=config.cache_dir or None,
    )


def _log_plan(plan) -> None:
    _log.info(
        "plan", ctx=plan.ctx, kv=plan.kv, threads=plan.threads, total_bytes=plan.total_bytes, free_bytes=plan.free_bytes
    )


def draft_settings(config: ServeConfig) -> DraftSettings:
    """Speculation as the settings state it. Raises SettingError."""
    if config.draft == "off":
        return NO_DRAFTS
    sources = SOURCES if config.draft == "auto" else tuple(part.strip() for part in config.draft.split(","))
    if "model" in sources and config.draft != "auto" and not config.draft_model:
        raise SettingError("draft: 'model' needs draft_model, a smaller .gguf with the same vocabulary")
    return DraftSettings(sources, config.draft_max, adaptive=not config.draft_fixed)


def worker_limits(config: ServeConfig) -> Limits:
    """The bounds of the scheduler."""
    return Limits(
        max_sequences=config.max_sequences,
        max_queue=config.max_queue,
        load_deadline_s=config.load_deadline_s,
        sleep=SleepPolicy.at_level(config.sleep_level, config.sleep_after),
    )


def app_settings(config: ServeConfig) -> AppSettings:
    """What the app has to know."""
    return AppSettings(
        api_keys=config.api_key,
        host=config.host,
        allowed_hosts=config.allowed_hosts,
        allowed_origins=config.allowed_origins,
        max_body_bytes=config.max_body_bytes,
        body_s=config.read_timeout_s,
        ping_s=config.ping_s,
        deadline_s=config.deadline_s or None,
        public_paths=tuple(PAGE_PATHS),
    )


def http_limits(config: ServeConfig) -> HttpLimits:
    """The bounds of the HTTP server."""
    return HttpLimits(
        max_header_bytes=config.max_header_bytes,
        head_s=config.read_timeout_s,
        body_s=config.read_timeout_s + _BODY_MARGIN_S,
        max_connections=config.max_connections,
        grace_s=config.grace_s,
    )


def _offer(config: ServeConfig, path: Path) -> Offer:
    return Offer(name_of(config.model, path), config.alias, config.ctx or None, config.max_sequences)


def name_of(model: str, path: Path) -> str:
    """The id under which clients see the model: its name in the catalogue, or its file's without ending and part."""
    if valid_name(model.lower()) and not model.lower().endswith(".gguf") and not Path(model).exists():
        return model.lower()
    stem = path.name.removesuffix(".gguf")
    head, of, total = stem.rpartition("-of-")
    return head[:-6] if of and total.isdigit() and head[-5:].isdigit() else stem


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
