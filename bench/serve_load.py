"""64 clients at once against the server: mixed lengths, leavers, bad requests, background; prints waits, errors, RSS.

    python bench/serve_load.py --minutes 10                    # starts `tandem serve` on the packaged model
    python bench/serve_load.py --minutes 10 -- --max-sequences 8 MODEL.gguf      # options of `tandem serve`

A wait is the time from request to first token. Its fair share: the clients in the queue ahead, each one answer, through
the sequences there are: clients / sequences x mean service time. The exit code is 1 if an error was not the client's,
a wait was over 4 fair shares, or RSS grew by more than 5 % after a fifth of the time.
"""

import argparse
import asyncio
import json
import random
import re
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

WORDS = "list count explain sea blue why river five animals repeat one two three short poem about capital sky".split()
TEXT = re.compile(rb'"(reasoning_)?content": ?"[^"]')
BAD = (
    (b"{", "broken JSON"),
    (b'{"model": 7}', "no messages"),
    (json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}).encode(), "negative limit"),
    (json.dumps({"messages": [{"role": "user", "content": "word " * 60_000}]}).encode(), "too long a prompt"),
    (json.dumps({"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}).encode(), "wrong type"),
)


@dataclass
class Books:
    """What happened to all requests."""

    waits_s: list[float] = field(default_factory=list)
    services_s: list[float] = field(default_factory=list)
    background_waits_s: list[float] = field(default_factory=list)
    ends: Counter = field(default_factory=Counter)
    faults: Counter = field(default_factory=Counter)  # errors that are not the client's
    by_client: Counter = field(default_factory=Counter)
    tokens: int = 0
    rss: list[tuple[float, int]] = field(default_factory=list)


async def post(port: int, body: bytes, headers: str = "") -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int]:
    """The connection after the head of the response, and its status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n{headers}\r\n"
    )
    writer.write(head.encode() + body)
    head = await reader.readuntil(b"\r\n\r\n")
    return reader, writer, int(head.split(b" ", 2)[1])


async def ask(port: int, rng: random.Random, number: int, books: Books) -> None:
    """One good request, read to its end or left in the middle."""
    background = rng.random() < 0.15
    leaves_after = rng.randint(0, 20) if rng.random() < 0.2 else None
    size = rng.choice((3, 10, 30, 100, 300))
    body = {
        "messages": [{"role": "user", "content": " ".join(rng.choices(WORDS, k=size))}],
        "stream": True,
        "max_tokens": rng.choice((1, 8, 32, 64, 128)),
        "temperature": rng.choice((0.0, 0.8)),
    }
    headers = f"X-Session-Id: client-{number}\r\n" + "X-Tandem-Priority: background\r\n" * background
    begin, first, last = time.monotonic(), None, b""
    reader, writer, status = await post(port, json.dumps(body).encode(), headers)
    try:
        if status != 200:
            books.faults[f"status {status}: {(await reader.read(300)).decode(errors='replace')}"] += 1
            return
        seen = 0
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue
            last = line
            if b'"error"' in line:
                books.faults[line.decode(errors="replace")[:200]] += 1
            if TEXT.search(line):
                seen += 1
                first = first or time.monotonic()
            if leaves_after is not None and seen >= leaves_after:
                books.ends["left"] += 1
                return
        if last.strip() != b"data: [DONE]":
            books.faults["stream without [DONE]"] += 1
            return
        books.ends["background" if background else "interactive"] += 1
        books.by_client[number] += 1
        books.tokens += seen
        end = time.monotonic()
        (books.background_waits_s if background else books.waits_s).append((first or end) - begin)
        books.services_s.append(end - (first or end))
    finally:
        writer.close()


async def ask_badly(port: int, rng: random.Random, books: Books) -> None:
    """One bad request; anything but a status of 4xx with a JSON error is the server's fault."""
    body, what = rng.choice(BAD)
    reader, writer, status = await post(port, body)
    try:
        answer = await reader.read(4096)
        if not 400 <= status < 500 or b'"error"' not in answer:
            books.faults[f"{what}: status {status}"] += 1
        books.ends["bad request"] += 1
    finally:
        writer.close()


async def client(port: int, number: int, end: float, books: Books) -> None:
    rng = random.Random(number)
    while time.monotonic() < end:
        try:
            await (ask_badly(port, rng, books) if rng.random() < 0.05 else ask(port, rng, number, books))
        except (OSError, asyncio.IncompleteReadError) as error:
            books.faults[f"connection: {error!r}"] += 1
            await asyncio.sleep(1.0)
        if rng.random() < 0.1:
            await asyncio.sleep(rng.random())


async def watch(pid: int, begin: float, end: float, books: Books) -> None:
    """RSS of the server every second."""
    while time.monotonic() < end:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            books.rss.append((time.monotonic() - begin, int(file.read().split()[1]) * 4096))
        await asyncio.sleep(1.0)


async def load(port: int, pid: int, clients: int, minutes: float) -> Books:
    books, begin = Books(), time.monotonic()
    end = begin + 60 * minutes
    await asyncio.gather(watch(pid, begin, end, books), *[client(port, n, end, books) for n in range(clients)])
    return books


def report(books: Books, clients: int, sequences: int, minutes: float) -> bool:
    """Prints the figures; whether all bounds hold."""
    waits, service_s = sorted(books.waits_s), statistics.mean(books.services_s)
    fair_s = clients / sequences * service_s
    warm = [size for at, size in books.rss if at > 12 * minutes]
    tenth = max(1, len(warm) // 10)
    before, after = statistics.median(warm[:tenth]), statistics.median(warm[-tenth:])
    print(f"requests: {dict(books.ends)}; {books.tokens} events of text, {books.tokens / 60 / minutes:.0f} a second")
    print(f"answers of a client: {min(books.by_client[n] for n in range(clients))} to {max(books.by_client.values())}")
    middle, late = statistics.median(waits), waits[int(0.95 * len(waits))]
    print(f"time to first token: median {middle:.2f} s, 95 % {late:.2f} s, most {waits[-1]:.2f} s")
    print(f"service {service_s:.2f} s, so a fair share is {fair_s:.2f} s; longest wait: {waits[-1] / fair_s:.1f} of it")
    if books.background_waits_s:
        back = books.background_waits_s
        print(f"background: median {statistics.median(back):.1f} s, most {max(back):.1f} s, {len(back)} answers")
    grown = 100 * (after / before - 1)
    print(f"RSS after warm-up {before / 2**20:.0f} MiB, at the end {after / 2**20:.0f} MiB ({grown:+.1f} %)")
    print(f"errors that are not the client's: {sum(books.faults.values())}")
    for fault, count in books.faults.most_common(10):
        print(f"  {count} x {fault}")
    return not books.faults and waits[-1] < 4 * fair_s and after < 1.05 * before


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def ready(port: int, server: subprocess.Popen) -> None:
    """Waits until the server accepts connections."""
    for _ in range(600):
        if server.poll() is not None:
            raise SystemExit("the server did not start")
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        except OSError:
            await asyncio.sleep(0.1)
    raise SystemExit("the server did not listen within a minute")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("serve", nargs="*", help="further arguments of tandem serve, after --")
    args = parser.parse_args()
    port = free_port()
    command = [sys.executable, "-m", "tandem", "serve", "--port", str(port), "--cache-bytes", str(256 << 20)]
    command += ["--max-sequences", str(args.sequences), "--max-queue", str(2 * args.clients)]
    server = subprocess.Popen([*command, *args.serve], stdout=subprocess.DEVNULL)
    try:
        asyncio.run(ready(port, server))
        books = asyncio.run(load(port, server.pid, args.clients, args.minutes))
        return 0 if report(books, args.clients, args.sequences, args.minutes) else 1
    finally:
        server.terminate()
        server.wait(60)


if __name__ == "__main__":
    sys.exit(main())
