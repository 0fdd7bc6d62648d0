"""A thousand times asleep and awake under load, on a real model: memory, handles and threads by cycle.

    python bench/sleep_cycles.py --cycles 1000 --level 2 [MODEL.gguf]

Each cycle: three requests at once wake the model, one of them leaves in the middle, the model falls asleep. Exit code 1
if handles or threads of the last cycle differ from the tenth's, or RSS grew by more than 5 % and 8 MiB since then.
"""

import argparse
import asyncio
import gc
import os
import random
import sys
import time

from tandem.batch import Batch
from tandem.default_model import default_model
from tandem.engine import Engine
from tandem.requests import GenerationRequest, Prompt
from tandem.runtime.sampling import Sampling
from tandem.serve.events import Failed
from tandem.serve.lifecycle import SleepPolicy
from tandem.serve.scheduler import Limits
from tandem.serve.snapshot import process_bytes
from tandem.serve.worker import Worker


def resources() -> tuple[int, int, int]:
    """Resident bytes, file handles, threads (native ones too)."""
    gc.collect()
    return process_bytes(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


async def end_of(stream):
    async with stream:
        return [event async for event in stream][-1]


async def cycle(worker: Worker, rng: random.Random, level: int) -> float:
    """One cycle; seconds from the first request to its first token."""
    prompts = [[rng.randrange(300, 1000) for _ in range(rng.randint(5, 300))] for _ in range(3)]
    sampling = Sampling(temperature=0.0, max_tokens=8)
    begin = time.monotonic()
    requests = [GenerationRequest(Prompt(ids, (), True), sampling) for ids in prompts]
    streams = [worker.generate(request, client=str(i)) for i, request in enumerate(requests)]
    finished = asyncio.gather(*[end_of(stream) for stream in streams[:2]])
    await streams[2].next()
    await streams[2].aclose()
    ends = await finished
    failed = [event.error for event in ends if isinstance(event, Failed)]
    if failed:
        raise failed[0]
    took_s = time.monotonic() - begin
    while worker.snapshot().state != "sleeping" or worker.snapshot().sleep_level < level:
        await asyncio.sleep(0.001)
    return took_s


async def run(path: str, level: int, cycles: int) -> bool:
    worker = Worker(
        lambda: Batch(lambda: Engine.load(path, ctx=1024), max_sequences=4, cache_bytes=64 << 20),
        Limits(max_sequences=4, sleep=SleepPolicy.at_level(level, 0.001)),
    )
    await worker.start()
    await worker.wait_loaded()
    rng, tenth, begin = random.Random(0), None, time.monotonic()
    for number in range(1, cycles + 1):
        took_s = await cycle(worker, rng, level)
        if number == 10:
            tenth = resources()
        if number in (1, 10) or number % max(1, cycles // 10) == 0:
            rss, handles, tasks = resources()
            print(f"cycle {number}: {rss / 2**20:.1f} MiB, {handles} handles, {tasks} threads; took {took_s:.2f} s")
    last, snapshot = resources(), worker.snapshot()
    left = {role: size for role, size in snapshot.last_sleep.after.items() if size}
    print(f"{cycles} cycles of level {level} in {time.monotonic() - begin:.0f} s; bytes asleep: {left}")
    await worker.stop(1.0)
    grown = last[0] - tenth[0]
    return last[1:] == tenth[1:] and (grown < 8 << 20 or grown < 0.05 * tenth[0]) and not snapshot.last_sleep.unfreed()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(default_model()))
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--level", type=int, default=2, choices=(1, 2))
    args = parser.parse_args()
    return 0 if asyncio.run(run(args.model, args.level, args.cycles)) else 1


if __name__ == "__main__":
    sys.exit(main())
