"""One model as the server offers it: names, vocabulary, template, context, settings, and the worker that runs it.

In: a GGUF file's metadata and a worker. Out: `ServedModel`, and `Models`, which finds one by name. Nothing here waits
for the engine or wakes it: the vocabulary is the server's own copy.
"""

import asyncio
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from tandem.gguf import read_gguf
from tandem.runtime.sampling import Sampling, resolve
from tandem.serve.divergence import RecentPrompts
from tandem.serve.errors_api import problem
from tandem.serve.worker import Worker
from tandem.text.template import ChatTemplate
from tandem.text.tokenizer import Tokenizer
from tandem.text.tools.formats import Capabilities, capabilities, format_of

Result = TypeVar("Result")
MAX_NAME_CHARS = 200
MIN_REMEMBERED_CHARS = 64


@dataclass(frozen=True)
class Offer:
    """How a model is offered. name: its id; aliases: other names for it; ctx: tokens of context, None: as the engine
    has it once it is loaded; slots: answers at once; profile: of sampling; sampling: defaults over the profile's.

    thinking: whether the model thinks when a request does not say, None: as its template does; hoist_system: late
    system messages are moved to the front, None: where the template refuses them elsewhere."""

    name: str
    aliases: tuple[str, ...] = ()
    ctx: int | None = None
    slots: int = 1
    profile: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=lambda: {"loop_guard": True})
    thinking: bool | None = None
    hoist_system: bool | None = None


class RememberedTokens:
    """A tokenizer that knows long texts again: a conversation that goes on is sent whole each time.

    Keeps at most `most_chars` characters of texts, those used last.
    """

    def __init__(self, tokenizer: Tokenizer, most_chars: int = 16 << 20):
        self._tokenizer, self._most, self._chars = tokenizer, most_chars, 0
        self._kept: OrderedDict[str, array] = OrderedDict()
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, parse_special: bool = False, add_special: bool = False) -> Sequence[int]:
        """As Tokenizer.encode."""
        if len(text) < MIN_REMEMBERED_CHARS or parse_special or add_special:
            return self._tokenizer.encode(text, parse_special=parse_special, add_special=add_special)
        with self._lock:
            known = self._kept.get(text)
            if known is not None:
                self._kept.move_to_end(text)
                return known
        ids = array("i", self._tokenizer.encode(text))
        with self._lock:
            if text not in self._kept:
                self._kept[text] = ids
                self._chars += len(text)
            while self._chars > self._most:
                self._chars -= len(self._kept.popitem(last=False)[0])
        return ids


class ServedModel:
    """A model that requests can name. Its template runs in a process of its own, preparation in threads of its own."""

    def __init__(self, offer: Offer, worker: Worker, metadata: Mapping[str, Any], tokenizer: Tokenizer | None = None):
        """metadata: of the model's file; tokenizer: None makes the file's."""
        self.offer, self.worker, self.metadata = offer, worker, metadata
        self.tokenizer = tokenizer or Tokenizer.from_metadata(metadata)
        self.template = ChatTemplate.from_metadata(metadata, RememberedTokens(self.tokenizer))
        self.format = format_of(self.template.tool_source or self.template.source, metadata)
        self.created = int(time.time())
        self.recent = RecentPrompts(self.tokenizer)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tandem-prompt")

    @classmethod
    def from_file(cls, path: str | Path, offer: Offer, worker: Worker) -> "ServedModel":
        """The model in a GGUF file, of which only the description is read. Raises FormatError."""
        with read_gguf(path) as file:
            return cls(offer, worker, dict(file.metadata))

    @property
    def name(self) -> str:
        """The id by which the model is listed."""
        return self.offer.name

    @property
    def ctx(self) -> int | None:
        """Tokens of context, None while that is not known."""
        batch = self.worker.batch
        return batch.ctx if batch is not None else self.offer.ctx

    @property
    def trained_ctx(self) -> int | None:
        """Tokens of context that the model was made for, None if its file does not say."""
        return self.metadata.get(f"{self.metadata.get('general.architecture')}.context_length")

    @cached_property
    def capabilities(self) -> Capabilities:
        """What the template can do; the first use renders short conversations."""
        return capabilities(self.template)

    def sampling(self, thinking: bool, overrides: Mapping[str, Any]) -> Sampling:
        """Complete settings of one answer. Raises SettingError."""
        return resolve(self.metadata, None, thinking, {**self.offer.sampling, **overrides}, self.offer.profile)

    async def threaded(self, function: Callable[..., Result], *args: object) -> Result:
        """What the function returns, run beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def close(self) -> None:
        """Ends the template's process and the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.template.close()


class Models:
    """The models of one server by name and alias. The first one answers requests that name none."""

    def __init__(self, models: Sequence[ServedModel]):
        assert models, "a server has at least one model"
        self.all = list(models)
        self._by_name: dict[str, ServedModel] = {}
        for model in models:
            for name in (model.name, *model.offer.aliases):
                assert name not in self._by_name, f"two models are named {name}"
                self._by_name[name] = model

    def find(self, name: str | None) -> ServedModel:
        """The model of that name. Names are looked up in a table and nowhere else. Raises ApiError (404)."""
        if not name:
            return self.all[0]
        model = self._by_name.get(name)
        if model is None:
            raise problem("model", "model", found=name[:MAX_NAME_CHARS], known=", ".join(self._by_name))
        return model

    @property
    def names(self) -> list[str]:
        """All names, aliases included."""
        return list(self._by_name)
