"""A loaded model that speaks text: the class users hold. `Engine.load` -> `generate`, `tokenize`, `logits`.

Joins the file reader, the plan, the recorded forward pass, the session and the text side; it computes nothing itself.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from tandem.errors import RequestError, SettingError, nearest
from tandem.generation import Answer, Generation
from tandem.gguf import read_gguf
from tandem.machine import machine
from tandem.models import model_for
from tandem.native import native
from tandem.ops.program import Pool
from tandem.requests import GenerationRequest, Prompt
from tandem.runtime.decode import DraftHistory, DraftSettings
from tandem.runtime.draft_model import ModelDraft
from tandem.runtime.draft_mtp import MtpDrafter
from tandem.runtime.plan import Plan, make_plan, summarise
from tandem.runtime.sampling import Sampling, resolve
from tandem.runtime.session import Session, common_prefix
from tandem.runtime.step import Runner
from tandem.runtime.weights import load_weights
from tandem.settings import setting
from tandem.text.template import ChatTemplate
from tandem.text.tokenizer import Tokenizer

KV_TYPES = ("f16", "q8_0", "f32")


@dataclass(frozen=True)
class LoadOptions:
    """How a model is to be run; ctx: None for the default. threads: of the CPU. kv: type of the cache."""

    ctx: int | None
    threads: int
    kv: str
    drafts: DraftSettings


class Engine:
    """One model on the CPU, with one session. Not for use by several threads at once. Close it, or use it in `with`."""

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: str = "cpu",
        ctx: int | None = None,
        threads: int | None = None,
        kv: str = "f16",
        drafts: DraftSettings = DraftSettings(),
        draft_model: "Engine | None" = None,
        on_plan: Callable[[Plan], None] | None = None,
    ) -> "Engine":
        """Opens a GGUF file, plans memory, then allocates it.

        ctx: tokens of context, None: 8192 or what fits. threads: None: the physical cores. kv: cache type, f16, q8_0 or
        f32. drafts: speculation, which never changes what is written. draft_model: a loaded smaller model with the same
        vocabulary that drafts too; it stays the caller's. on_plan sees the plan before anything is allocated. Raises
        FormatError, PlanError, SettingError.
        """
        _check_options(device, ctx, threads, kv)
        with ExitStack() as undo:
            file = undo.enter_context(read_gguf(path))
            options = LoadOptions(ctx, threads or setting("threads") or machine().cores, kv, drafts)
            engine = cls(file, options, draft_model, on_plan)
            undo.pop_all()
        return engine

    def __init__(
        self, file, options: LoadOptions, draft_model: "Engine | None", on_plan: Callable[[Plan], None] | None
    ):
        self.file, self.drafts = file, options.drafts
        self.summary = summarise(file)
        model = model_for(file.metadata)
        config = model.Config.from_gguf(file.metadata, file.tensors)
        self.tokenizer = Tokenizer.from_metadata(file.metadata)
        self.template = ChatTemplate.from_metadata(file.metadata, self.tokenizer)
        weights = load_weights(file, model, config)
        runner = Runner.trunk(native(), model, config, weights)
        wants_mtp = self.summary.draft_specs and "mtp" in options.drafts.sources and options.drafts.longest
        self.drafter = MtpDrafter(native(), model, config, weights) if wants_mtp else None
        self.plan = make_plan(
            self.summary,
            machine(),
            ctx=options.ctx,
            kv=options.kv,
            threads=options.threads,
            scratch_bytes=runner.scratch_bytes,
            draft_scratch_bytes=self.drafter.scratch_bytes if self.drafter else None,
        )
        if on_plan:
            on_plan(self.plan)
        self.pool = Pool(native(), options.threads)
        runner.allocate(self.pool)
        if self.drafter:
            self.drafter.allocate(self.pool)
        self._vocab_size = runner.output.width
        self.runner: Runner | None = runner
        self.history = DraftHistory()
        self.session = self.new_session()
        self.draft_model = self._draft_model(draft_model)

    def new_session(self) -> Session:
        """A timeline of its own over this model; its memory comes on top of the plan's."""
        plan = self.plan
        return Session(self._open_runner(), self.summary.specs, plan.ctx, plan.kv, plan.checkpoints, self.drafter)

    def _draft_model(self, small: "Engine | None") -> ModelDraft | None:
        if small is None:
            return None
        texts = [[engine.tokenizer.token_text(t) for t in range(engine.tokenizer.vocab_size)] for engine in (small, self)]
        ModelDraft.check_vocabularies(*texts)
        return ModelDraft(small.session)

    @property
    def ctx(self) -> int:
        """Tokens of context."""
        return self.plan.ctx

    @property
    def vocab_size(self) -> int:
        """Width of the logits; ids are below it."""
        return self._vocab_size

    def tokenize(self, text: str, parse_special: bool = False) -> list[int]:
        """Token ids of the text; control tokens written in it stay text unless parse_special."""
        return self.tokenizer.encode(text, parse_special=parse_special)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD."""
        return self.tokenizer.decode(ids)

    def apply_chat_template(self, messages: Sequence[dict], tools: Sequence[dict] | None = None, add_generation_prompt: bool = True, **extra) -> str:
        """The conversation as the model's own text. extra reaches the template (enable_thinking ...). Raises TemplateError."""
        return self.template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, **extra)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits after each token, float32 [T, vocab_size]; forgets the running conversation. Raises RequestError."""
        self._check_ids(ids)
        return self._open_session().all_logits(ids)

    def generate(
        self,
        prompt: str | Sequence[dict] | Sequence[int],
        *,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        tools: Sequence[dict] | None = None,
        template_options: dict | None = None,
        raw: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
        **overrides,
    ) -> Generation:
        """An iterator over pieces of text; `.stats` afterwards, `.cancel()` at any time.

        prompt: a user's message (str), a conversation (dicts with role and content), or token ids. raw: a str prompt is
        continued as it stands, without the chat template. overrides are fields of Sampling (temperature, top_k, ...);
        without `sampling` they apply to the defaults of the file or the model's profile.
        Raises RequestError, SettingError and TemplateError at once, before the first piece.
        """
        made = self._prompt(prompt, tools, template_options or {}, raw)
        if len(made.ids) >= self.ctx:
            raise RequestError(
                f"the prompt has {len(made.ids)} tokens, the context holds {self.ctx}: shorten it or load with a larger ctx"
            )
        if max_tokens is not None:
            overrides["max_tokens"] = max_tokens
        request = GenerationRequest(made, self.sampling(sampling, **overrides))
        return Generation(self.answer(request), on_progress)

    def answer(self, request: GenerationRequest, session: Session | None = None) -> Answer:
        """The answer to a request in token ids, to be driven step by step; session: None for the engine's own.

        Raises SettingError for token ids in the settings that the vocabulary lacks.
        """
        session = session or self._open_session()
        return Answer(session, self.tokenizer, request, self.history, self.drafts, self.draft_model)

    def sampling(self, base: Sampling | None = None, *, profile: str | None = None, thinking: bool = True, **overrides) -> Sampling:
        """Complete settings: overrides > base; without base, > profile > the file's > the model family's defaults.

        Raises SettingError for unknown names and bad values.
        """
        if base is None:
            return resolve(self.file.metadata, None, thinking, overrides, profile)
        return Sampling.from_dict({f.name: getattr(base, f.name) for f in fields(base)} | overrides)

    def mean_hidden(self, ids: Sequence[int]) -> np.ndarray:
        """Mean over the tokens of the hidden states after the last norm, float32 [hidden_size]; forgets the running
        conversation. Raises RequestError."""
        self._check_ids(ids)
        return self._open_session().mean_hidden(ids)

    def release_memory(self) -> None:
        """Gives back the pages of the engine's own conversation; the engine stays usable."""
        self._open_session().release()

    def close(self) -> None:
        """Frees threads, memory and the mapped file; safe to call twice."""
        if self.runner is not None:
            self.runner.close()
            if self.drafter:
                self.drafter.close()
            self.pool.close()
            self.runner = self.session = self.drafter = None
            self.template.close()
            self.file.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open_runner(self) -> Runner:
        if self.runner is None:
            raise RequestError("the engine is closed")
        return self.runner

    def _open_session(self) -> Session:
        if self.session is None:
            raise RequestError("the engine is closed")
        return self.session

    def _check_ids(self, ids: Iterable[int]) -> None:
        for at, token in enumerate(ids):
            if not 0 <= token < self.vocab_size:
                raise RequestError(f"token {token} at {at} is not in the vocabulary of {self.vocab_size}")

    def _prompt(self, prompt, tools, options: dict, raw: bool) -> Prompt:
        if not len(prompt):
            raise RequestError("the prompt is empty: give a message, a conversation or token ids")
        if not isinstance(prompt, str) and not isinstance(prompt[0], dict):
            self._check_ids(prompt)
            return Prompt([int(t) for t in prompt], (), continues=True)
        if isinstance(prompt, str) and raw:
            return Prompt(self.tokenizer.encode(prompt, add_special=True), (), continues=True)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        ids = self.template.encode(messages, tools, True, **options)
        # The next turn repeats the conversation up to here; what follows (the opened answer) may be rendered otherwise.
        closed = self.template.encode(messages, tools, False, **options)
        return Prompt(ids, (common_prefix(ids, closed),), continues=False)


def _check_options(device: str, ctx: int | None, threads: int | None, kv: str) -> None:
    if device != "cpu":
        raise SettingError(f"device {device!r} is not supported yet; valid: cpu")
    if kv not in KV_TYPES:
        raise SettingError(f"kv cache type {kv!r} is unknown{nearest(kv, KV_TYPES)}")
    for name, value, least in (("ctx", ctx, 1), ("threads", threads, 1)):
        if value is not None and (not isinstance(value, int) or value < least):
            raise SettingError(f"{name}={value!r}: a whole number of at least {least} is needed")
