"""`tandem bench routing MODEL`: how evenly tokens spread over the experts of each layer.

In: an engine and texts. Out: by layer, the MTP block included, what share of the activations the busiest quarter of the
experts gets and how many different experts a few consecutive tokens need, which is what placement of experts on a
graphics card and passes over several tokens live on. The passes are recorded a second time, with their routings kept.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import tandem
from tandem.bench.tasks import TASKS, encode
from tandem.engine import Engine
from tandem.errors import RequestError
from tandem.gguf import GGUFFile
from tandem.machine import machine
from tandem.models import model_for
from tandem.native import native
from tandem.ops.base import Routing, Weight
from tandem.ops.cpu import CpuOps
from tandem.ops.program import Buffer, Pool, Program
from tandem.ops.state_cpu import CpuState
from tandem.runtime.step import Part, Runner
from tandem.runtime.weights import load_weights
from tandem.show import table

WINDOWS = (1, 2, 3, 4, 5)  # consecutive tokens: what a round with 0 to 4 drafts runs
_CHUNK = 512


class KeepsRouting(CpuOps):
    """CPU ops whose routings stay readable after a run: `ids` by the name of the router."""

    def __init__(self, program: Program):
        super().__init__(program)
        self.ids: dict[str, Buffer] = {}
        self.experts_of: dict[str, int] = {}

    def route(self, x: Buffer, router: Weight, k: int) -> Routing:
        routing = super().route(x, router, k)
        routing.ids.keep = True
        self.ids[router.name], self.experts_of[router.name] = routing.ids, router.shape[0]
        return routing


class RoutedPass:
    """A recorded pass with one sequence that tells which experts each token chose."""

    def __init__(self, record, specs: Sequence, ctx: int):
        self.ops: KeepsRouting | None = None

        def keeping(ops: CpuOps) -> Buffer:
            self.ops = KeepsRouting(ops.program.program)
            return record(self.ops)

        self.runner = Runner(native(), keeping, max_rows=_CHUNK)
        self.state = CpuState(specs, ctx, "f16", _CHUNK)

    def ids(self, tokens: Sequence[int], start_pos: int, hidden: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """The experts of each of these next tokens, int32 [T, k] by the name of the router."""
        self.runner.run([Part(self.state, tokens, start_pos)], hidden)
        return {name: self.runner.program.rows(ids, len(tokens)).copy() for name, ids in self.ops.ids.items()}


class RoutedModel:
    """An open model file, to be asked where tokens go: texts of at most ctx. Use it in `with`, while the file is open.
    Raises RequestError if it has no experts."""

    def __init__(self, file: GGUFFile, ctx: int, threads: int):
        with ExitStack() as undo:
            model = model_for(file.metadata)
            config = model.Config.from_gguf(file.metadata, file.tensors)
            weights = load_weights(file, model, config)
            self.ctx = ctx
            self.trunk = RoutedPass(lambda ops: model.forward(ops, config, weights), model.state(config), ctx)
            if not self.trunk.ops.ids:
                raise RequestError(f"{file.paths[0].name} has no experts: there is no routing to measure")
            self.mtp = self._mtp(model, config, weights)
            self.pool = Pool(native(), threads)
            undo.callback(self.pool.close)
            for each in self.passes:
                each.runner.allocate(self.pool)
                undo.callback(each.runner.close)
            self._close = undo.pop_all()

    def _mtp(self, model, config, weights) -> RoutedPass | None:
        specs = model.draft_state(config) if hasattr(model, "draft_state") else ()
        if not specs:
            return None
        head = model.draft_head(config, weights)
        return RoutedPass(lambda ops: model.draft(ops, config, weights, head), specs, self.ctx)

    @property
    def passes(self) -> list[RoutedPass]:
        return [self.trunk, *([self.mtp] if self.mtp else [])]

    @property
    def experts_of(self) -> dict[str, int]:
        """Number of experts by the name of the router, layer by layer."""
        return {name: count for each in self.passes for name, count in each.ops.experts_of.items()}

    def route(self, tokens: Sequence[int]) -> dict[str, np.ndarray]:
        """Experts of each token of a fresh timeline, int32 [T, k] by the name of the router; the MTP block has T - 1
        rows, for each token and the one after it."""
        chunks: dict[str, list[np.ndarray]] = {name: [] for name in self.experts_of}
        for each in self.passes:
            each.state.reset()
        before = None  # hidden state of the last token of the chunk before
        for at in range(0, len(tokens), _CHUNK):
            part = tokens[at : at + _CHUNK]
            for name, ids in self.trunk.ids(part, at).items():
                chunks[name].append(ids)
            if self.mtp:
                hidden = self.trunk.runner.hidden().copy()
                known = hidden[:-1] if before is None else np.concatenate([before, hidden[:-1]])
                pairs = part[1:] if before is None else part
                if len(pairs):
                    for name, ids in self.mtp.ids(pairs, max(at - 1, 0), known).items():
                        chunks[name].append(ids)
                before = hidden[-1:]
        width = {name: ids.width for each in self.passes for name, ids in each.ops.ids.items()}
        return {name: np.concatenate(each or [np.empty((0, width[name]), np.int32)]) for name, each in chunks.items()}

    def __enter__(self) -> "RoutedModel":
        return self

    def __exit__(self, *exc: object) -> None:
        self._close.close()


@dataclass(frozen=True)
class Spread:
    """How tokens spread over the experts of a layer. busiest_quarter: share of the activations that the quarter of the
    experts with the most gets; distinct: mean number of different experts of 1, 2, ... consecutive tokens; even: the
    same if experts were drawn evenly and independently; unused: experts that no token chose."""

    layer: str
    experts: int
    used: int
    tokens: int
    busiest_quarter: float
    distinct: tuple[float, ...]
    even: tuple[float, ...]
    unused: int


def spread(layer: str, experts: int, texts: Sequence[np.ndarray]) -> Spread:
    """Figures of one layer from the chosen experts of texts, each int [T, k]; windows end where a text does."""
    counts = np.bincount(np.concatenate([ids.ravel() for ids in texts]), minlength=experts)
    used = texts[0].shape[1]
    quarter = np.sort(counts)[::-1][: -(-experts // 4)]
    distinct = tuple(_distinct(texts, experts, window) for window in WINDOWS)
    even = tuple(experts * (1 - (1 - used / experts) ** window) for window in WINDOWS)
    share = float(quarter.sum() / max(counts.sum(), 1))
    return Spread(layer, experts, used, sum(map(len, texts)), share, distinct, even, int((counts == 0).sum()))


def _distinct(texts: Sequence[np.ndarray], experts: int, window: int) -> float:
    """Mean over all runs of `window` consecutive tokens; 0 if no text is that long."""
    total = runs = 0
    for ids in texts:
        chosen = np.zeros((len(ids), experts), bool)
        np.put_along_axis(chosen, ids.astype(np.int64), True, axis=1)
        count = len(ids) - window + 1
        if count > 0:
            together = np.logical_or.reduce([chosen[at : at + count] for at in range(window)])
            total, runs = total + int(together.sum()), runs + count
    return total / runs if runs else 0.0


def spreads(model: RoutedModel, texts: Sequence[Sequence[int]]) -> list[Spread]:
    """Figures of each layer over texts of token ids, in order of the layers."""
    routed = [model.route(text) for text in texts]
    return [
        spread(_layer_name(name, model), experts, [each[name] for each in routed])
        for name, experts in model.experts_of.items()
    ]


def _layer_name(router: str, model: RoutedModel) -> str:
    block = router.split(".")[1]
    return f"{block} (MTP)" if model.mtp and router in model.mtp.ops.ids else block


def file_texts(engine: Engine, paths: Sequence[str]) -> Iterator[list[int]]:
    """Token ids of text files, in pieces that fit the context. Raises RequestError for a file that cannot be read."""
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"{path} cannot be read as UTF-8 text: {error}") from None
        ids = engine.tokenize(text)
        if not ids:
            raise RequestError(f"{path} is empty: give a text to route")
        yield from (ids[at : at + engine.ctx] for at in range(0, len(ids), engine.ctx))


def task_texts(engine: Engine, tokens: int) -> Iterator[list[int]]:
    """Token ids of the prompts of `bench mtp`, each with the model's own greedy answer of at most so many tokens."""
    for prompts in TASKS.values():
        for prompt in prompts:
            ids = encode(prompt, engine.template, engine.tokenizer)
            answer = engine.generate(ids, temperature=0.0, max_tokens=tokens)
            answer.text()
            yield ids + answer.token_ids


def measure(engine: Engine, texts: Sequence[Sequence[int]]) -> list[Spread]:
    """Figures of each layer of the engine's model over texts of token ids."""
    with RoutedModel(engine.file, max(map(len, texts)), engine.plan.threads) as model:
        return spreads(model, texts)


def report(engine: Engine, layers: Sequence[Spread], source: str) -> dict:
    """Everything measured, for JSON; source: what was routed."""
    return {
        "model": engine.summary.name,
        "device": f"cpu {engine.runner.native.isa}, {machine().name}",
        "version": tandem.__version__,
        "text": source,
        "tokens": layers[0].tokens,
        "layers": [
            {
                "layer": each.layer,
                "experts": each.experts,
                "used": each.used,
                "busiest_quarter": round(each.busiest_quarter, 4),
                "distinct": [round(count, 3) for count in each.distinct],
                "even": [round(count, 3) for count in each.even],
                "unused": each.unused,
            }
            for each in layers
        ],
    }


def lines(told: dict) -> list[str]:
    """The report as a table."""
    layers = told["layers"]
    rows = [["layer", "experts", "busiest quarter", *(f"{window} tokens" for window in WINDOWS), "never used", ""]]
    for each in layers:
        counts = [f"{count:.2f}" for count in each["distinct"]]
        experts = f"{each['used']} of {each['experts']}"
        rows.append([each["layer"], experts, f"{each['busiest_quarter']:.1%}", *counts, str(each["unused"]), ""])
    even = [f"{count:.2f}" for count in layers[0]["even"]]
    rows.append(["even", "", "25.0%", *even, "0", ""])
    about = f"{told['tokens']} tokens ({told['text']}); different experts that so many consecutive tokens need"
    return [about, *table(rows)]
