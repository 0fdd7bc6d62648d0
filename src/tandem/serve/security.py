"""Who may ask: Host and Origin against allow-lists, keys in constant time, bodies under limits.

In: the scope of a request and the settings. Out: nothing, or an `ApiError`.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from tandem.errors import SettingError
from tandem.serve.errors_api import problem

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
# what needs no key: whether the server is there, nothing else of it
PUBLIC_PATHS = frozenset({"/health", "/v1/health", "/ready", "/v1/ready"})


def check_exposure(host: str, keys: Sequence[str]) -> None:
    """Raises SettingError if an address that others can reach would be served without a key."""
    if host not in LOOPBACK_HOSTS and not host.startswith("127.") and not keys:
        raise SettingError(
            f"host {host!r} can be reached from elsewhere, which needs a key: set api_key or api_key_file, "
            "or use 127.0.0.1"
        )


@dataclass(frozen=True)
class Guard:
    """Checks heads. host: that the server is bound to; allowed_hosts, allowed_origins: beside its own; public: paths
    that need no key."""

    keys: Sequence[str] = ()
    host: str = "127.0.0.1"
    allowed_hosts: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    public: frozenset[str] = PUBLIC_PATHS

    def __post_init__(self) -> None:
        object.__setattr__(self, "_digests", [hashlib.sha256(key.encode()).digest() for key in self.keys])

    def check(self, path: str, headers: dict[bytes, bytes]) -> None:
        """Raises ApiError for a foreign Host or Origin, or without a valid key."""
        host = headers.get(b"host", b"").decode("latin-1")
        self._check_host(host)
        origin = headers.get(b"origin")
        if origin is not None and not self.allows(origin.decode("latin-1"), host):
            raise problem("origin", found=origin.decode("latin-1"))
        if self.keys and path not in self.public:
            self._check_key(headers)

    def allows(self, origin: str, host: str) -> bool:
        """Whether a page of that origin may talk to this server."""
        if origin in self.allowed_origins:
            return True
        return bool(host) and urlsplit(origin).netloc.lower() == host.lower()

    def _check_host(self, host: str) -> None:
        """On loopback only known names are served: a page elsewhere may have its own name point here."""
        bound_here = self.host in LOOPBACK_HOSTS or self.host.startswith("127.")
        if not self.allowed_hosts and not bound_here:
            return
        name = _name_of(host)
        known = {*LOOPBACK_HOSTS, self.host.lower(), *(allowed.lower() for allowed in self.allowed_hosts)}
        if name not in known and host.lower() not in known:
            raise problem("host", found=host)

    def _check_key(self, headers: dict[bytes, bytes]) -> None:
        given = headers.get(b"x-api-key", b"")
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer":
            given = token.strip() or given
        if not given:
            raise problem("no_key")
        digest = hashlib.sha256(given).digest()
        right = False
        for known in self._digests:  # all of them, always
            right |= hmac.compare_digest(digest, known)
        if not right:
            raise problem("wrong_key")


async def read_body(headers: dict[bytes, bytes], receive: Callable, most_bytes: int, most_s: float) -> bytes | None:
    """The whole JSON body, None if the client left. Raises ApiError for other content types, for more than most_bytes
    and if it takes longer than most_s."""
    _check_content(headers)
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length) > most_bytes:
        raise problem("body_size", most=most_bytes)
    try:
        async with asyncio.timeout(most_s or None):
            return await _collected(receive, most_bytes)
    except TimeoutError:
        raise problem("body_time", seconds=round(most_s)) from None


async def _collected(receive: Callable, most_bytes: int) -> bytes | None:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > most_bytes:
            raise problem("body_size", most=most_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _check_content(headers: dict[bytes, bytes]) -> None:
    """A page of another site can send forms and plain text without asking, but no JSON."""
    kind = headers.get(b"content-type", b"").decode("latin-1")
    media = kind.partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        raise problem("media", found=kind)
    encoding = headers.get(b"content-encoding", b"identity").decode("latin-1")
    if encoding.lower() != "identity":
        raise problem("encoding", found=encoding)


def _name_of(host: str) -> str:
    """The name in a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.rpartition(":")[0].lower() if ":" in host else host.lower()
