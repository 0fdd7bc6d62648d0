"""How text is cut into words before byte-level BPE merges run, one entry per `tokenizer.ggml.pre` name.

In: the name from the file. Out: a `Splitting` that builds the normalizer and the pre-tokenizer of the original
tokenizer. The patterns are part of each vocabulary's definition: a wrong one yields valid ids that the model was never
trained on.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from tandem.errors import FormatError, nearest

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
QWEN2 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
# Combining marks join letters here, so that Thai or Devanagari words stay whole.
QWEN35 = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
)


@dataclass(frozen=True)
class Splitting:
    """One pre-tokenizer: `build()` makes it; `nfc`: text is normalized first; `ignore_merges`: a word that is a token
    is that token; `add_bos`: default when the file does not say."""

    build: Callable[[], pre_tokenizers.PreTokenizer]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def normalizer(self) -> normalizers.Normalizer | None:
        """The Unicode normalization of the original tokenizer, or None."""
        return normalizers.NFC() if self.nfc else None


def _bytes(use_regex: bool = False) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _pattern(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    return lambda: pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), _bytes()])


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _bytes(use_regex=True)])


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return _bytes(use_regex=True)


def _default() -> pre_tokenizers.PreTokenizer:
    """The cut that GGUF defines for `default`: punctuation runs, then the GPT-2 words, then digits in threes."""
    cuts = [r"[\p{P}\$\+<=>\^~\|]+", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"]
    cuts += [r"\p{N}+", r"[0-9][0-9][0-9]"]
    return pre_tokenizers.Sequence([*(pre_tokenizers.Split(Regex(cut), "isolated") for cut in cuts), _bytes()])


_LLAMA3 = Splitting(_pattern(LLAMA3), ignore_merges=True, add_bos=True)

SPLITTINGS: dict[str, Splitting] = {
    "default": Splitting(_default),
    "gpt-2": Splitting(_gpt2),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": Splitting(_pattern(QWEN2), nfc=True),
    "qwen35": Splitting(_pattern(QWEN35), nfc=True),
    "smaug-bpe": Splitting(_pattern(LLAMA3)),
    "smollm": Splitting(_smollm),
}


def splitting_named(name: str | None) -> Splitting:
    """The splitting called `name` in a GGUF file. Raises FormatError for None and for names we do not know."""
    if name is None:
        raise FormatError(
            "tokenizer.ggml.pre is missing, so how this vocabulary cuts words is unknown; convert the model again "
            f"with a current converter; valid: {', '.join(sorted(SPLITTINGS))}"
        )
    if name not in SPLITTINGS:
        raise FormatError(f"tokenizer.ggml.pre: unknown pre-tokenizer {name!r}{nearest(name, SPLITTINGS)}")
    return SPLITTINGS[name]
