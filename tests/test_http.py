"""The HTTP server: slow, large, broken and too many requests are refused in JSON, and its end lets answers finish."""

import asyncio
import json
import signal
import socket
import threading
import time

import pytest

from tandem.errors import SettingError
from tandem.serve.http import HttpLimits, Server, listening_socket

LIMITS = HttpLimits(max_header_bytes=4096, head_s=0.4, body_s=0.4, max_connections=8, grace_s=2.0)


class Http:
    """A server with an app that echoes bodies; /slow streams a byte every 50 ms, twenty times."""

    def __init__(self, limits=LIMITS):
        self.left = threading.Event()
        self.socket = listening_socket("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        ready = threading.Event()
        self.server = Server(self.app, limits, ready.set)
        self.thread = threading.Thread(
            target=lambda: asyncio.run(self.server.serve(sockets=[self.socket])), daemon=True
        )
        self.thread.start()
        assert ready.wait(5)

    async def app(self, scope, receive, send):
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                await send({"type": message["type"] + ".complete"})
                if message["type"] == "lifespan.shutdown":
                    return
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.set()
                return
            body += message["body"]
            if not message["more_body"]:
                break
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        if scope["path"] == "/slow":
            for _ in range(20):
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
                await asyncio.sleep(0.05)
        await send({"type": "http.response.body", "body": body})

    def open(self) -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.port), timeout=5)
        return made

    def close(self):
        self.server.should_exit = True
        self.thread.join(8)
        assert not self.thread.is_alive()


@pytest.fixture
def http():
    made = Http()
    yield made
    made.close()


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def error_of(answer: bytes) -> tuple[int, dict]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head and b"connection: close" in head
    return int(head.split()[1]), json.loads(body)["error"]


GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def test_a_connection_serves_several_requests(http):
    with http.open() as one:
        for body in (b"a", b"bb"):
            one.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            answer = one.recv(4096)
            while not answer.endswith(b"0\r\n\r\n"):
                answer += one.recv(4096)
            assert answer.startswith(b"HTTP/1.1 200") and b"\r\n" + body + b"\r\n" in answer
            time.sleep(0.6)  # an idle connection is older than the time for a head


def test_a_head_that_comes_byte_by_byte_is_cut_off(http):
    began = time.monotonic()
    with http.open() as slow:
        slow.sendall(b"GET / HTTP/1.1\r\n")
        with pytest.raises(OSError):
            for byte in b"X-Slow: " + b"a" * 100:
                slow.sendall(bytes([byte]))
                time.sleep(0.05)
                slow.setblocking(False)
                try:
                    answer = slow.recv(4096)
                    assert error_of(answer)[0] == 408
                    raise OSError
                except BlockingIOError:
                    slow.setblocking(True)
    assert 0.3 < time.monotonic() - began < 2


def test_a_second_head_on_the_same_connection_has_the_same_time(http):
    with http.open() as slow:
        slow.sendall(GET)
        answer = b""
        while not answer.endswith(b"0\r\n\r\n"):
            answer += slow.recv(4096)
        slow.sendall(b"GET / HT")
        assert error_of(read_all(slow))[0] == 408


def test_a_body_that_does_not_come_is_cut_off_and_the_app_is_told(http):
    with http.open() as slow:
        slow.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nabc")
        status, error = error_of(read_all(slow))
    assert status == 408 and "0.4 s" in error["message"]
    assert http.left.wait(2)


def test_a_connection_that_says_nothing_is_closed_in_silence(http):
    with http.open() as silent:
        assert read_all(silent) == b""


def test_slow_answers_are_not_slow_requests(http):
    with http.open() as one:
        one.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert read_all(one).count(b"x\r\n") == 20


@pytest.mark.parametrize(
    "head",
    [b"GET / HTTP/1.1\r\nX: " + b"a" * 10_000, b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 2000, b"GET /" + b"a" * 10_000],
)
def test_a_flood_of_headers_is_431(http, head):
    with http.open() as one:
        one.sendall(head)
        status, error = error_of(read_all(one))
    assert status == 431 and error["code"] == "headers_too_large"


@pytest.mark.parametrize(
    "junk",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"GET / HTTQ/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    ],
)
def test_what_is_no_http_is_400_in_json(http, junk):
    with http.open() as one:
        one.sendall(junk)
        status, error = error_of(read_all(one))
    assert status == 400 and error["type"] == "invalid_request_error"
    with http.open() as other:
        other.sendall(GET)
        assert other.recv(100).startswith(b"HTTP/1.1 200")


def test_connections_beyond_the_allowed_are_refused_and_places_come_free(http):
    kept = [http.open() for _ in range(8)]
    for one in kept:
        one.sendall(GET)
        assert one.recv(100).startswith(b"HTTP/1.1 200")
    with http.open() as ninth:
        status, error = error_of(read_all(ninth))
    assert status == 503 and "overloaded" in error["message"]
    kept.pop().close()
    time.sleep(0.1)
    with http.open() as again:
        again.sendall(GET)
        assert again.recv(100).startswith(b"HTTP/1.1 200")
    for one in kept:
        one.close()


def test_many_slow_connections_do_not_stop_a_quick_one():
    http = Http(HttpLimits(head_s=1.0, max_connections=300))
    slow = [http.open() for _ in range(200)]
    for one in slow:
        one.sendall(b"GET / HTTP/1.1\r\nX-")
    began = time.monotonic()
    with http.open() as quick:
        quick.sendall(GET)
        assert quick.recv(100).startswith(b"HTTP/1.1 200")
    assert time.monotonic() - began < 0.5
    for one in slow:
        assert error_of(read_all(one))[0] == 408
        one.close()
    http.close()


def test_running_answers_finish_at_the_end_and_idle_connections_close():
    http = Http()
    with http.open() as idle, http.open() as busy:
        idle.sendall(GET)
        assert idle.recv(100).startswith(b"HTTP/1.1 200")
        busy.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        assert busy.recv(100).startswith(b"HTTP/1.1 200")
        http.server.should_exit = True
        idle.settimeout(1.5)
        read_all(idle)
        with pytest.raises(OSError):
            for _ in range(20):
                http.open().close()
                time.sleep(0.05)
        assert read_all(busy).count(b"x\r\n") >= 18
    http.close()


def test_an_address_in_use_is_named_with_what_to_do(http):
    with pytest.raises(SettingError, match=f"127.0.0.1:{http.port}: Address already in use; stop what listens"):
        listening_socket("127.0.0.1", http.port)
    with pytest.raises(SettingError, match="no address of this machine"):
        listening_socket("no-such-host.invalid", 0)


def test_signals_end_it_without_killing_the_process():
    before = signal.getsignal(signal.SIGTERM)
    server = Server(Http.app, LIMITS)
    with server.capture_signals():
        signal.raise_signal(signal.SIGHUP)
        assert not server.should_exit
        signal.raise_signal(signal.SIGTERM)
        assert server.should_exit and not server.force_exit
        signal.raise_signal(signal.SIGINT)
        assert server.force_exit
    assert signal.getsignal(signal.SIGTERM) == before
