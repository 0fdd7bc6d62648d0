"""Token ids to text, one token at a time: the bytes of each token come in, only whole characters go out."""

import codecs
from collections.abc import Callable


class IncrementalDecoder:
    """Turns ids into text as they arrive. The pieces of `push` and the last `flush` together equal `Tokenizer.decode`.

    Bytes that can no longer become a character are emitted as U+FFFD; bytes that still can are held back (at most 3).
    """

    def __init__(self, token_bytes: Callable[[int], bytes], strip_first_space: bool = False):
        """token_bytes: id -> bytes of the text it stands for; strip_first_space: drop one space at the very start."""
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_first_space = strip_first_space
        self._at_start = strip_first_space

    def push(self, token_id: int) -> str:
        """The text that became certain with this token, often a word, sometimes ''. Raises RequestError: unknown id."""
        return self.push_bytes(self._token_bytes(token_id))

    def push_bytes(self, data: bytes) -> str:
        """As `push`, for the bytes of any number of tokens."""
        return self._emit(data)

    def flush(self) -> str:
        """What was held back, as U+FFFD for an unfinished character. The decoder is then as new."""
        text = self._emit(b"", final=True)
        self._utf8.reset()
        self._at_start = self._strip_first_space
        return text

    def _emit(self, data: bytes, final: bool = False) -> str:
        text = self._utf8.decode(data, final)
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text
