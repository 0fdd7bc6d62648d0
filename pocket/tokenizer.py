"""The pocket model's vocabulary: byte-level BPE cut like `qwen35`, trained on the corpus.

In: documents. Out: `tokenizer.json`, and the `tokenizer.ggml.*` metadata of it. Control tokens are those that only the
chat template writes; thinking and tool marks are user-defined tokens, since the model itself writes them as text.
"""

import argparse
import json
import lzma
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

# Definition of the `qwen35` pre-tokenizer: the same cut as in tandem.text.pretokenizers.
CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
USER_DEFINED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
NORMAL_TYPE, CONTROL_TYPE, USER_DEFINED_TYPE = 1, 3, 4


def read_documents(path: Path):
    """The documents of a corpus part, as dicts."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def new_tokenizer() -> Tokenizer:
    """Without vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(CUT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train(texts, vocab_size: int) -> Tokenizer:
    """A tokenizer of exactly vocab_size tokens: bytes, merges, then the special tokens."""
    special = (*CONTROL, *USER_DEFINED)
    tokenizer = new_tokenizer()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - len(special), initial_alphabet=alphabet, show_progress=False,
                                  max_token_length=16)  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(special))
    found = tokenizer.get_vocab_size()
    if found != vocab_size:
        raise ValueError(f"the texts gave {found} tokens, {vocab_size} were asked for")
    return tokenizer


def metadata(tokenizer: Tokenizer) -> dict[str, object]:
    """The keys `tokenizer.ggml.*` of a GGUF file."""
    model = json.loads(tokenizer.to_str())["model"]
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.get)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    kinds = dict.fromkeys(CONTROL, CONTROL_TYPE) | dict.fromkeys(USER_DEFINED, USER_DEFINED_TYPE)
    keys = {"model": "gpt2", "pre": "qwen35", "tokens": tokens, "merges": merges,
            "token_type": [kinds.get(token, NORMAL_TYPE) for token in tokens],
            "eos_token_id": vocab["<|im_end|>"], "padding_token_id": vocab["<|endoftext|>"],
            "add_bos_token": False}  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=10240)
    parser.add_argument("--every", type=int, default=12, help="use one document in so many")
    args = parser.parse_args()
    texts = (d["text"] for i, d in enumerate(read_documents(args.corpus)) if i % args.every == 0)
    train(texts, args.vocab_size).save(str(args.out))


if __name__ == "__main__":
    main()
