"""A queue that shares the engine between clients by tokens, and the clock that sizes prefill chunks by their time."""

from collections import deque
from collections.abc import Hashable, Iterator
from typing import Generic, Protocol, TypeVar


class Queued(Protocol):
    """What can be queued; cost: tokens it is expected to take, arrived: order among equals."""

    client: Hashable
    cost: float
    arrived: float


T = TypeVar("T", bound=Queued)


class _Client(Generic[T]):
    __slots__ = ("waiting", "served")

    def __init__(self) -> None:
        self.waiting: deque[T] = deque()
        self.served = 0.0  # tokens, on the scale of the queue's clock


class FairQueue(Generic[T]):
    """First in, first out for each client; between clients, the one that has been served fewest tokens is next.

    A client that comes back starts at the least served of those who are waiting, so idle time is no credit. While two
    clients wait, the tokens served to them differ by at most one cost of each (start-time fair queueing).
    The last sixteenth of the places is for clients that have none, so that a single one cannot fill the queue.
    """

    def __init__(self, places: int):
        self.places = places
        self._clients: dict[Hashable, _Client[T]] = {}
        self._size = 0
        self._clock = 0.0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[T]:
        for client in self._clients.values():
            yield from client.waiting

    def has_place(self, name: Hashable) -> bool:
        """Whether one more of this client's may be pushed."""
        client = self._clients.get(name)
        reserved = max(1, self.places // 16) if client and client.waiting else 0
        return self.places - self._size > reserved

    def push(self, item: T, first: bool = False) -> None:
        """Queues the item; first: before its client's others, for one that had been taken already."""
        client = self._clients.get(item.client)
        if client is None:
            self._forget()
            client = self._clients[item.client] = _Client()
        if not client.waiting:
            client.served = max(client.served, self._clock)
        client.waiting.appendleft(item) if first else client.waiting.append(item)
        self._size += 1

    def peek(self) -> T | None:
        """The item that is next."""
        client = self._next()
        return client.waiting[0] if client else None

    def pop(self) -> T:
        """Takes the next item; its cost counts as served until `correct` tells better."""
        client = self._next()
        item = client.waiting.popleft()
        self._size -= 1
        self._clock = max(self._clock, client.served)
        client.served += item.cost
        return item

    def correct(self, name: Hashable, tokens: float) -> None:
        """What a taken item took beyond its cost (negative: less)."""
        client = self._clients.get(name)
        if client:
            client.served += tokens

    def remove(self, item: T) -> None:
        """Takes the item out of its place; it must be queued."""
        self._clients[item.client].waiting.remove(item)
        self._size -= 1

    def served(self, name: Hashable) -> float:
        """Tokens served to the client, on the queue's scale."""
        client = self._clients.get(name)
        return client.served if client else self._clock

    def position(self, item: T) -> int:
        """How many are likely to be taken before it: its client's before it, and as many of each other client."""
        own = self._clients[item.client].waiting.index(item)
        others = (c for name, c in self._clients.items() if name != item.client)
        return own + sum(min(len(c.waiting), own + (c.served <= self._clients[item.client].served)) for c in others)

    def _next(self) -> "_Client[T] | None":
        best = None
        for client in self._clients.values():
            if client.waiting and (
                best is None
                or client.served < best.served
                or (client.served == best.served and client.waiting[0].arrived < best.waiting[0].arrived)
            ):
                best = client
        return best

    def _forget(self) -> None:
        """Drops clients that have nothing waiting and are not ahead of the clock: they would start as new ones do."""
        if len(self._clients) > 2 * self.places + 16:
            kept = {n: c for n, c in self._clients.items() if c.waiting or c.served > self._clock}
            if len(kept) > 2 * self.places + 16:
                kept = {n: c for n, c in kept.items() if c.waiting}
            self._clients = kept


class ChunkClock:
    """How many prompt tokens fit a time, from the times of chunks so far, in powers of two from least to most.

    Between measured sizes time is taken as a line, beyond the largest it grows with the size to the power of GROWTH.
    What was measured long ago fades, so that one slow chunk does not rule a size out for ever.
    """

    WEIGHT = 0.4  # of a new measurement
    FADE = 0.99  # of the others at each measurement
    GROWTH = 0.8

    def __init__(self, least: int, most: int):
        self.sizes = [least]
        while self.sizes[-1] * 2 <= most:
            self.sizes.append(self.sizes[-1] * 2)
        if self.sizes[-1] < most:
            self.sizes.append(most)
        self._seconds: dict[int, float] = {}  # of one chunk, by size; rises with it

    def tell(self, tokens: int, seconds: float) -> None:
        """One chunk of that many computed tokens took that long."""
        size = max((s for s in self.sizes if s <= tokens), default=0)
        if not size:
            return
        measured = seconds * size / tokens
        old = self._seconds.get(size)
        new = measured if old is None else old + self.WEIGHT * (measured - old)
        for other, known in self._seconds.items():
            # a larger chunk takes no less time, and no more a token
            larger = min(max(known * self.FADE, new), new * other / size)
            self._seconds[other] = min(known, new) if other < size else larger
        self._seconds[size] = new

    def tokens_in(self, seconds: float) -> int:
        """The largest size that is expected to take no longer; the least size if none."""
        best = self.sizes[0]
        for size in self.sizes:
            if self.seconds_of(size) <= seconds:
                best = size
        return best

    def seconds_of(self, size: int) -> float:
        """Expected seconds of a chunk of one of the sizes; infinite before anything was measured."""
        known = self._seconds
        if size in known:
            return known[size]
        below, above = max((s for s in known if s < size), default=0), min((s for s in known if s > size), default=0)
        if below and above:
            return known[below] + (known[above] - known[below]) * (size - below) / (above - below)
        if below:
            return known[below] * (size / below) ** self.GROWTH
        return known[above] if above else float("inf")

    def tokens_per_s(self) -> float:
        """The best rate measured; infinite before that."""
        return max((s / t for s, t in self._seconds.items() if t > 0), default=float("inf"))
