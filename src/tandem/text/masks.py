"""Grammar steps to bit masks of the tokens that may come next, by llguidance.

In: a `Plan` of steps and the tokenizer. Out: `GrammarConstraint`, one object per answer (the protocol `Constraint`).
"""

import json
import re
import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import llguidance
import numpy as np

from tandem.errors import RequestError
from tandem.text.tokenizer import Tokenizer

MAX_FORCED_TOKENS = 64
PROBED_TOKENS = 6
MAX_COMPILED = 512  # grammars of one request; the steps of a call differ by the arguments that are left


_PLACE = re.compile(r"at \d+\(\d+\): (?:failed to compile JSON schema: )?")


@dataclass(frozen=True)
class Limits:
    """What one request may cost. Chars of JSON or grammar text, levels of nesting, values of one enum, chars of one
    regex; then llguidance's own: work units for building the lexer and for one mask, states that it may keep (about
    2 KB each), symbols of a grammar."""

    schema_chars: int = 262_144
    depth: int = 64
    enum_values: int = 10_000
    regex_chars: int = 4_096
    grammar_chars: int = 65_536
    build_work: int = 1_000_000
    step_work: int = 200_000
    lexer_states: int = 20_000
    grammar_symbols: int = 200_000

    def of_library(self) -> llguidance.LLParserLimits:
        """The part that llguidance enforces."""
        return llguidance.LLParserLimits(
            initial_lexer_fuel=self.build_work,
            step_lexer_fuel=self.step_work,
            max_lexer_states=self.lexer_states,
            max_grammar_size=self.grammar_symbols,
            verbose_errors=False,
        )


class Vocabulary:
    """A tokenizer as llguidance needs it, and its tokens in order of their bytes. Made once per tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        """Takes about a second for 250,000 tokens."""
        self.tokenizer = tokenizer
        self.words = -(-tokenizer.vocab_size // 32)
        if not tokenizer.eog_ids:
            raise RequestError("constraint: this model's vocabulary has no token that ends an answer")
        tokens = [tokenizer.token_bytes(index, keep_control=True) for index in range(tokenizer.vocab_size)]
        self.tokens = tokens
        self._ordered = sorted((token, index) for index, token in enumerate(tokens) if token)
        self.library = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_ForLibrary(tokenizer, tokens)),
            n_vocab=tokenizer.vocab_size,
            eos_token=sorted(tokenizer.eog_ids),
        )
        self.end_mask = self.mask_of(tokenizer.eog_ids)
        self.kept: dict[bytes, Callable[[], GrammarConstraint]] = {}  # factories of earlier requests, by `grammar._key`

    def mask_of(self, ids: Sequence[int] | frozenset[int]) -> np.ndarray:
        """Bits of these tokens, uint32 [words]."""
        mask = np.zeros(self.words, np.uint32)
        for index in ids:
            mask[index // 32] |= np.uint32(1 << index % 32)
        return mask

    def longer_than(self, prefix: bytes) -> list[tuple[bytes, int]]:
        """Bytes and id of the tokens that begin with `prefix` and go on behind it."""
        place, found = bisect_left(self._ordered, (prefix + b"\0", -1)), []
        while place < len(self._ordered) and self._ordered[place][0].startswith(prefix):
            found.append(self._ordered[place])
            place += 1
        return found


class _ForLibrary:
    """The attributes and the call that `llguidance.TokenizerWrapper` asks for."""

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes]):
        self._encode = tokenizer.encode
        self.tokens = tokens
        self.special_token_ids = sorted(tokenizer.control_ids)
        self.eos_token_id, self.bos_token_id = min(tokenizer.eog_ids), tokenizer.bos_id

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


_VOCABULARIES: "weakref.WeakKeyDictionary[Tokenizer, Vocabulary]" = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """The `Vocabulary` of a tokenizer, made at the first call."""
    with _LOCK:
        if tokenizer not in _VOCABULARIES:
            _VOCABULARIES[tokenizer] = Vocabulary(tokenizer)
        return _VOCABULARIES[tokenizer]


class Compiler:
    """Grammars in llguidance's notation to matchers, each compiled once."""

    def __init__(self, vocabulary: Vocabulary, limits: Limits):
        self.vocabulary, self.limits = vocabulary, limits
        self._library_limits = limits.of_library()
        self._made: dict[tuple[str, ...], llguidance.LLMatcher] = {}

    def matcher(self, grammars: tuple[str, ...], what: str) -> llguidance.LLMatcher:
        """A fresh matcher. what: names the part of the request in the RequestError for what cannot be compiled."""
        made = self._made.get(grammars)
        if made is None:
            grammar = grammars[0] if len(grammars) == 1 else _alternatives(grammars)
            made = llguidance.LLMatcher(self.vocabulary.library, grammar, log_level=0, limits=self._library_limits)
            if made.is_error():
                raise RequestError(f"{what} cannot be enforced: {first_line(made.get_error())}")
            if problem := _problem(made):
                raise RequestError(f"{what} allows no answer, or is too complex to be enforced: {first_line(problem)}")
            if len(self._made) >= MAX_COMPILED:
                self._made.clear()
            self._made[grammars] = made
        return made.deep_copy()


@dataclass(frozen=True)
class Step:
    """One of several grammars that follow each other. grammars: in llguidance's notation, of which one is taken; then:
    the next step, by the bytes that this one was given, None: nothing may follow; what: names it in errors."""

    grammars: tuple[str, ...]
    then: Callable[[bytes], "Step | None"]
    what: str = "grammar"


def _no_step(written: bytes) -> None:
    raise AssertionError("no step to go on from")


FREE = Step((), _no_step, "free text")  # as a next step: nothing is restricted until a watched marker appears


@dataclass(frozen=True)
class Plan:
    """How an answer is constrained. first: from its first token on, None: free; watched: while it is free, the bytes
    that begin a step, the first found counts; again: free again after the last step, else the answer ends there; think:
    a token that, as the very first one, makes the answer free until a marker."""

    first: Step | None
    watched: Mapping[bytes, Step]
    again: bool
    think: int | None = None


class GrammarConstraint:
    """Tells which tokens a `Plan` allows; the protocol `Constraint`. One object per answer.

    Raises RequestError from every method once the grammar has become too complex for the limits.
    """

    def __init__(self, compiler: Compiler, plan: Plan):
        self._compiler, self._plan = compiler, plan
        self._step: Step | None = None
        self._matcher: llguidance.LLMatcher | None = None
        self._written, self._tail, self._ended = b"", b"", False
        self._may_think = plan.think is not None
        if plan.first is not None:
            self._enter(plan.first)

    def allowed(self) -> np.ndarray | None:
        """Bits of the tokens that may come next, uint32 [ceil(vocab_size / 32)]; None: all."""
        vocabulary = self._compiler.vocabulary
        if self._ended:
            return vocabulary.end_mask
        if self._matcher is None:
            return self._allowed_before_marker()
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: vocabulary.words]
        self._check()
        return mask | vocabulary.mask_of([self._plan.think]) if self._may_think else mask

    def forced(self) -> Sequence[int]:
        """Tokens that must come next because the grammar leaves one text, as the tokenizer cuts it; () otherwise."""
        if self._matcher is None or self._ended or self._may_think or self._matcher.is_accepting():
            return ()
        ids = self._matcher.compute_ff_tokens()[:MAX_FORCED_TOKENS]
        self._check()
        if not ids:
            return ()
        tokenizer = self._compiler.vocabulary.tokenizer
        text = b"".join(self._compiler.vocabulary.tokens[index] for index in ids)
        try:
            same = tokenizer.encode(text.decode(), parse_special=True) == ids
        except (UnicodeDecodeError, RequestError):
            return ()
        return tuple(ids) if same else ()

    def accept(self, token: int) -> None:
        """Tells one token of the answer. Raises RequestError for one that is not allowed."""
        if token in self._compiler.vocabulary.tokenizer.eog_ids and (self._matcher is None or self._ended):
            return
        data = self._compiler.vocabulary.tokens[token]
        if self._ended:
            raise RequestError(f"constraint: token {token} follows the end of what the grammar allows")
        may_think, self._may_think = self._may_think, False
        if may_think and token == self._plan.think:
            self._enter(FREE)
        elif self._matcher is None:
            self._watch(data)
        else:
            self._consume([token], data)

    def _watch(self, data: bytes) -> None:
        text = self._tail + data
        found = min(
            ((place, marker) for marker in self._plan.watched if (place := text.find(marker)) >= 0), default=None
        )
        if found is None:
            keep = max(map(len, self._plan.watched), default=1) - 1
            self._tail = text[-keep:] if keep else b""
            return
        self._tail = b""
        self._enter(self._plan.watched[found[1]])
        rest = text[found[0] + len(found[1]) :]
        if rest:
            self._consume(self._compiler.vocabulary.library.tokenize_bytes(rest), rest)

    def _allowed_before_marker(self) -> np.ndarray | None:
        """All tokens but those that complete a marker and go on behind it as its step forbids."""
        vocabulary, refused = self._compiler.vocabulary, []
        for marker, step in self._plan.watched.items():
            for length in range(min(len(marker) - 1, len(self._tail)), 0, -1):
                if not self._tail.endswith(marker[:length]):
                    continue
                for data, index in vocabulary.longer_than(marker[length:]):
                    rest = vocabulary.library.tokenize_bytes(data[len(marker) - length :])
                    matcher = self._compiler.matcher(step.grammars, step.what)
                    if matcher.validate_tokens(rest) < len(rest):
                        refused.append(index)
        return ~vocabulary.mask_of(refused) if refused else None

    def _enter(self, step: Step | None) -> None:
        self._step, self._written = step, b""
        free = step is None or step is FREE
        self._matcher = None if free else self._compiler.matcher(step.grammars, step.what)
        self._ended = step is None and not self._plan.again

    def _consume(self, tokens: list[int], data: bytes) -> None:
        matcher = self._matcher
        if not matcher.consume_tokens(tokens):
            message = first_line(matcher.get_error())
            raise RequestError(f"constraint: tokens {tokens[:8]} are not allowed here: {message}")
        self._written += data
        if matcher.is_stopped():
            self._check()
            if tokens[-1] in self._compiler.vocabulary.tokenizer.eog_ids:
                self._ended = True
            else:
                self._enter(self._step.then(self._written))

    def _check(self) -> None:
        if self._matcher.is_error():
            message = first_line(self._matcher.get_error())
            raise RequestError(f"{self._step.what} became too complex while the answer was written: {message}")


def _problem(matcher: llguidance.LLMatcher) -> str:
    """The error that shows when the first tokens are written, '' if none does. Leaves the matcher as it is."""
    tried = matcher.deep_copy()
    for _ in range(PROBED_TOKENS):
        mask = np.frombuffer(tried.compute_bitmask(), np.uint32)
        if tried.is_error():
            return tried.get_error()
        word = int(np.flatnonzero(mask)[0])
        tried.consume_token(word * 32 + (int(mask[word]) & -int(mask[word])).bit_length() - 1)
        if tried.is_error() or tried.is_stopped():
            return tried.get_error()
    return ""


def _alternatives(grammars: tuple[str, ...]) -> str:
    named = [{"name": f"g{number}", "lark_grammar": grammar} for number, grammar in enumerate(grammars)]
    start = "start: " + " | ".join(f"@{part['name']}" for part in named)
    return json.dumps({"grammars": [{"lark_grammar": start}, *named]})


def first_line(message: str) -> str:
    """What a message of the library says, on one line of at most 300 characters."""
    lines = [line.strip() for line in message.strip().splitlines()] or [""]
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "")
    # Clients take an error in which something "exceeds a limit" for a prompt that is too long.
    return re.sub("exceed(s|ed)?", "is over", f"{_PLACE.sub('', lines[0])} {reason}".strip())[:300]
