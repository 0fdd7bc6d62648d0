"""The `tokenizer.ggml.*` keys of a GGUF file, checked: tokens, their types and scores, and the ids with a meaning.

In: the metadata of a file. Out: a `Vocabulary`. Every impossible value is a FormatError that names the key.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tandem.errors import FormatError, RequestError

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# Names that end a generation whatever type the file gives them: no text of a normal token looks like these.
_END_NAMES = frozenset(
    "<|im_end|> <|endoftext|> <|end_of_text|> <|eot_id|> <|eom_id|> <|end|> <|return|> <|call|> <end_of_turn> "
    "<|fim_pad|> <|fim_repo|> <|repo_name|> <|file_sep|> <|endofturn|> <｜end▁of▁sentence｜>".split()
)
# Names that end a generation only if the file calls them control tokens: the same text also occurs in prose and code.
_END_NAMES_IF_CONTROL = frozenset(
    "</s> <eos> <EOT> [EOT] [EOS] <fim_pad> <fim-pad> <repo_name> <reponame> <fim-repo> <file_sep> <turn|>".split()
)
_LOOKS_SPECIAL = re.compile(r"<.+>|\[.+\]", re.DOTALL)


@dataclass(frozen=True)
class Vocabulary:
    """All tokens of a file and what they are for. `types` and `scores` have one entry per token."""

    model: str
    pre: str | None
    tokens: Sequence[str]
    types: np.ndarray
    scores: np.ndarray | None
    merges: Sequence[str]
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    pad_id: int | None
    eog_ids: frozenset[int]
    control_ids: frozenset[int]
    add_bos: bool | None
    add_eos: bool
    add_space_prefix: bool | None
    remove_extra_whitespaces: bool
    id_of: Mapping[str, int] = field(repr=False)


def read_vocabulary(metadata: Mapping[str, object]) -> Vocabulary:
    """The vocabulary that `metadata` describes.

    Raises FormatError for keys that are missing or of another type, and for ids and lengths that do not fit.
    """
    model = _string(metadata, "model")
    if model is None:
        raise FormatError("tokenizer.ggml.model is missing: this file has no tokenizer")
    tokens = _strings(metadata, "tokens")
    if not tokens:
        raise FormatError("tokenizer.ggml.tokens is missing or empty: this file has no vocabulary")
    id_of = {token: index for index, token in enumerate(tokens) if token}
    if len(id_of) != len(tokens) - sum(not token for token in tokens):
        raise FormatError(f"tokenizer.ggml.tokens: token {_first_duplicate(tokens)!r} occurs twice")
    types = _numbers(metadata, "token_type", len(tokens), "iu")
    types = np.full(len(tokens), NORMAL, np.int32) if types is None else types.astype(np.int32)
    named = {key: _token_id(metadata, key, len(tokens)) for key in ("bos", "eos", "eot", "eom", "unknown", "padding")}
    _fill_sentencepiece_ids(model, named, types)
    eog_ids = _end_ids(id_of, types, [named["eos"], named["eot"], named["eom"]])
    return Vocabulary(
        model=model,
        pre=_string(metadata, "pre"),
        tokens=tokens,
        types=types,
        scores=_numbers(metadata, "scores", len(tokens), "iuf"),
        merges=_strings(metadata, "merges"),
        bos_id=named["bos"],
        eos_id=named["eos"],
        unknown_id=named["unknown"],
        pad_id=named["padding"],
        eog_ids=eog_ids,
        control_ids=_control_ids(tokens, types, eog_ids, named),
        add_bos=_flag(metadata, "add_bos_token"),
        add_eos=bool(_flag(metadata, "add_eos_token")),
        add_space_prefix=_flag(metadata, "add_space_prefix"),
        remove_extra_whitespaces=bool(_flag(metadata, "remove_extra_whitespaces")),
        id_of=id_of,
    )


def _fill_sentencepiece_ids(model: str, named: dict[str, int | None], types: np.ndarray) -> None:
    """Give `named` the ids that SentencePiece files mean when they state none, where the token types agree."""
    if model != "llama":
        return
    for key, index, token_type in (("unknown", 0, UNKNOWN), ("bos", 1, CONTROL), ("eos", 2, CONTROL)):
        if named[key] is None and index < len(types) and types[index] == token_type:
            named[key] = index


def _end_ids(id_of: Mapping[str, int], types: np.ndarray, stated: list[int | None]) -> frozenset[int]:
    ids = {index for index in stated if index is not None}
    ids.update(id_of[name] for name in _END_NAMES if name in id_of)
    ids.update(
        id_of[name] for name in _END_NAMES_IF_CONTROL if name in id_of and types[id_of[name]] in (CONTROL, UNKNOWN)
    )
    if "<|return|>" in id_of and "<|call|>" in id_of and "<|end|>" in id_of:
        # In the harmony format <|end|> closes one message of several, <|return|> and <|call|> the answer.
        ids.discard(id_of["<|end|>"])
    return frozenset(ids)


def _control_ids(
    tokens: Sequence[str], types: np.ndarray, eog_ids: frozenset[int], named: Mapping[str, int | None]
) -> frozenset[int]:
    """Control and unknown tokens, and those that files mark wrongly: an end token spelled like <this> is control."""
    ids = set(np.flatnonzero((types == CONTROL) | (types == UNKNOWN)).tolist())
    suspects = eog_ids | {index for index in named.values() if index is not None}
    ids.update(index for index in suspects if _LOOKS_SPECIAL.fullmatch(tokens[index]))
    return frozenset(index for index in ids if tokens[index])


def _first_duplicate(tokens: Sequence[str]) -> str:
    seen: set[str] = set()
    return next(token for token in tokens if token and (token in seen or seen.add(token)))


def _string(metadata: Mapping[str, object], key: str) -> str | None:
    value = metadata.get(PREFIX + key)
    if value is not None and not isinstance(value, str):
        raise FormatError(f"{PREFIX}{key}: found {type(value).__name__}, expected a string")
    return value


def _strings(metadata: Mapping[str, object], key: str) -> Sequence[str]:
    value = metadata.get(PREFIX + key, [])
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise FormatError(f"{PREFIX}{key}: found {type(value).__name__}, expected an array of strings")
    return value


def _numbers(metadata: Mapping[str, object], key: str, count: int, kinds: str) -> np.ndarray | None:
    """One number per token, of a dtype kind in `kinds`, or None if the key is absent."""
    value = metadata.get(PREFIX + key)
    if value is None:
        return None
    if not isinstance(value, (list, tuple, np.ndarray)):
        raise FormatError(f"{PREFIX}{key}: found {type(value).__name__}, expected an array of numbers")
    array = np.asarray(value)
    if array.dtype.kind not in kinds or array.shape != (count,):
        raise FormatError(
            f"{PREFIX}{key}: found {array.shape} of {array.dtype}, expected one number for each of {count} tokens"
        )
    if array.dtype.kind == "f" and np.isnan(array).any():
        raise FormatError(f"{PREFIX}{key}: token {int(np.isnan(array).argmax())} has the score nan")
    return array


def _flag(metadata: Mapping[str, object], key: str) -> bool | None:
    value = metadata.get(PREFIX + key)
    if value is not None and not isinstance(value, (bool, np.bool_)):
        raise FormatError(f"{PREFIX}{key}: found {value!r}, expected true or false")
    return None if value is None else bool(value)


def _token_id(metadata: Mapping[str, object], name: str, count: int) -> int | None:
    key = f"{PREFIX}{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise FormatError(f"{key}: found {value!r}, expected a token id")
    if value in (-1, 0xFFFFFFFF):
        return None
    if not 0 <= value < count:
        raise FormatError(f"{key}: found {value}, but the vocabulary has {count} tokens")
    return int(value)


def check_text(text: object) -> str:
    """`text` if it is a string that UTF-8 can express. Raises RequestError that names the place otherwise."""
    if not isinstance(text, str):
        raise RequestError(f"text to tokenize: found {type(text).__name__}, expected str; decode bytes as UTF-8 first")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"text to tokenize: character {error.start} is the lone surrogate U+{ord(text[error.start]):04X}, "
            "which UTF-8 cannot express; replace it before the request"
        ) from None
    return text
