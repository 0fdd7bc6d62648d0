"""One engine in one process: the worker behind `peers.py` and the agreement test.

In: JSON commands, one a line, on standard input. Out: one JSON answer a line on standard output; whatever the libraries
print goes to standard error. llama.cpp and ik_llama.cpp are driven through their C interfaces by ctypes, because their
Python classes neither give the logits of every position nor let the caller time a forward pass alone.
"""

import ctypes
import importlib
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import numpy as np

BATCH_TOKENS = 2048        # most tokens handed over in one call; both peers split them into 512 by themselves


class Engine(Protocol):
    """What every engine below offers; token ids are int32, logits float32."""

    version: str
    features: str
    vocab_size: int

    def clear(self) -> None: ...
    def feed(self, ids: np.ndarray) -> None: ...
    def logits(self, ids: np.ndarray, batch_tokens: int) -> np.ndarray: ...


def random_ids(count: int, vocab_size: int, seed: int) -> np.ndarray:
    """The same `count` token ids for every engine, int32, spread over the vocabulary."""
    return np.random.default_rng(seed).integers(0, vocab_size, count, dtype=np.int32)


class _Batch(ctypes.Structure):
    """`llama_batch`; the three last fields exist in ik_llama.cpp only, and llama.cpp does not look that far."""

    _fields_ = [("n_tokens", ctypes.c_int32), ("token", ctypes.c_void_p), ("embd", ctypes.c_void_p),
                ("pos", ctypes.c_void_p), ("n_seq_id", ctypes.c_void_p), ("seq_id", ctypes.c_void_p),
                ("logits", ctypes.c_void_p), ("all_pos_0", ctypes.c_int32), ("all_pos_1", ctypes.c_int32),
                ("all_seq_id", ctypes.c_int32)]


class BatchArrays:
    """The arrays that a `_Batch` points to, for up to `capacity` tokens of sequence 0."""

    def __init__(self, capacity: int) -> None:
        self.token, self.pos = np.zeros(capacity, np.int32), np.zeros(capacity, np.int32)
        self.n_seq_id, self.wanted = np.ones(capacity, np.int32), np.zeros(capacity, np.int8)
        self._seq = np.zeros(1, np.int32)
        self.seq_id = np.full(capacity, self._seq.ctypes.data, np.uintp)

    def fill(self, ids: np.ndarray, first_position: int, every_logit: bool) -> _Batch:
        n = len(ids)
        self.token[:n] = ids
        self.pos[:n] = np.arange(first_position, first_position + n)
        self.wanted[:n] = every_logit
        self.wanted[n - 1] = 1
        return _Batch(n, self.token.ctypes.data, None, self.pos.ctypes.data, self.n_seq_id.ctypes.data,
                      self.seq_id.ctypes.data, self.wanted.ctypes.data, 0, 0, 0)


class _LlamaLibrary:
    """What llama.cpp and ik_llama.cpp have in common; a subclass loads the library and makes model and context."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library, self._position = library, 0
        self._arrays = BatchArrays(BATCH_TOKENS)
        library.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)
        library.llama_get_logits_ith.argtypes = [ctypes.c_void_p, ctypes.c_int32]
        library.llama_decode.argtypes = [ctypes.c_void_p, _Batch]
        library.llama_print_system_info.restype = ctypes.c_char_p
        library.llama_vocab_n_tokens.argtypes = library.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
        library.llama_model_get_vocab.restype = ctypes.c_void_p
        self.features = _switched_on(library.llama_print_system_info().decode())

    def _adopt(self, model: int, context: int) -> None:
        self._model, self._context = model, context
        self.vocab_size = self._library.llama_vocab_n_tokens(self._library.llama_model_get_vocab(model))

    def _decode(self, ids: np.ndarray, every_logit: bool) -> None:
        batch = self._arrays.fill(ids, self._position, every_logit)
        status = self._library.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode of {len(ids)} tokens at position {self._position} returned {status}")
        self._position += len(ids)

    def _row(self, index: int) -> np.ndarray:
        row = self._library.llama_get_logits_ith(self._context, index)      # waits for the computation
        if not row:
            raise RuntimeError(f"no logits for token {index} of the last batch")
        return np.ctypeslib.as_array(row, (self.vocab_size,))

    def feed(self, ids: np.ndarray) -> None:
        """Continues the sequence by `ids`; only the last one's logits are computed."""
        for start in range(0, len(ids), BATCH_TOKENS):
            part = ids[start:start + BATCH_TOKENS]
            self._decode(part, every_logit=False)
        self._row(len(part) - 1)

    def logits(self, ids: np.ndarray, batch_tokens: int) -> np.ndarray:
        """Logits after each of `ids` from an empty context, float32 [len(ids), vocab_size]; fed in batches."""
        self.clear()
        out = np.empty((len(ids), self.vocab_size), np.float32)
        for start in range(0, len(ids), batch_tokens):
            part = ids[start:start + batch_tokens]
            self._decode(part, every_logit=True)
            for i in range(len(part)):
                out[start + i] = self._row(i)
        return out


def _switched_on(system_info: str) -> str:
    pairs = (item.split("=") for item in system_info.replace("CPU :", "").split("|") if "=" in item)
    return " ".join(name.strip() for name, value in pairs if value.strip() == "1")


class LlamaCpp(_LlamaLibrary):
    """llama.cpp out of the `xllamacpp` wheel, whose extension module exports the whole C interface."""

    def __init__(self, path: str, context_tokens: int, threads: int) -> None:
        package = importlib.import_module("xllamacpp")
        folder = Path(package.__file__).parent
        library = ctypes.CDLL(str(next(folder.glob("xllamacpp*.so"))))
        super().__init__(library)
        self.version = version("xllamacpp")
        log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
        self._log = log(lambda level, text, _: sys.stderr.write(text.decode(errors="replace")) if level == 4 else None)
        library.llama_log_set(self._log, None)
        library.llama_backend_init()
        library.llama_model_load_from_file.restype = library.llama_init_from_model.restype = ctypes.c_void_p
        library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _Opaque]
        library.llama_init_from_model.argtypes = [ctypes.c_void_p, _Opaque]
        model = library.llama_model_load_from_file(os.fsencode(path), _defaults(library.llama_model_default_params))
        if not model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        context = library.llama_init_from_model(model, _context_settings(library, context_tokens, threads))
        if not context:
            raise RuntimeError(f"llama.cpp makes no context of {context_tokens} tokens for {path}")
        self._adopt(model, context)
        library.llama_tokenize.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, ctypes.c_void_p,
                                           ctypes.c_int32, ctypes.c_bool, ctypes.c_bool]
        library.llama_get_memory.restype = ctypes.c_void_p
        library.llama_get_memory.argtypes = [ctypes.c_void_p]
        library.llama_memory_clear.argtypes = [ctypes.c_void_p, ctypes.c_bool]

    def tokenize(self, text: str) -> list[int]:
        """Token ids of plain text, with the tokens that the file wants around it."""
        data = text.encode()
        ids = np.empty(len(data) + 2, np.int32)
        vocabulary = self._library.llama_model_get_vocab(self._model)
        count = self._library.llama_tokenize(vocabulary, data, len(data), ids.ctypes.data, len(ids), True, False)
        return ids[:count].tolist()

    def clear(self) -> None:
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), False)
        self._position = 0


class _Opaque(ctypes.Structure):
    """A settings struct whose fields change from release to release: longer than any, so that it is passed and returned
    in memory; the callee reads its own length."""

    _fields_ = [("words", ctypes.c_int32 * 128)]


def _defaults(function: ctypes._CFuncPtr) -> _Opaque:
    function.restype = _Opaque
    return function()


def _context_settings(library: ctypes.CDLL, context_tokens: int, threads: int) -> _Opaque:
    """Default settings with context, batch and threads set, found by their defaults so that a moved field shows."""
    settings = _defaults(library.llama_context_default_params)
    words = settings.words
    threads_at = [i for i in range(3, 16) if words[i] == words[i + 1] == 4]
    if list(words[:3]) != [512, 2048, 512] or len(threads_at) != 1:
        raise RuntimeError(f"unknown layout of llama_context_params, it starts with {list(words[:16])}; "
                           "find n_ctx, n_batch and n_threads in the llama.h of that release")
    words[0], words[1] = context_tokens, BATCH_TOKENS
    words[threads_at[0]] = words[threads_at[0] + 1] = threads
    return settings


class IkLlama(_LlamaLibrary):
    """ik_llama.cpp out of the `ik-llama-cpp-python` wheel, by the structures that the wheel declares."""

    def __init__(self, path: str, context_tokens: int, threads: int) -> None:
        api = importlib.import_module("ik_llama_cpp._ctypes_api")
        super().__init__(api._lib)
        self.version = version("ik-llama-cpp-python")
        api.llama_backend_init()
        model = api.llama_model_load_from_file(os.fsencode(path), api.llama_model_default_params())
        if not model:
            raise RuntimeError(f"ik_llama.cpp does not load {path}")
        settings = api.llama_context_default_params()
        settings.n_ctx, settings.n_batch = context_tokens, BATCH_TOKENS
        settings.n_threads = settings.n_threads_batch = threads
        context = api.llama_init_from_model(model, settings)
        if not context:
            raise RuntimeError(f"ik_llama.cpp makes no context of {context_tokens} tokens for {path}")
        self._adopt(model, context)
        self._library.llama_kv_cache_clear.argtypes = [ctypes.c_void_p]

    def clear(self) -> None:
        self._library.llama_kv_cache_clear(self._context)
        self._position = 0


def measure(engine: Engine, prefill_tokens: int, depth: int, decode_tokens: int) -> dict[str, float]:
    """Tokens/s of a prefill from empty (0 if no tokens), then of one-token steps after `depth` tokens."""
    prefill_tok_s = 0.0
    if prefill_tokens:
        engine.clear()
        prompt = random_ids(prefill_tokens, engine.vocab_size, seed=1)
        started = time.perf_counter()
        engine.feed(prompt)
        prefill_tok_s = prefill_tokens / (time.perf_counter() - started)
    engine.clear()
    if depth:
        engine.feed(random_ids(depth, engine.vocab_size, seed=2))
    steps = random_ids(decode_tokens, engine.vocab_size, seed=3)
    started = time.perf_counter()
    for i in range(decode_tokens):
        engine.feed(steps[i:i + 1])
    return {"prefill_tok_s": prefill_tok_s, "decode_tok_s": decode_tokens / (time.perf_counter() - started)}


class _TandemWorker:
    """tandem, through its own benchmark, so that what `tandem bench` prints is what is compared."""

    def __init__(self, path: str, context_tokens: int, threads: int) -> None:
        tandem = importlib.import_module("tandem")
        self._decode = importlib.import_module("tandem.bench.decode")
        self._engine = tandem.load(path, ctx=context_tokens, threads=threads)
        self.version, self.features = tandem.__version__, os.environ.get("TANDEM_ISA", "best of this CPU")

    def measure(self, prefill_tokens: int, depth: int, decode_tokens: int) -> dict[str, float]:
        return self._decode.measure(self._engine, prefill_tokens, depth, decode_tokens)

    def logits(self, ids: np.ndarray, batch_tokens: int) -> np.ndarray:
        """As the peers', but the engine chooses its own batches."""
        return self._engine.logits(ids.tolist())


ENGINES = {"tandem": _TandemWorker, "llama.cpp": LlamaCpp, "ik_llama.cpp": IkLlama}


def peak_rss_bytes() -> int:
    """Most physical memory this process has had, mapped file pages included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def answer(engine: object, command: dict[str, object]) -> dict[str, object]:
    if command["do"] == "measure":
        sizes = {name: int(command[name]) for name in ("prefill_tokens", "depth", "decode_tokens")}
        result = engine.measure(**sizes) if hasattr(engine, "measure") else measure(engine, **sizes)
        return {"prefill_tok_s": result["prefill_tok_s"], "decode_tok_s": result["decode_tok_s"],
                "peak_rss_bytes": peak_rss_bytes()}
    if command["do"] == "logits":
        np.save(str(command["out"]), engine.logits(np.load(str(command["ids"])), int(command["batch_tokens"])))
        return {}
    if command["do"] == "tokenize":
        return {"ids": engine.tokenize(str(command["text"]))}
    raise ValueError(f"unknown command {command['do']!r}, expected 'measure', 'logits' or 'tokenize'")


def main(kind: str, path: str, context_tokens: int, threads: int) -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)                          # the libraries print to standard output; the replies must stay clean

    def reply(message: dict[str, object]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    started = time.perf_counter()
    engine = ENGINES[kind](path, context_tokens, threads)
    reply({"load_s": time.perf_counter() - started, "version": engine.version, "features": engine.features})
    for line in sys.stdin:
        reply(answer(engine, json.loads(line)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
