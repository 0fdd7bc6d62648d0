"""From one row of logits to one token id.

In: `Sampling` settings and float32 logits [V]. Out: a token id, or the whole final distribution for speculation.
Order of the chain, the same as llama.cpp's default: logit bias, penalties (repetition, then frequency and presence),
DRY, top-k, typical, top-p, min-p, temperature. Filters therefore see probabilities at temperature 1, and each one
renormalises what the one before it left. Equal logits: the lowest id goes first, everywhere.
"""

import math
import secrets
from collections.abc import Sequence

import numpy as np

from tandem.errors import EngineError, SettingError, ShapeError
from tandem.runtime.sampling import Sampling

_DRY_LIMIT = 1e30  # far below any logit, and still finite in float32
_BLOCK_ROWS = 128


class Sampler:
    """The state of one generation: settings, random stream, and the tokens that penalties look back on.

    `seed` is the seed in use, drawn at random if the settings have none. One uniform number is consumed per sampled
    token, none at temperature 0, so equal seeds and logits give equal tokens.
    Raises SettingError if the settings name a token id that the vocabulary does not have.
    """

    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        self.sampling = sampling
        self.vocab_size = vocab_size
        self.seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        self._random = np.random.Generator(np.random.PCG64(self.seed))
        self._bias_ids = np.array([token for token, _ in sampling.logit_bias], np.int64)
        self._bias = np.array([bias for _, bias in sampling.logit_bias], np.float32)
        self._breakers = np.array(sampling.dry_breakers, np.int64)
        for name, ids in (("logit_bias", self._bias_ids), ("dry_breakers", self._breakers)):
            if ids.size and ids.max() >= vocab_size:
                raise SettingError(f"{name}: token id {ids.max()}, expected less than the vocabulary's {vocab_size}")
        self._history = _History()
        self._generated = _Counts()
        self._seen = _Counts()
        self._counts_generated = bool(sampling.presence_penalty or sampling.frequency_penalty)
        self._repetition = sampling.repetition_penalty != 1.0 and sampling.repetition_window != 0
        self._dry = sampling.dry_multiplier > 0 and sampling.dry_window != 0
        self._adjusts = bool(self._bias_ids.size or self._counts_generated or self._repetition or self._dry)
        self._buffer = np.empty(vocab_size if self._adjusts else 0, np.float32)

    def accept_prompt(self, tokens: Sequence[int]) -> None:
        """Tell the tokens before the first sampled one: repetition and DRY look back on them, presence does not."""
        ids = self._checked_ids(tokens)
        self._history.extend(ids)
        if self._repetition and self.sampling.repetition_window < 0:
            for token in np.unique(ids).tolist():
                self._seen.add(token)

    def accept(self, token: int) -> None:
        """Tell one generated token."""
        if not 0 <= token < self.vocab_size:
            raise ShapeError(f"token id {token}, expected 0 to {self.vocab_size - 1}")
        self._history.append(token)
        if self._counts_generated:
            self._generated.add(token)
        if self._repetition and self.sampling.repetition_window < 0:
            self._seen.add(token)

    def sample(self, logits: np.ndarray, allowed: np.ndarray | None = None) -> int:
        """A token id drawn from `probabilities(logits, allowed)`; it is not accepted yet.

        logits: float32 [V], not changed. allowed: bits of the tokens that may come, uint32 words, lowest bit first;
        tokens beyond its end may not; None: all. Raises ShapeError for another shape or type, EngineError for logits
        that are NaN, +inf, or -inf everywhere.
        """
        adjusted = self._masked(self._adjusted(self._checked(logits)), allowed)
        if self.sampling.temperature == 0.0:
            return _most_likely(adjusted)
        ids, probs = self._distribution(adjusted)
        index = _draw(probs, self._random.random())
        return index if ids is None else int(ids[index])

    def probabilities(self, logits: np.ndarray, allowed: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The final distribution: (ids int64 [n] ascending, probs float64 [n] that sum to 1); all other tokens have 0.

        Arguments and errors as of `sample`. At temperature 0 it is one token with probability 1.
        """
        adjusted = self._masked(self._adjusted(self._checked(logits)), allowed)
        if self.sampling.temperature == 0.0:
            return np.array([_most_likely(adjusted)], np.int64), np.ones(1)
        ids, probs = self._distribution(adjusted)
        return np.arange(self.vocab_size) if ids is None else ids, probs

    def _checked(self, logits: np.ndarray) -> np.ndarray:
        if not isinstance(logits, np.ndarray) or logits.shape != (self.vocab_size,) or logits.dtype != np.float32:
            found = f"{logits.dtype} {list(logits.shape)}" if isinstance(logits, np.ndarray) else type(logits).__name__
            raise ShapeError(f"logits: got {found}, expected float32 [{self.vocab_size}]")
        return logits

    def _checked_ids(self, tokens: Sequence[int]) -> np.ndarray:
        ids = np.asarray(tokens, np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= self.vocab_size):
            raise ShapeError(f"token ids {ids.min()} to {ids.max()}, expected 0 to {self.vocab_size - 1}")
        return ids

    def _adjusted(self, logits: np.ndarray) -> np.ndarray:
        """The logits after bias, penalties and DRY: the argument itself if none is set, else an own buffer."""
        if not self._adjusts:
            return logits
        values, s = self._buffer, self.sampling
        np.copyto(values, logits)
        if self._bias_ids.size:
            values[self._bias_ids] += self._bias
        if self._repetition:
            window = s.repetition_window
            ids = self._seen.ids if window < 0 else np.unique(self._history.last(window))
            found = values[ids]
            values[ids] = np.where(found > 0, found / s.repetition_penalty, found * s.repetition_penalty)
        if self._counts_generated:
            counts = self._generated.counts
            values[self._generated.ids] -= s.presence_penalty + s.frequency_penalty * counts
        if self._dry:
            ids, penalties = dry_penalties(self._history.last(s.dry_window), self._breakers, s)
            values[ids] -= penalties
        return values

    def _masked(self, values: np.ndarray, allowed: np.ndarray | None) -> np.ndarray:
        if allowed is None:
            return values
        bits = np.unpackbits(allowed.view(np.uint8), count=self.vocab_size, bitorder="little")
        return np.where(bits, values, np.float32(-np.inf))

    def _distribution(self, values: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
        """(ids, probs) as `probabilities` gives; ids None stands for the whole vocabulary in order."""
        s = self.sampling
        ids = _top_k(values, s.top_k)
        kept = (values if ids is None else values[ids]).astype(np.float64)
        peak = kept.max()
        _check_peak(peak)
        filters = ((_finite, None), (_typical, s.typical_p), (_top_p, s.top_p), (_min_p, s.min_p))
        for keep, limit in filters:
            index = keep(kept, limit)
            if index is not None:
                ids, kept = index if ids is None else ids[index], kept[index]
        kept -= kept.max()
        if s.temperature != 1.0:
            kept /= s.temperature
        weights = np.exp(kept, out=kept)
        weights /= weights.sum()
        return ids, weights


def dry_penalties(history: np.ndarray, breakers: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """(ids int64 [n], penalties float32 [n]): what to subtract from tokens that would extend a repeat.

    history: int64 token ids, the last one is the newest. For each earlier place whose preceding tokens equal the
    newest ones over n >= dry_allowed_length tokens without a breaker among them, the token at that place loses
    dry_multiplier * dry_base ** (n - dry_allowed_length), at most 1e30; breakers lose nothing.
    """
    allowed, n = sampling.dry_allowed_length, len(history)
    none = np.empty(0, np.int64), np.empty(0, np.float32)
    limit = _dry_longest(sampling)
    stops = np.flatnonzero(np.isin(history[-limit:], breakers)) if breakers.size else breakers
    if stops.size:
        limit = min(limit, n) - 1 - int(stops[-1])
    if min(limit, n - 1) < allowed:
        return none
    ends = np.flatnonzero(history[:-1] == history[-1])
    lengths = np.ones(len(ends), np.int64)
    alive = np.arange(len(ends))
    for back in range(1, min(limit, n)):
        alive = alive[ends[alive] >= back]
        alive = alive[history[ends[alive] - back] == history[n - 1 - back]]
        if not alive.size:
            break
        lengths[alive] += 1
    repeats = lengths >= allowed
    ids, slot = np.unique(history[ends[repeats] + 1], return_inverse=True)
    longest = np.zeros(len(ids), np.int64)
    np.maximum.at(longest, slot, lengths[repeats])
    penalties = np.minimum(sampling.dry_multiplier * np.power(sampling.dry_base, longest - float(allowed)), _DRY_LIMIT)
    spared = np.isin(ids, breakers)
    return ids[~spared], penalties[~spared].astype(np.float32)


def _dry_longest(sampling: Sampling) -> int:
    """The repeat length from which the penalty no longer grows."""
    if sampling.dry_base == 1.0:
        return sampling.dry_allowed_length
    exponent = max(0.0, math.log(_DRY_LIMIT / sampling.dry_multiplier) / math.log(sampling.dry_base))
    return sampling.dry_allowed_length + math.ceil(min(exponent, 1e6))


def _check_peak(peak: float) -> None:
    if math.isfinite(peak):
        return
    what = "contain NaN" if math.isnan(peak) else "contain +inf" if peak > 0 else "are -inf for every token"
    raise EngineError(f"the logits {what}: no token can be chosen; the weights are broken, a kernel is wrong, "
                      "or logit_bias forbids everything")


def _most_likely(values: np.ndarray) -> int:
    index = int(values.argmax())  # NaN counts as largest, the first of equals wins
    _check_peak(float(values[index]))
    return index


def _top_k(values: np.ndarray, k: int) -> np.ndarray | None:
    """Ids of the k largest, ascending; None if that is all of them."""
    size = len(values)
    if k == 0 or k >= size:
        return None
    columns = size // _BLOCK_ROWS
    if k * 8 > columns:
        return _largest(values, k)
    # k columns have a maximum of at least `floor`, so at least k values do: only those can be among the k largest
    blocks = values[: columns * _BLOCK_ROWS].reshape(_BLOCK_ROWS, columns).max(axis=0)
    floor = np.partition(blocks, columns - k)[columns - k]
    _check_peak(np.maximum(blocks.max(), values[columns * _BLOCK_ROWS :].max(initial=-np.inf)))
    ids = np.flatnonzero(values >= floor)
    return ids[_largest(values[ids], k)]


def _largest(values: np.ndarray, k: int) -> np.ndarray:
    """Positions of the k largest, ascending; among equals the lowest positions; NaN counts as largest."""
    cutoff = np.partition(values, len(values) - k)[len(values) - k]
    return _down_to(values, cutoff, k)


def _down_to(values: np.ndarray, cutoff: float, count: int) -> np.ndarray:
    """The `count` lowest-placed positions of values >= cutoff, all of those > cutoff included, ascending."""
    kept = np.flatnonzero(~(values < cutoff))
    if len(kept) > count:
        equal = kept[values[kept] == cutoff]
        kept = np.setdiff1d(kept, equal[len(equal) - (len(kept) - count) :], assume_unique=True)
    return kept


def _finite(values: np.ndarray, _: None) -> np.ndarray | None:
    return None if values.min() > -np.inf else np.flatnonzero(values > -np.inf)


def _typical(values: np.ndarray, mass: float) -> np.ndarray | None:
    if mass >= 1.0:
        return None
    log_probs = values - values.max()
    log_probs -= np.log(np.exp(log_probs).sum())
    probs = np.exp(log_probs)
    entropy = -(probs * log_probs).sum()
    order = np.argsort(np.abs(-log_probs - entropy), kind="stable")
    count = int(np.searchsorted(np.cumsum(probs[order]), mass)) + 1
    return np.sort(order[:count])


def _top_p(values: np.ndarray, mass: float) -> np.ndarray | None:
    if mass >= 1.0:
        return None
    peak = values.max()
    weights = np.exp(values - peak)
    target = mass * weights.sum()
    head = values
    # only the head needs sorting: widen it until it certainly holds the mass
    for depth in (1, 2, 3, 4, 6, 8, 12) if len(values) > 4096 else ():
        inside = values >= peak - depth
        if weights[inside].sum() > target * (1 + 1e-9):
            head = values[inside]
            break
    head = np.sort(head)[::-1]
    count = min(int(np.searchsorted(np.cumsum(np.exp(head - peak)), target)) + 1, len(head))
    return _down_to(values, head[count - 1], count)


def _min_p(values: np.ndarray, ratio: float) -> np.ndarray | None:
    return None if ratio == 0.0 else np.flatnonzero(values >= values.max() + math.log(ratio))


def _draw(probs: np.ndarray, uniform: float) -> int:
    """The index whose share of [0, 1) holds `uniform`. Two levels, since a running sum of a vocabulary is slow."""
    width = 512
    whole = len(probs) // width * width
    start, rest = 0, uniform
    if whole:
        sums = np.cumsum(probs[:whole].reshape(-1, width).sum(axis=1))
        block = int(np.searchsorted(sums, uniform, side="right"))
        start = block * width
        rest = uniform - (sums[block - 1] if block else 0.0)
    inside = np.cumsum(probs[start : start + width])
    index = start + int(np.searchsorted(inside, rest, side="right"))
    # rounding can point past a block's end or the last token: the draw then belongs to the likely token before it
    if index >= min(start + width, len(probs)):
        index = int(np.flatnonzero(probs[: min(start + width, len(probs))])[-1])
    return index


class _History:
    """Token ids in order, appended in amortised constant time and read as one array."""

    def __init__(self) -> None:
        self._ids = np.empty(1024, np.int64)
        self._count = 0

    def append(self, token: int) -> None:
        self._grow(1)
        self._ids[self._count - 1] = token

    def extend(self, ids: np.ndarray) -> None:
        self._grow(len(ids))
        self._ids[self._count - len(ids) : self._count] = ids

    def last(self, window: int) -> np.ndarray:
        start = 0 if window < 0 else max(0, self._count - window)
        return self._ids[start : self._count]

    def _grow(self, extra: int) -> None:
        self._count += extra
        if self._count > len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty(self._count, np.int64)))


class _Counts:
    """How often each token occurred, as two aligned arrays: ids int64 [n], counts float32 [n]."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._ids = np.empty(256, np.int64)
        self._counts = np.zeros(256, np.float32)

    def add(self, token: int) -> None:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty(slot, np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(slot, np.float32)))
        self._ids[slot] = token
        self._counts[slot] += 1

    @property
    def ids(self) -> np.ndarray:
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> np.ndarray:
        return self._counts[: len(self._slots)]
