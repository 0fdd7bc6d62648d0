"""`tandem bench mtp MODEL`: what drafts bring on nine kinds of task, and whether they leave the text alone.

In: an engine. Out: for each task and each way to draft the tokens/s beside decoding without drafts, how many drafts
were right by position, and where the time of a round goes. Ways take turns prompt by prompt, so that a machine that
slows down slows all of them. Each run starts with nothing known about acceptance; costs stay known.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import tandem
from tandem.bench.tasks import TASKS, encode
from tandem.engine import Engine
from tandem.errors import RequestError, SettingError
from tandem.generation import Answer
from tandem.machine import machine
from tandem.requests import GenerationRequest, Prompt
from tandem.runtime.decode import MAX_DRAFTS, NO_DRAFTS, DraftHistory, DraftSettings, decode_round
from tandem.runtime.sampling import Sampling
from tandem.runtime.session import Session
from tandem.show import table

LOSS_ALLOWED = 0.02  # of the speed without drafts
_WARM_UP_TOKENS = 48


@dataclass(frozen=True)
class MtpSettings:
    """What to measure: tasks by name, fixed numbers of drafts, tokens of an answer, runs of which the median counts;
    ignore_eos: answers do not end by themselves. Raises SettingError."""

    tasks: tuple[str, ...] = tuple(TASKS)
    drafts: tuple[int, ...] = (1, 2, 3, 4)
    tokens: int = 200
    repeats: int = 3
    temperature: float = 0.0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if any(not 1 <= count <= MAX_DRAFTS for count in self.drafts):
            raise SettingError(f"drafts={self.drafts}: whole numbers from 1 to {MAX_DRAFTS} are needed")


@dataclass
class Way:
    """One way to draft: its settings, the session that it runs on, and what it has learned."""

    name: str
    drafts: DraftSettings
    session: Session
    learned: DraftHistory = field(default_factory=DraftHistory)

    def history(self) -> DraftHistory:
        """A history that knows the machine and what drafts have cost, and nothing about acceptance."""
        fresh = DraftHistory()
        fresh.costs, fresh.guard = self.learned.costs, self.learned.guard
        return fresh


@dataclass
class Run:
    """The answers of one way to a task's prompts, once. tokens: those after the first of each answer; drafted,
    accepted: by position; seconds: of decode, and of its parts."""

    tokens: int = 0
    decode_s: float = 0.0
    rounds: int = 0
    drafted: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)
    accepted: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)
    draft_s: float = 0.0
    verify_s: float = 0.0
    host_s: float = 0.0
    texts: list[list[int]] = field(default_factory=list)

    def add(self, answer: Answer) -> None:
        """Books an answer that has ended."""
        counts, stats = answer.decoder.counts, answer.stats()
        self.tokens += max(0, stats.completion_tokens - 1)
        self.decode_s += stats.decode_s
        self.rounds += counts.rounds
        self.drafted = [a + b for a, b in zip(self.drafted, counts.drafted, strict=True)]
        self.accepted = [a + b for a, b in zip(self.accepted, counts.accepted, strict=True)]
        self.draft_s += counts.draft_s
        self.verify_s += counts.pass_s
        self.host_s += counts.host_s
        self.texts.append(list(answer.text.token_ids))

    @property
    def tok_s(self) -> float:
        return self.tokens / self.decode_s if self.decode_s else 0.0


Runs = dict[str, list[Run]]  # by way, one entry a repeat


def loading(settings: MtpSettings) -> DraftSettings:
    """Drafts to load an engine with, so that it has the MTP block."""
    return DraftSettings(longest=max((*settings.drafts, DraftSettings.longest)))


def ways(engine: Engine, drafts: Sequence[int]) -> list[Way]:
    """Without drafts, each fixed number by the MTP block or the draft model, by the text alone, by the engine's choice.

    What runs without the MTP block has a session that does not feed it.
    """
    plan = engine.plan
    plain = Session(engine.runner, engine.summary.specs, plan.ctx, plan.kv, plan.checkpoints)
    full = engine.session
    chained = "mtp" if full.mtp else "model" if engine.draft_model else None
    fixed = [Way(str(n), DraftSettings((chained,), n, adaptive=False), full) for n in drafts if chained]
    return [
        Way("off", NO_DRAFTS, plain),
        *fixed,
        Way("ngram", DraftSettings(("ngram",)), plain),
        Way("auto", DraftSettings(), full),
    ]


def measure(engine: Engine, settings: MtpSettings, on_task: Callable[[str, Runs], None]) -> dict[str, Runs]:
    """Runs of every way by task, told to on_task as they are done. Raises RequestError if a prompt does not fit."""
    competitors = ways(engine, settings.drafts)
    prompts = {task: [encode(p, engine.template, engine.tokenizer) for p in TASKS[task]] for task in settings.tasks}
    longest = max(len(ids) for each in prompts.values() for ids in each)
    if longest + settings.tokens > engine.ctx:
        raise RequestError(
            f"the longest prompt has {longest} tokens and answers get {settings.tokens}, the context holds "
            f"{engine.ctx}: --ctx {longest + settings.tokens} or fewer --tokens"
        )
    first = next(iter(prompts.values()))[0]
    for way in competitors:
        _answer(engine, way, way.history(), first, settings, min(_WARM_UP_TOKENS, settings.tokens))
    results = {}
    for task, conversations in prompts.items():
        results[task] = _measure_task(engine, competitors, conversations, settings)
        on_task(task, results[task])
    return results


def _measure_task(engine: Engine, competitors: Sequence[Way], conversations: Sequence[list[int]], settings) -> Runs:
    runs: Runs = {way.name: [] for way in competitors}
    for repeat in range(settings.repeats):
        histories = [way.history() for way in competitors]
        for way in competitors:
            runs[way.name].append(Run())
        for ids in conversations:
            order = range(len(competitors)) if repeat % 2 == 0 else reversed(range(len(competitors)))
            for at in order:
                way = competitors[at]
                runs[way.name][-1].add(_answer(engine, way, histories[at], ids, settings, settings.tokens))
    return runs


def _answer(engine: Engine, way: Way, history: DraftHistory, ids: list[int], settings, max_tokens: int) -> Answer:
    """One whole answer on a fresh timeline: a reused prompt could have other last bits."""
    bias = {token: float("-inf") for token in engine.tokenizer.eog_ids} if settings.ignore_eos else {}
    sampling = Sampling(temperature=settings.temperature, seed=1, max_tokens=max_tokens, logit_bias=bias)
    way.session.clear()
    request = GenerationRequest(Prompt(ids, (), continues=False), sampling)
    answer = Answer(way.session, engine.tokenizer, request, history, way.drafts, engine.draft_model)
    while not answer.prefilled:
        answer.prefill()
    while answer.reason is None:
        decode_round(way.session.runner, [answer.decoder])
        answer.after_round()
    return answer


def pooled(results: dict[str, Runs]) -> Runs:
    """All tasks as one: repeat by repeat their sums."""
    tasks = list(results.values())
    return {
        way: [_sum([runs[way][repeat] for runs in tasks]) for repeat in range(len(tasks[0][way]))] for way in tasks[0]
    }


def _sum(runs: Sequence[Run]) -> Run:
    columns = [[getattr(run, name) for run in runs] for name in ("drafted", "accepted")]
    drafted, accepted = ([sum(position) for position in zip(*column, strict=True)] for column in columns)
    plain = {
        name: sum(getattr(run, name) for run in runs)
        for name in ("tokens", "decode_s", "rounds", "draft_s", "verify_s", "host_s")
    }
    return Run(**plain, drafted=drafted, accepted=accepted, texts=[text for run in runs for text in run.texts])


def summary(runs: Runs) -> dict:
    """Figures of one task: answers and whether all ways wrote the same ones; acceptance_by_position: of the longest
    fixed drafts, the share that was right at each position; by way tok_s (median), ratio (median of the repeats' ratios
    to off), tokens_per_round, acceptance (drafts that were right), and milliseconds of a round's parts."""
    off = runs["off"]
    texts = off[0].texts
    longest = max((way for way in runs if way.isdigit()), key=int, default=None)
    return {
        "answers": len(texts),
        "tokens": sum(map(len, texts)),
        "same_text": all(run.texts == texts for way in runs.values() for run in way),
        "acceptance_by_position": _by_position(runs[longest]) if longest else [],
        "ways": {name: _figures(way, off) for name, way in runs.items()},
    }


def _by_position(runs: Sequence[Run]) -> list[float]:
    total = _sum(runs)
    return [round(right / made, 4) for right, made in zip(total.accepted, total.drafted, strict=True) if made]


def _figures(way: Sequence[Run], off: Sequence[Run]) -> dict:
    total = _sum(way)
    rounds, drafted = max(total.rounds, 1), sum(total.drafted)
    ratios = [run.tok_s / plain.tok_s for run, plain in zip(way, off, strict=True) if plain.tok_s]
    return {
        "tok_s": round(statistics.median(run.tok_s for run in way), 3),
        "ratio": round(statistics.median(ratios), 4) if ratios else None,
        "ratios": [round(ratio, 4) for ratio in ratios],
        "tokens_per_round": round(total.tokens / rounds, 4),
        "drafts_per_round": round(drafted / rounds, 4),
        "acceptance": round(sum(total.accepted) / drafted, 4) if drafted else None,
        "by_position": _by_position(way),
        "draft_ms": round(1000 * total.draft_s / rounds, 4),
        "verify_ms": round(1000 * total.verify_s / rounds, 4),
        "host_ms": round(1000 * total.host_s / rounds, 4),
    }


def report(engine: Engine, settings: MtpSettings, results: dict[str, Runs]) -> dict:
    """Everything measured, for JSON."""
    return {
        "model": engine.summary.name,
        "device": f"cpu {engine.runner.native.isa}, {machine().name}",
        "threads": engine.plan.threads,
        "version": tandem.__version__,
        "temperature": settings.temperature,
        "tokens": settings.tokens,
        "repeats": settings.repeats,
        "tasks": {task: summary(runs) for task, runs in results.items()},
        "all": summary(pooled(results)),
    }


def lines(told: dict) -> list[str]:
    """The report as tables: by task, then by way over all tasks, then what is to be noted."""
    names = list(told["all"]["ways"])
    positions = len(told["all"]["acceptance_by_position"])
    head = ["task", "tokens", *(f"right at {p + 1}" for p in range(positions)), "off tok/s"]
    head += [f"x {name}" for name in names if name != "off"] + ["tokens/round", "text"]
    rows = [head]
    for task, figures in {**told["tasks"], "all": told["all"]}.items():
        by_way = figures["ways"]
        shares = [f"{share:.2f}" for share in figures["acceptance_by_position"]]
        ratios = [_ratio(by_way[name]["ratio"]) for name in names if name != "off"]
        shares += ["-"] * (positions - len(shares))
        row = [task, str(figures["tokens"]), *shares, f"{by_way['off']['tok_s']:.1f}"]
        row += [*ratios, f"{by_way['auto']['tokens_per_round']:.2f}", "same" if figures["same_text"] else "DIFFERS"]
        rows.append(row)
    return [*table(rows), "", *table(_by_way(told["all"]["ways"])), "", *_notes(told)]


def _by_way(by_way: dict) -> list[list[str]]:
    rows = [["all tasks", "tok/s", "tokens/round", "drafts/round", "right", "draft ms", "verify ms", "host ms", ""]]
    for name, way in by_way.items():
        right = "-" if way["acceptance"] is None else f"{way['acceptance']:.2f}"
        parts = [f"{way[part]:.2f}" for part in ("draft_ms", "verify_ms", "host_ms")]
        per_round = [f"{way[key]:.2f}" for key in ("tokens_per_round", "drafts_per_round")]
        rows.append([name, f"{way['tok_s']:.1f}", *per_round, right, *parts, ""])
    return rows


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _notes(told: dict) -> list[str]:
    count = sum(figures["answers"] for figures in told["tasks"].values())
    differing = [task for task, figures in told["tasks"].items() if not figures["same_text"]]
    slower = [
        f"{task} ({figures['ways']['auto']['ratio']:.3f})"
        for task, figures in told["tasks"].items()
        if (figures["ways"]["auto"]["ratio"] or 1) < 1 - LOSS_ALLOWED
    ]
    verdict = f"NOT in {', '.join(differing)}" if differing else f"yes, all {count} answers"
    return [
        f"text with drafts = text without: {verdict}",
        f"auto more than {LOSS_ALLOWED:.0%} slower than off: {', '.join(slower) or 'nowhere'}",
    ]
