"""Token streams and the order in which training reads them: a pure function of seed and counters, so it resumes.

In: `<name>.bin` files of uint16 token ids (documents end with <|endoftext|>). Out: batches [B, length] on the device.
"""

from pathlib import Path

import numpy as np
import torch


class Stream:
    """One file of tokens, read in windows of `length` in a new random order and with a new offset each epoch."""

    def __init__(self, path: Path, device, seed: int):
        tokens = np.fromfile(path, np.uint16)
        self.tokens = torch.from_numpy(tokens.astype(np.int32)).to(device)
        self.seed = seed
        self._order: tuple[tuple, torch.Tensor, int] | None = None

    def _epoch(self, length: int, epoch: int) -> tuple[torch.Tensor, int]:
        key = (length, epoch)
        if self._order is None or self._order[0] != key:
            rng = np.random.default_rng([self.seed, length, epoch])
            offset = int(rng.integers(0, length))
            count = (len(self.tokens) - offset - length) // length
            if count < 1:
                raise ValueError(f"a stream of {len(self.tokens)} tokens is too short for windows of {length}")
            self._order = key, torch.from_numpy(rng.permutation(count)), offset
        return self._order[1], self._order[2]

    def take(self, count: int, length: int, extra: int, position: list[int], rank: int, world: int) -> torch.Tensor:
        """This rank's `count` windows [count, length + extra]; position [epoch, index] moves on by count * world."""
        rows = []
        for number in range(count * world):
            order, offset = self._epoch(length, position[0])
            if number % world == rank:
                rows.append(int(order[position[1]]) * length + offset)
            position[1] += 1
            if position[1] == len(order):
                position[0], position[1] = position[0] + 1, 0
        starts = torch.tensor(rows, device=self.tokens.device)
        index = starts[:, None] + torch.arange(length + extra, device=self.tokens.device)
        return self.tokens[index.clamp(max=len(self.tokens) - 1)].long()


def split_batch(weights: dict[str, float], size: int) -> dict[str, int]:
    """Windows of each stream in a batch of `size`, by largest remainders."""
    total = sum(weights.values())
    exact = {name: size * weight / total for name, weight in weights.items()}
    counts = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: size - sum(counts.values())]:
        counts[name] += 1
    return {name: count for name, count in counts.items() if count}
