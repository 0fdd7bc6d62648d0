"""A stand-in for the model hub on loopback: it describes one repository and sends its files, with ranges and faults."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer:
    """files: content by path. Faults: `cut_at`: connections break after that many bytes of one response, as often as
    `cuts` says; `corrupt`: one byte of what is sent differs; `ignore_range`; `status`: of the repository's description
    (401 with `gated`); `states`: what the description says instead of the truth, by path."""

    def __init__(self, files: dict[str, bytes], repo: str = "org/tiny-GGUF"):
        self.files, self.repo = files, repo
        self.cut_at, self.cuts, self.corrupt, self.ignore_range = 0, 0, False, False
        self.status, self.gated, self.states = 200, False, {}
        self.requests: list[tuple[str, str | None]] = []  # path and Range of every GET
        self.tokens: set[str | None] = set()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                server.answer(self)

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def answer(self, http: BaseHTTPRequestHandler) -> None:
        path = http.path.partition("?")[0]
        self.requests.append((path, http.headers.get("Range")))
        self.tokens.add(http.headers.get("Authorization"))
        if path.startswith("/api/models/"):
            self._describe(http, path.removeprefix("/api/models/"))
        elif path.startswith(f"/{self.repo}/resolve/{COMMIT}/"):
            self._send(
                http, 302, b"", {"Location": f"{self.url}/storage/{path.split('/resolve/')[1].split('/', 1)[1]}"}
            )
        elif path.startswith("/storage/"):
            self._storage(http, path.removeprefix("/storage/"))
        else:
            self._send(http, 404, b"", {"X-Error-Code": "EntryNotFound"})

    def _describe(self, http, asked: str) -> None:
        name, _, revision = asked.partition("/revision/")
        if self.status != 200:
            code = "GatedRepo" if self.gated else ""
            return self._send(http, self.status, b"{}", {"X-Error-Code": code} if code else {})
        if name != self.repo:
            return self._send(http, 404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if revision not in ("", "main", COMMIT):
            return self._send(http, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        siblings = []
        for path, content in self.files.items():
            digest = hashlib.sha256(content).hexdigest()
            lfs = {"sha256": digest, "size": len(content), "pointerSize": 134}
            siblings.append(
                {"rfilename": path, "size": len(content), "blobId": "0" * 40, "lfs": lfs} | self.states.get(path, {})
            )
        self._send(http, 200, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode())

    def _storage(self, http, path: str) -> None:
        content = self.files[path]
        if self.corrupt:
            content = content[:-1] + bytes([content[-1] ^ 1])
        start = 0
        wanted = http.headers.get("Range")
        if wanted and not self.ignore_range:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(content):
                return self._send(http, 416, b"")
        headers = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if start else {}
        body = content[start:]
        if self.cuts and len(body) > self.cut_at:
            self.cuts -= 1
            http.send_response(206 if start else 200)
            http.send_header("Content-Length", str(len(body)))
            for name, value in headers.items():
                http.send_header(name, value)
            http.end_headers()
            http.wfile.write(body[: self.cut_at])
            http.wfile.flush()
            http.close_connection = True
            return None
        return self._send(http, 206 if start else 200, body, headers)

    def _send(self, http, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        http.send_response(status)
        for name, value in (headers or {}).items():
            http.send_header(name, value)
        http.send_header("Content-Length", str(len(body)))
        http.end_headers()
        http.wfile.write(body)
