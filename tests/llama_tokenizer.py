"""llama.cpp's own tokenizer as an oracle: a child process that loads only the vocabulary of a GGUF file.

In: the path, then texts. Out: ids. It needs the `xllamacpp` wheel; `LlamaTokenizer` raises ImportError without it.
"""

import ctypes
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

VOCAB_ONLY_AT = 72  # offset of `vocab_only` in llama_model_params: two pointers, five ints, five pointers before it


class LlamaTokenizer:
    """`encode(text)` by llama.cpp for one GGUF file."""

    def __init__(self, path: Path) -> None:
        if importlib.util.find_spec("xllamacpp") is None:
            raise ImportError("xllamacpp is not installed")
        self._child = subprocess.Popen(
            [sys.executable, __file__, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        ready = self._child.stdout.readline()
        if ready != b"ready\n":
            self.close()
            raise RuntimeError(f"llama.cpp does not load the vocabulary of {path}: {ready!r}")

    def encode(self, text: str, parse_special: bool = False, add_special: bool = False) -> list[int]:
        request = {"text": text, "parse_special": parse_special, "add_special": add_special}
        self._child.stdin.write(json.dumps(request).encode() + b"\n")
        self._child.stdin.flush()
        return json.loads(self._child.stdout.readline())

    def close(self) -> None:
        self._child.kill()
        self._child.wait()
        self._child.stdin.close()
        self._child.stdout.close()


class _Opaque(ctypes.Structure):
    """Longer than the settings of any release, so it is passed in memory; the callee reads its own length."""

    _fields_ = [("bytes", ctypes.c_uint8 * 512)]


def _load(path: str) -> tuple[ctypes.CDLL, int]:
    folder = Path(importlib.util.find_spec("xllamacpp").origin).parent
    library = ctypes.CDLL(str(next(folder.glob("xllamacpp*.so"))))
    library.llama_backend_init()
    library.llama_model_default_params.restype = _Opaque
    settings = library.llama_model_default_params()
    settings.bytes[VOCAB_ONLY_AT] = 1
    library.llama_model_load_from_file.restype = library.llama_model_get_vocab.restype = ctypes.c_void_p
    library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _Opaque]
    library.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
    model = library.llama_model_load_from_file(path.encode(), settings)
    if not model:
        raise RuntimeError(f"cannot load {path}")
    return library, library.llama_model_get_vocab(model)


def main(path: str) -> None:
    library, vocab = _load(path)
    tokenize = library.llama_tokenize
    tokenize.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32]
    tokenize.argtypes += [ctypes.c_bool, ctypes.c_bool]
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        data = request["text"].encode()
        ids = (ctypes.c_int32 * (len(data) + 8))()
        count = tokenize(vocab, data, len(data), ids, len(ids), request["add_special"], request["parse_special"])
        print(json.dumps(list(ids[:count])), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
