"""Tokens a second of several conversations together: `tandem serve` beside llama.cpp's server, on the same file and CPU.

Both speak /v1/completions; each round asks for N answers at once, greedy and of fixed length, of prompts that share nothing.
In: a GGUF file. Out: a table with the median over rounds, the servers taking turns. Needs the `xllamacpp` package.

    python bench/serve_peers.py --threads 2 MODEL.gguf
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

PEER = """
import sys, time, xllamacpp
path, port, threads, slots = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
params = xllamacpp.CommonParams()
params.model.path, params.n_parallel, params.n_ctx = path, slots, 1024 * slots
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
params.port, params.n_gpu_layers = port, 0
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
time.sleep(1e6)
"""


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(engine: str, model: Path, threads: int, slots: int) -> tuple[subprocess.Popen, str]:
    """The server's process and address, ready to answer."""
    port = free_port()
    if engine == "tandem":
        command = [sys.executable, "-m", "tandem", "serve", str(model), "--port", str(port), "--threads", str(threads)]
        command += ["--max-sequences", str(slots), "--ctx", "1024"]
    else:
        command = [sys.executable, "-c", PEER, str(model), str(port), str(threads), str(slots)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               env={**os.environ, "OMP_NUM_THREADS": str(threads)})  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    for _ in range(300):
        try:
            with urllib.request.urlopen(address + "/health", timeout=1) as answer:
                if answer.status == 200 and ask(address, "warm up", 2):
                    return process, address
        except OSError:
            time.sleep(0.2)
    process.kill()
    raise RuntimeError(f"{engine} does not answer")


def ask(address: str, prompt: str, tokens: int) -> int:
    """Tokens of one answer."""
    body = json.dumps({"prompt": prompt, "max_tokens": tokens, "temperature": 0}).encode()
    request = urllib.request.Request(address + "/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)["usage"]["completion_tokens"]


def together(address: str, conversations: int, tokens: int, turn: int) -> float:
    """Tokens a second of that many answers asked for at once."""
    made = [0] * conversations
    texts = [f"Chapter {turn}-{i}. The history of number {i * 37 + turn} begins in" for i in range(conversations)]

    def one(i: int) -> None:
        made[i] = ask(address, texts[i], tokens)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(conversations)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(made) / (time.perf_counter() - begin)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--conversations", default="1,4,8")
    args = parser.parse_args()
    counts = [int(part) for part in args.conversations.split(",")]
    servers = {name: start(name, args.model, args.threads, max(counts)) for name in ("tandem", "llama.cpp")}
    try:
        for count in counts:
            speeds: dict[str, list[float]] = {name: [] for name in servers}
            for turn in range(args.rounds):
                for name, (_, address) in servers.items():
                    speeds[name].append(together(address, count, args.tokens, turn * 100 + count))
            median = {name: statistics.median(values) for name, values in speeds.items()}
            ratio = statistics.median(a / b for a, b in zip(speeds["tandem"], speeds["llama.cpp"], strict=True))
            print(f"{count} conversations: tandem {median['tandem']:.1f} tok/s, llama.cpp {median['llama.cpp']:.1f}, "
                  f"ratio {ratio:.2f}", flush=True)  # fmt: skip
    finally:
        for process, _ in servers.values():
            process.terminate()


if __name__ == "__main__":
    main()
