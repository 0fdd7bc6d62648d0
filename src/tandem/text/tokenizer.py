"""Text to token ids and back, for the vocabulary that a GGUF file carries.

In: metadata of the file, then text or ids. Out: the ids that the model's original tokenizer gives, or text. Control
tokens never arise from text unless the caller asks for it (`parse_special`).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache

import numpy as np
import tokenizers
from tokenizers import AddedToken, models, normalizers

from tandem.errors import FormatError, RequestError, nearest
from tandem.text.decoder import IncrementalDecoder
from tandem.text.pretokenizers import splitting_named
from tandem.text.vocabulary import (
    BYTE,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    check_text,
    read_vocabulary,
)

SPACE_MARK = "\u2581"
# Bytes that no UTF-8 text contains: a vocabulary may lack tokens for them.
_NEVER_IN_UTF8 = frozenset([0xC0, 0xC1, *range(0xF5, 0x100)])


class Tokenizer:
    """Encodes and decodes with one vocabulary. Safe to use from several threads.

    vocab_size: number of tokens, the width of the logits; bos_id, eos_id, pad_id, unknown_id: int or None;
    eog_ids: frozenset of ids that end a generation; control_ids: frozenset of ids that stand for no text;
    add_bos, add_eos: bool, what `encode` adds when asked for special tokens.
    """

    def __init__(self, vocabulary: Vocabulary):
        """Build from a checked vocabulary; `from_metadata` is the usual way. Raises FormatError."""
        build = _MODELS.get(vocabulary.model)
        if build is None:
            raise FormatError(
                f"tokenizer.ggml.model: unknown tokenizer {vocabulary.model!r}{nearest(vocabulary.model, _MODELS)}"
            )
        self._vocabulary = vocabulary
        self.vocab_size = len(vocabulary.tokens)
        self.bos_id, self.eos_id = vocabulary.bos_id, vocabulary.eos_id
        self.pad_id, self.unknown_id = vocabulary.pad_id, vocabulary.unknown_id
        self.eog_ids, self.control_ids = vocabulary.eog_ids, vocabulary.control_ids
        self._sentencepiece = vocabulary.model == "llama"
        default_bos = self._sentencepiece or splitting_named(vocabulary.pre).add_bos
        self.add_bos = _checked_add("bos", vocabulary.add_bos, default_bos, self.bos_id)
        self.add_eos = _checked_add("eos", vocabulary.add_eos, False, self.eos_id)
        self._collapse_spaces = self._sentencepiece and vocabulary.remove_extra_whitespaces
        self._strip_first_space = self._collapse_spaces or (
            self._sentencepiece and vocabulary.add_space_prefix is not False
        )
        self._plain = build(vocabulary)
        self._plain.add_tokens(_user_defined(vocabulary))
        self._controls = _Finder({vocabulary.tokens[index]: index for index in vocabulary.control_ids})
        self._missing = _missing_bytes(vocabulary)
        for index in np.flatnonzero(vocabulary.types == BYTE).tolist():
            _byte_of(vocabulary.tokens[index])

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> "Tokenizer":
        """The tokenizer that the `tokenizer.ggml.*` keys of a GGUF file describe. Raises FormatError."""
        return cls(read_vocabulary(metadata))

    def encode(self, text: str, parse_special: bool = False, add_special: bool = False) -> list[int]:
        """The ids of `text`.

        parse_special: names of control tokens in the text become those tokens (for rendered chat templates, never for
        what a user wrote); add_special: put bos and eos around it where the file asks for them, bos never twice.
        Raises RequestError for what is no text, and for characters that this vocabulary cannot express.
        """
        check_text(text)
        ids: list[int] = []
        for piece in self.split_special(text) if parse_special else [text]:
            ids.extend(self._encode_plain(piece) if isinstance(piece, str) else [piece])
        if add_special and self.add_bos and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        if add_special and self.add_eos:
            ids.append(self.eos_id)
        return ids

    def split_special(self, text: str) -> Iterator[str | int]:
        """`text` cut at the names of control tokens: strings without them and the ids in between, in order."""
        return self._controls.split(text)

    def decode(self, ids: Iterable[int], keep_control: bool = False) -> str:
        """The text of `ids`; bytes that form no character become U+FFFD. keep_control: name control tokens too.

        Raises RequestError for an id outside the vocabulary.
        """
        decoder = self.decoder(keep_control=keep_control)
        decoder_input = b"".join(self.token_bytes(index, keep_control) for index in ids)
        return decoder.push_bytes(decoder_input) + decoder.flush()

    def decoder(self, continues: bool = False, keep_control: bool = False) -> IncrementalDecoder:
        """A decoder that takes one id at a time and never emits part of a character.

        continues: the ids follow other text, so a first space is kept; keep_control: name control tokens too.
        """
        strip = self._strip_first_space and not continues
        return IncrementalDecoder(lambda index: self.token_bytes(index, keep_control), strip_first_space=strip)

    def token_bytes(self, token_id: int, keep_control: bool = False) -> bytes:
        """The bytes that one token adds to the text, b"" for control and unused tokens (keep_control: their name).

        Raises RequestError for an id outside the vocabulary.
        """
        text = self.token_text(token_id)
        if token_id in self.control_ids:
            return text.encode() if keep_control else b""
        token_type = self._vocabulary.types[token_id]
        if token_type == UNUSED:
            return b""
        if token_type == BYTE:
            return _byte_of(text)
        if token_type == USER_DEFINED:
            return text.encode()
        if self._sentencepiece:
            return text.replace(SPACE_MARK, " ").encode()
        return _bytes_of_letters(text)

    def token_text(self, token_id: int) -> str:
        """The token as the file spells it. Raises RequestError for an id outside the vocabulary."""
        if not isinstance(token_id, (int, np.integer)) or not 0 <= token_id < self.vocab_size:
            raise RequestError(f"token id {token_id!r} is not in the vocabulary of {self.vocab_size} tokens")
        return self._vocabulary.tokens[token_id]

    def token_id(self, text: str) -> int | None:
        """The id of the token that the file spells `text`, or None."""
        return self._vocabulary.id_of.get(text)

    def _encode_plain(self, text: str) -> list[int]:
        if self._collapse_spaces:
            text = re.sub(" +", " ", text).lstrip(" ").rstrip(" " + SPACE_MARK)
        if self._missing:
            _check_expressible(text, self._missing)
        return self._plain.encode(text, add_special_tokens=False).ids


class _Finder:
    """Finds the names of control tokens in text: leftmost first, of those the longest, as the originals do."""

    def __init__(self, id_of: Mapping[str, int]):
        self._id_of = id_of
        self._lengths: dict[str, list[int]] = {}
        for name in id_of:
            self._lengths.setdefault(name[0], []).append(len(name))
        for first, lengths in self._lengths.items():
            self._lengths[first] = sorted(set(lengths), reverse=True)
        firsts = "".join(map(re.escape, self._lengths))
        self._first = re.compile(f"[{firsts}]") if firsts else None

    def split(self, text: str) -> Iterator[str | int]:
        begin = position = 0
        while self._first and (match := self._first.search(text, position)):
            start = match.start()
            name = self._name_at(text, start)
            if name is None:
                position = start + 1
                continue
            if begin < start:
                yield text[begin:start]
            yield self._id_of[name]
            begin = position = start + len(name)
        if begin < len(text):
            yield text[begin:]

    def _name_at(self, text: str, start: int) -> str | None:
        for length in self._lengths[text[start]]:
            if text[start : start + length] in self._id_of:
                return text[start : start + length]
        return None


def _checked_add(name: str, stated: bool | None, default: bool, token_id: int | None) -> bool:
    if stated and token_id is None:
        raise FormatError(f"tokenizer.ggml.add_{name}_token is true, but tokenizer.ggml.{name}_token_id is missing")
    return (default if stated is None else stated) and token_id is not None


def _user_defined(vocabulary: Vocabulary) -> list[AddedToken]:
    """Tokens that text always becomes, before normalization and merges (for example <think>, or runs of spaces)."""
    ids = np.flatnonzero(vocabulary.types == USER_DEFINED).tolist()
    names = [_as_written(vocabulary, index) for index in ids if index not in vocabulary.control_ids]
    return [AddedToken(name, normalized=False, special=False) for name in names if name]


def _as_written(vocabulary: Vocabulary, index: int) -> str:
    """A token of the user-defined type as text spells it: some converters leave the mark for spaces in it."""
    token = vocabulary.tokens[index]
    return token.replace(SPACE_MARK, " ") if vocabulary.model == "llama" else token


def _model_entries(vocabulary: Vocabulary) -> dict[str, int]:
    """Token -> id as the merge model sees it: tokens that no text may become get a key that no text can match."""
    entries = dict(vocabulary.id_of)
    hidden = set(np.flatnonzero(vocabulary.types == UNUSED).tolist()) | vocabulary.control_ids
    visible = set(np.flatnonzero(vocabulary.types == USER_DEFINED).tolist()) - hidden
    for index in hidden | visible:
        entries.pop(vocabulary.tokens[index], None)
    keys = [(_hidden_key(index), index) for index in hidden]
    for key, index in keys + [(_as_written(vocabulary, index), index) for index in visible if vocabulary.tokens[index]]:
        if entries.setdefault(key, index) != index:
            raise FormatError(f"tokenizer.ggml.tokens: tokens {entries[key]} and {index} are both {key!r}")
    return entries


def _hidden_key(index: int) -> str:
    """What the merge model calls a token that text cannot become: no merge of two tokens makes it."""
    return f"\0{index}\0"


def _byte_level(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """Byte-level BPE: merges in the file's order, over bytes spelled as letters."""
    splitting = splitting_named(vocabulary.pre)
    entries = _model_entries(vocabulary)
    merges = [tuple(merge.split(" ")) for merge in vocabulary.merges]
    for index, merge in enumerate(merges):
        if len(merge) != 2:
            found = vocabulary.merges[index]
            raise FormatError(f"tokenizer.ggml.merges[{index}]: found {found!r}, expected two tokens")
    model = _merge_model(entries, merges, vocabulary, ignore_merges=splitting.ignore_merges)
    tokenizer = tokenizers.Tokenizer(model)
    if (normalizer := splitting.normalizer()) is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = splitting.build()
    return tokenizer


def _sentencepiece(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """SentencePiece BPE: of all neighbours, merge the pair whose joint token has the best score; else fall to bytes."""
    if vocabulary.scores is None:
        raise FormatError("tokenizer.ggml.scores is missing: a vocabulary of model 'llama' merges by score")
    entries = _model_entries(vocabulary)
    unknown = next((token for token, index in entries.items() if index == vocabulary.unknown_id), None)
    options = {"byte_fallback": True, "fuse_unk": True, "unk_token": unknown}
    model = _merge_model(entries, _merges_by_score(vocabulary), vocabulary, **options)
    tokenizer = tokenizers.Tokenizer(model)
    prefix = [] if vocabulary.add_space_prefix is False else [normalizers.Prepend(SPACE_MARK)]
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE_MARK)])
    return tokenizer


_MODELS: dict[str, Callable[[Vocabulary], tokenizers.Tokenizer]] = {"gpt2": _byte_level, "llama": _sentencepiece}


def _merges_by_score(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third, best score of the third first."""
    normal = np.flatnonzero(vocabulary.types == NORMAL)
    order = normal[np.argsort(-vocabulary.scores[normal].astype(np.float64), kind="stable")].tolist()
    tokens = vocabulary.tokens
    known = {tokens[index] for index in order if index not in vocabulary.control_ids}
    merges = []
    for index in order:
        token = tokens[index]
        if token not in known:
            continue
        for cut in range(1, len(token)):
            left = token[:cut]
            if left in known and token[cut:] in known:
                merges.append((left, token[cut:]))
    return merges


def _merge_model(
    entries: dict[str, int], merges: list[tuple[str, str]], vocabulary: Vocabulary, **options: object
) -> models.BPE:
    try:
        return models.BPE(vocab=entries, merges=merges, **options)
    except Exception:  # the library raises a bare Exception when a merge names or makes a token it does not know
        pass
    hidden = {vocabulary.tokens[index] for index in vocabulary.control_ids}
    for index, (left, right) in enumerate(merges):
        unknown = [token for token in (left, right, left + right) if token not in entries and token not in hidden]
        if unknown:
            raise FormatError(f"tokenizer.ggml.merges[{index}]: {left!r} {right!r}: {unknown[0]!r} is not a token")
    # What is left makes control tokens from text, which must not happen.
    kept = [merge for merge in merges if not hidden.intersection((*merge, "".join(merge)))]
    return models.BPE(vocab=entries, merges=kept, **options)


def _missing_bytes(vocabulary: Vocabulary) -> frozenset[int]:
    """Bytes of valid UTF-8 for which the vocabulary has no token, if it cannot say `unknown` instead."""
    if vocabulary.model == "llama":
        if vocabulary.unknown_id is not None:
            return frozenset()
        return frozenset(
            byte for byte in range(256) if byte not in _NEVER_IN_UTF8 and f"<0x{byte:02X}>" not in vocabulary.id_of
        )
    letters = _letter_of_byte()
    return frozenset(
        byte for byte in range(256) if byte not in _NEVER_IN_UTF8 and letters[byte] not in vocabulary.id_of
    )


def _check_expressible(text: str, missing: frozenset[int]) -> None:
    lost = text.encode().translate(None, bytes(set(range(256)) - missing))
    if not lost:
        return
    place = next(index for index, char in enumerate(text) if missing.intersection(char.encode()))
    raise RequestError(
        f"text to tokenize: this model has no token for character {place}, U+{ord(text[place]):04X}; remove it"
    )


@lru_cache(maxsize=1)
def _letter_of_byte() -> tuple[str, ...]:
    """How byte-level BPE spells each byte: printable ones as themselves, the others as letters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(hidden)) for byte in range(256))


@lru_cache(maxsize=1)
def _byte_of_letter() -> dict[str, int]:
    return {letter: byte for byte, letter in enumerate(_letter_of_byte())}


def _bytes_of_letters(text: str) -> bytes:
    """Bytes of a byte-level token; a token with a letter outside the spelling is plain text that the file added."""
    byte_of = _byte_of_letter()
    values = [byte_of.get(letter) for letter in text]
    return text.encode() if None in values else bytes(values)


def _byte_of(text: str) -> bytes:
    """The byte that a token like <0x0A> stands for. Raises FormatError for another spelling."""
    match = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text)
    if match is None:
        raise FormatError(f"tokenizer.ggml.tokens: {text!r} has the type byte, expected a spelling like '<0x0A>'")
    return bytes([int(match[1], 16)])
