"""A real HTTP server over a scripted engine, with the packaged model's vocabulary and template; and a plain client."""

import asyncio
import json
import socket
import threading
import time
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

from fake_batch import FakeBatch, Script

from tandem.default_model import default_model
from tandem.serve.app import AppSettings, create_app
from tandem.serve.http import HttpLimits, Server
from tandem.serve.model import Offer, ServedModel
from tandem.serve.scheduler import Limits
from tandem.serve.worker import Worker

NAME = "pocket"


class ApiServer:
    """Runs the app in a thread. `script` may be changed between requests: a text, a Script, or a function of one."""

    def __init__(
        self, settings: AppSettings | None = None, offer: Offer | None = None, make_batch=None, limits=None, **batch
    ):
        self.script: Any = "Hello there."
        self.batch: FakeBatch | None = None
        self._batch_options = {"ctx": 4096, **batch}
        limits = limits or Limits(max_sequences=8)
        self.worker = Worker(make_batch or self._make_batch, limits)
        offer = offer or Offer(NAME, ("alias",), 4096, 8)
        self.model = ServedModel.from_file(default_model(), offer, self.worker)
        self.app = create_app([self.model], settings or AppSettings(patience_s=0.2))
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = self._socket.getsockname()[1]
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._ready.wait(60)

    def _make_batch(self) -> FakeBatch:
        self.batch = FakeBatch(lambda request: self._scripted(request), max_sequences=8, **self._batch_options)
        return self.batch

    def _scripted(self, request) -> Script | str:
        return self.script(request) if callable(self.script) else self.script

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self.worker.start()
        self.server = Server(self.app, HttpLimits(grace_s=2.0), self._ready.set, lambda: self.worker.stop(1.0))
        await self.server.serve(sockets=[self._socket])
        await self.worker.stop(0)

    def close(self) -> None:
        self.server.should_exit = True
        self._thread.join(20)
        self._socket.close()
        self.model.close()
        assert not self._thread.is_alive()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(self, path: str, body: Any = None, method: str | None = None, **headers: str) -> "Reply":
        """One request; a body that is no bytes is sent as JSON."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        fields = {"Content-Type": "application/json"} if data is not None else {}
        fields |= {key.replace("_", "-"): value for key, value in headers.items()}
        try:
            connection.request(method or ("GET" if data is None else "POST"), path, data, fields)
            answer = connection.getresponse()
            return Reply(answer.status, dict((k.lower(), v) for k, v in answer.getheaders()), answer.read())
        finally:
            connection.close()

    def chat(self, content: Any = "Hi", **fields: Any) -> "Reply":
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        return self.request("/v1/chat/completions", {"messages": messages, **fields})

    def wait(self, condition, seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.005)


@dataclass
class Reply:
    """A whole response."""

    status: int
    headers: dict[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]

    @property
    def events(self) -> list[tuple[str, Any]]:
        """(name, data) of each event; comments are left out, [DONE] is a string."""
        found = []
        for block in self.data.decode().split("\n\n"):
            name, data = "", None
            for line in block.split("\n"):
                if line.startswith("event: "):
                    name = line[7:]
                elif line.startswith("data: "):
                    data = line[6:]
            if data is not None:
                found.append((name, data if data == "[DONE]" else json.loads(data)))
        return found

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [data for _, data in self.events if isinstance(data, dict)]


def tool(name: str = "get_weather", **properties: Any) -> dict[str, Any]:
    """A function in the shape of chat completions."""
    properties = properties or {"city": {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": "A test", "parameters": parameters}}


def call_text(name: str = "get_weather", **arguments: str) -> str:
    """A call as the packaged model writes it."""
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"
