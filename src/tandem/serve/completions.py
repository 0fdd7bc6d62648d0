"""`/v1/completions`: prompts as text or tokens, continued as they stand."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.requests import Piece
from tandem.serve.answer import Ended, Progress, Whole, Written, extension, new_id, timings
from tandem.serve.ask import Ask, TextForm, sampling_of
from tandem.serve.bodies import CompletionBody, encoded
from tandem.serve.chat import FINGERPRINT, usage_of
from tandem.serve.errors_api import ApiError, Shape, problem
from tandem.serve.model import ServedModel
from tandem.serve.prompt import Prepared
from tandem.text.tokenizer import Tokenizer
from tandem.text.tools.deltas import Content

MAX_PROMPTS = 32
DEFAULT_TOKENS = 16  # as the API says
_string = msgspec.json.Encoder().encode


def completion_asks(body: CompletionBody, model: ServedModel) -> list[Ask]:
    """One Ask for each prompt. Raises ApiError."""
    if body.suffix:
        raise problem(
            "not_supported", field="suffix", detail="give the model's own tokens for filling in as a prompt of tokens"
        )
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise problem("not_supported", field="best_of", detail="it must equal n")
    logprobs = None if body.logprobs is None or body.logprobs is False else int(body.logprobs)
    if body.echo and logprobs is not None:
        raise problem(
            "not_supported", field="logprobs", detail="with echo there are no log-probabilities of the prompt"
        )
    forms = [name for name in ("json_schema", "regex", "grammar") if getattr(body, name) is not None]
    if len(forms) > 1:
        raise problem("two_formats", forms[1], first=forms[0], second=forms[1])
    form = TextForm(body.json_schema, body.regex, body.grammar)
    sampling = sampling_of(body, body.max_tokens or DEFAULT_TOKENS)
    prompts = token_lists(body.prompt, model.tokenizer, "prompt", MAX_PROMPTS, bool(body.parse_special))
    return [Ask(ids=ids, sampling=sampling, form=form, logprobs=logprobs, prompt_field="prompt") for ids in prompts]


def token_lists(
    given: str | Sequence[Any], tokenizer: Tokenizer, field: str, most: int, parse_special: bool = False
) -> list[list[int]]:
    """A text, a list of texts, a list of tokens or a list of such lists as lists of tokens. Raises ApiError."""
    if isinstance(given, str):
        return [tokenizer.encode(given, parse_special=parse_special, add_special=True)]
    if not given:
        raise problem("empty_input", field=field)
    if all(isinstance(entry, int) for entry in given):
        return [checked_ids(given, tokenizer, field)]
    if len(given) > most:
        raise problem("batch", field=field, found=len(given), most=most)
    made = []
    for at, entry in enumerate(given):
        if isinstance(entry, str):
            made.append(tokenizer.encode(entry, parse_special=parse_special, add_special=True))
        elif isinstance(entry, list):
            made.append(checked_ids(entry, tokenizer, f"{field}[{at}]"))
        else:
            raise problem("field", field=f"{field}[{at}]", detail="texts and tokens are mixed")
    return made


def checked_ids(ids: Sequence[int], tokenizer: Tokenizer, field: str) -> list[int]:
    """Raises ApiError for tokens that the vocabulary lacks."""
    for token in ids:
        if not 0 <= token < tokenizer.vocab_size:
            raise problem("logit_tokens", field=field, found=token, size=tokenizer.vocab_size)
    return list(ids)


class CompletionShaper:
    """Chunks of one request with one prompt."""

    shape: Shape = "openai"

    def __init__(self, prepared: Prepared, choices: int, include_usage: bool, echo: bool):
        self._prepared, self._choices, self._usage, self._echo = prepared, choices, include_usage, echo
        head = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": prepared.model.name,
            "system_fingerprint": FINGERPRINT,
        }
        self._head = b"data: " + encoded(head)[:-1] + b","
        self._offsets = [0] * choices
        self._ends: list[Ended] = []

    def begin(self, progress: Progress | None) -> bytes:
        """The prompt, if it is to be repeated; else an empty text."""
        text = self._prepared.model.tokenizer.decode(self._prepared.ids) if self._echo else ""
        return b"".join(self._chunk(choice, text) for choice in range(self._choices))

    def written(self, update: Written) -> bytes:
        """A chunk of text."""
        text = "".join(delta.text for delta in update.deltas if isinstance(delta, Content))
        logprobs = None
        if update.tokens:
            logprobs = logprobs_of(update.tokens, self._prepared.model.tokenizer, self._offsets[update.choice])
            self._offsets[update.choice] += sum(map(len, logprobs["tokens"]))
        return self._chunk(update.choice, text, logprobs) if text or logprobs else b""

    def ended(self, update: Ended) -> bytes:
        """The one chunk with a finish reason."""
        self._ends.append(update)
        more = {"timings": timings(update.stats)} | ({"tandem": found} if (found := extension(update)) else {})
        choice = {"index": update.choice, "text": "", "logprobs": None, "finish_reason": update.finish}
        return self._head + b'"choices":[' + encoded(choice) + b"]," + encoded(more)[1:] + b"\n\n"

    def close(self) -> bytes:
        """Usage, if asked for, and the end."""
        usage = self._head + b'"choices":[],"usage":' + encoded(usage_of(self._ends)) + b"}\n\n" if self._usage else b""
        return usage + b"data: [DONE]\n\n"

    def idle(self) -> bytes:
        """A chunk with an empty text."""
        return self._chunk(0, "")

    def fail(self, error: ApiError) -> bytes:
        """The error object; no finish reason, no end mark."""
        return b"data: " + error.encoded("openai") + b"\n\n"

    def _chunk(self, choice: int, text: str, logprobs: dict[str, Any] | None = None) -> bytes:
        tail = b"null" if logprobs is None else encoded(logprobs)
        body = b'"choices":[{"index":%d,"text":' % choice + _string(text) + b',"logprobs":' + tail
        return self._head + body + b',"finish_reason":null}]}\n\n'


def text_completion(prepared: Sequence[Prepared], wholes: Sequence[Sequence[Whole]], echo: bool) -> dict[str, Any]:
    """The body of a response that is not streamed: choices of all prompts, in order."""
    choices, usages = [], []
    for one, answers in zip(prepared, wholes, strict=True):
        prefix = one.model.tokenizer.decode(one.ids) if echo else ""
        usages.append(usage_of([whole.ended for whole in answers]))
        for whole in answers:
            asked = one.request.logprobs is not None
            logprobs = logprobs_of(whole.tokens, one.model.tokenizer, 0) if asked else None
            choices.append(
                {
                    "index": len(choices),
                    "text": prefix + whole.content,
                    "logprobs": logprobs,
                    "finish_reason": whole.ended.finish,
                }
            )
    usage = {key: sum(each[key] for each in usages) for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
    for group in ("prompt_tokens_details", "completion_tokens_details"):
        usage[group] = {key: sum(each[group][key] for each in usages) for key in usages[0][group]}
    first = wholes[0][0].ended
    body = {
        "id": new_id("cmpl-"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": prepared[0].model.name,
        "system_fingerprint": FINGERPRINT,
        "choices": choices,
        "usage": usage,
        "timings": timings(first.stats),
    }
    return body | ({"tandem": found} if (found := extension(first)) else {})


def logprobs_of(pieces: Sequence[Piece], tokenizer: Tokenizer, offset: int) -> dict[str, Any]:
    """Log-probabilities in the older shape: parallel lists."""
    texts = [_token_text(tokenizer, piece.token) for piece in pieces]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    tops = [{_token_text(tokenizer, top.token): top.logprob for top in piece.top} for piece in pieces]
    return {
        "tokens": texts,
        "token_logprobs": [piece.logprob.logprob for piece in pieces],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _token_text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_bytes(token, keep_control=True).decode("utf-8", "replace")
