"""Vocabularies for tests, as GGUF metadata: trained here in a second, or converted from the real Qwen3.6 vocabulary.

The references beside them are written without `tokenizers`: words by the `regex` package, merges one at a time.
"""

import io
import json
import unicodedata
from functools import lru_cache

import numpy as np
import regex
from awkward_text import FIXED, mixtures
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN35 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
# .pre name -> the cuts that follow each other, whether NFC comes first, whether a word that is a token needs no merges
ORIGINALS = {
    "gpt-2": ([GPT2], False, False),
    "smollm": ([r"\p{N}", GPT2], False, False),
    "llama-bpe": ([LLAMA3], False, True),
    "smaug-bpe": ([LLAMA3], False, False),
    "qwen2": ([QWEN2], True, False),
    "qwen35": ([QWEN35], True, False),
    "default": ([r"[\p{P}\$\+<=>\^~\|]+", GPT2.removesuffix(r"|\s+"), r"\p{N}+", r"[0-9][0-9][0-9]"], False, False),
}
USER_SYMBOLS = ["<table>", "\n", "\n\n", "\u2581\u2581\u2581"]
PROSE = [
    "It is a truth universally acknowledged, that the cat sat on the mat and the dog did not; 2024 was 365 days long.",
    "Die Straße führt über den Fluß, où l'été était déjà là, y mañana será otro día, и снова вечер.",
    "for (int i = 0; i < 10; ++i) { total += values[i] * 2; }\n\n    return total;\n",
    " ".join(f"{number} {number * 7} {number:05d}" for number in range(90, 400, 7)),
    "日本語 と 中文 と 한국어; สวัสดีชาวโลก नमस्ते दुनिया مرحبا بالعالم",
]


def letters() -> dict[int, str]:
    """How byte-level BPE spells each byte."""
    table, spare = {}, 256
    for byte in range(256):
        if chr(byte).isprintable() and not chr(byte).isspace() and byte != 0xAD:
            table[byte] = chr(byte)
        else:
            table[byte], spare = chr(spare), spare + 1
    return table


@lru_cache
def byte_level(pre: str, size: int = 900) -> dict[str, object]:
    """Metadata of a byte-level vocabulary trained here, with two control tokens and one that users may write."""
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, max_token_length=24
    )
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.train_from_iterator(PROSE * 4 + FIXED + mixtures(300, seed=11), trainer)
    model = json.loads(trained.to_str())["model"]
    # No merge makes the last one: only a splitting that looks up whole words gives it.
    tokens = [*sorted(model["vocab"], key=model["vocab"].get), "Ġzebra"]
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    special = [(name, CONTROL) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    special.append(("<think>", USER_DEFINED))
    types = [NORMAL] * len(tokens) + [kind for _, kind in special] + [UNUSED]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, *(name for name, _ in special), "[PAD7]"],
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": np.uint32(len(tokens)),
        "tokenizer.ggml.eos_token_id": np.uint32(len(tokens) + 2),
        "tokenizer.ggml.add_bos_token": False,
    }


def reference_ids(metadata: dict[str, object], text: str) -> list[int]:
    """Ids by the definition of byte-level BPE, for text without tokens of the user-defined type."""
    cuts, nfc, whole_words = ORIGINALS[metadata["tokenizer.ggml.pre"]]
    pieces = [unicodedata.normalize("NFC", text) if nfc else text]
    for cut in cuts:
        pieces = [part for piece in pieces for part in _isolated(cut, piece)]
    ids, ranks, spelling = _tables(metadata)
    out: list[int] = []
    for piece in pieces:
        word = "".join(spelling[byte] for byte in piece.encode())
        out.extend([ids[word]] if whole_words and word in ids else (ids[part] for part in _merged(word, ranks)))
    return out


_TABLES: dict[int, tuple] = {}


def _tables(metadata: dict[str, object]) -> tuple[dict[str, int], dict[tuple[str, ...], int], dict[int, str]]:
    if id(metadata) not in _TABLES:
        types = metadata["tokenizer.ggml.token_type"]
        ids = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"]) if types[index] == NORMAL}
        ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}
        _TABLES[id(metadata)] = (ids, ranks, letters())
    return _TABLES[id(metadata)]


def _isolated(pattern: str, text: str) -> list[str]:
    pieces, end = [], 0
    for match in regex.finditer(pattern, text):
        pieces += [text[end : match.start()], match[0]]
        end = match.end()
    return [piece for piece in [*pieces, text[end:]] if piece]


def _merged(word: str, ranks: dict[tuple[str, ...], int]) -> list[str]:
    parts = list(word)
    while len(parts) > 1:
        best = min(range(len(parts) - 1), key=lambda i: ranks.get((parts[i], parts[i + 1]), 1 << 60))
        if (parts[best], parts[best + 1]) not in ranks:
            break
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts


def sentencepiece_model(space_prefix: bool, collapse_spaces: bool, bytes_for_unknown: bool = True):
    """A BPE model trained by the `sentencepiece` package, without normalization.

    Only models without a space prefix get symbols that users may write, as in Gemma: after such a symbol the originals
    disagree (the library adds no prefix, the Llama tokenizers do).
    """
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(PROSE * 4 + [text for text in FIXED if text.strip()]),
        model_writer=model,
        model_type="bpe",
        vocab_size=700,
        character_coverage=0.98,
        byte_fallback=bytes_for_unknown,
        normalization_rule_name="identity",
        add_dummy_prefix=space_prefix,
        remove_extra_whitespaces=collapse_spaces,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=[] if space_prefix else USER_SYMBOLS,
        control_symbols=["<start_of_turn>", "<end_of_turn>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_metadata(processor, space_prefix: bool, collapse_spaces: bool) -> dict[str, object]:
    """The GGUF metadata that a converter writes for that model."""
    count = processor.vocab_size()
    kinds = [(processor.is_unknown, UNKNOWN), (processor.is_control, CONTROL), (processor.is_byte, BYTE)]
    types = [next((kind for test, kind in kinds if test(index)), NORMAL) for index in range(count)]
    tokens = [processor.id_to_piece(index) for index in range(count)]
    for name in [] if space_prefix else USER_SYMBOLS:
        types[tokens.index(name)] = USER_DEFINED
        # Converters write these as text looks, unlike all other tokens.
        tokens[tokens.index(name)] = name.replace("\u2581", " ")
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array([processor.get_score(index) for index in range(count)], np.float32),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.bos_token_id": np.uint32(processor.bos_id()),
        "tokenizer.ggml.eos_token_id": np.uint32(processor.eos_id()),
        "tokenizer.ggml.unknown_token_id": np.uint32(processor.unk_id()),
        "tokenizer.ggml.add_space_prefix": space_prefix,
        "tokenizer.ggml.remove_extra_whitespaces": collapse_spaces,
    }


def qwen_metadata(ranks: dict[bytes, int], special: dict[str, int], vocab_size: int) -> dict[str, object]:
    """GGUF metadata from a tiktoken vocabulary: merges are what each token was made of.

    Some tokens cannot be made by merges: tiktoken gives them to a whole word that equals them, the original does not.
    """
    spelling = letters()
    spell = lambda data: "".join(spelling[byte] for byte in data)  # noqa: E731
    tokens, types, merges = [f"[PAD{index}]" for index in range(vocab_size)], [UNUSED] * vocab_size, []
    for data, index in sorted(ranks.items(), key=lambda item: item[1]):
        tokens[index], types[index] = spell(data), NORMAL
        parts = _parts_below(data, ranks, index)
        if len(parts) == 2:
            merges.append(" ".join(map(spell, parts)))
    for name, index in special.items():
        tokens[index], types[index] = name, CONTROL if name.startswith("<|") else USER_DEFINED
    return {
        "general.architecture": "qwen35",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": np.uint32(special["<|im_end|>"]),
        "tokenizer.ggml.padding_token_id": np.uint32(special["<|endoftext|>"]),
        "tokenizer.ggml.add_bos_token": False,
    }


def _parts_below(data: bytes, ranks: dict[bytes, int], limit: int) -> list[bytes]:
    """What the merges with ranks below `limit` leave of `data`."""
    parts = [data[index : index + 1] for index in range(len(data))]
    while len(parts) > 1:
        pairs = [ranks.get(parts[i] + parts[i + 1], limit) for i in range(len(parts) - 1)]
        best = min(range(len(pairs)), key=pairs.__getitem__)
        if pairs[best] >= limit:
            break
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts
