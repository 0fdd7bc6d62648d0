"""The command `tandem`: chat, run, serve, pull, list, info, doctor, bench.

Arguments in; text on stdout, everything about the run on stderr.

Exit codes: 0 done, 1 stdout was closed, 2 a mistake of the caller or the file (one line on stderr), 130 interrupted.
Only what a command needs is imported, so that `--help` and `--version` answer at once.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import tandem
from tandem.catalog import find, model_path
from tandem.default_model import NOTICE
from tandem.errors import EngineError, RequestError, nearest
from tandem.settings import SERVED, Setting

if TYPE_CHECKING:
    from tandem.engine import Engine
    from tandem.runtime.decode import DraftSettings
    from tandem.text.tokenizer import Tokenizer

# llama.cpp's choice: repeats are not looked for across these
_DRY_BREAKERS = ("\n", ":", '"', "*")
_SAMPLING_NUMBERS: tuple[tuple[str, type, str], ...] = (
    ("temperature", float, "0 takes the most likely token"),
    ("top-k", int, "keep the k most likely tokens; 0: all"),
    ("top-p", float, "keep the most likely tokens up to this mass"),
    ("min-p", float, "drop tokens below this share of the most likely one"),
    ("typical-p", float, "keep tokens of typical surprise up to this mass"),
    ("presence-penalty", float, "subtracted once for tokens of the answer"),
    ("frequency-penalty", float, "subtracted per occurrence in the answer"),
    ("repetition-penalty", float, "divides tokens of the window; 1 is off"),
    ("repetition-window", int, "tokens that repetition-penalty looks back; -1: all"),
    ("dry-multiplier", float, "DRY penalty on long repeats; 0 is off"),
    ("dry-base", float, "growth of the DRY penalty per repeated token"),
    ("dry-allowed-length", int, "longest repeat that DRY leaves alone, plus one"),
    ("dry-window", int, "tokens that DRY looks back; -1: all"),
    ("seed", int, "of the random choices; the same seed gives the same text"),
    ("max-tokens", int, "of one answer"),
)


class _Commands(click.Group):
    """A group whose unknown commands name the nearest one."""

    def resolve_command(self, ctx: click.Context, args: list[str]):
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            ctx.fail(f"unknown command {name!r}{nearest(name, self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


class _Benchmarks(_Commands):
    """`bench` followed by a model, by options or by nothing is `bench speed`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        word = args[0] if args else ""
        known = self.get_command(ctx, word) is not None or word in ctx.help_option_names
        if not known and (not word or word.startswith("-") or not _is_prompt(word)):
            args = ["speed", *args]
        return super().parse_args(ctx, args)


def main(argv: list[str] | None = None) -> None:
    """Runs the command line and exits the process; argv: without the program's name, None: the process's own."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    sys.exit(_exit_code(argv))


def _exit_code(argv: list[str] | None) -> int:
    try:
        return commands.main(args=argv, prog_name="tandem", standalone_mode=False) or 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except EngineError as error:
        click.echo(f"tandem: {error}", err=True)
    except UnicodeDecodeError as error:
        click.echo(f"tandem: standard input is not UTF-8 at byte {error.start}: convert it first", err=True)
    except (KeyboardInterrupt, click.Abort):
        return 130
    return 2


def _number_options(command: Callable) -> Callable:
    for name, kind, meaning in reversed(_SAMPLING_NUMBERS):
        command = click.option(f"--{name}", type=kind, default=None, help=meaning)(command)
    return command


def _sampling_options(command: Callable) -> Callable:
    """Adds the settings of Sampling, and of the chat template, as options."""
    for option in (
        click.option("--no-think", is_flag=True, help="ask the model to answer without reasoning first"),
        click.option("--profile", help="sampling profile: thinking, coding, ... of the model's family, or a full name"),
        click.option("--stop", multiple=True, metavar="TEXT", help="end the answer before this text"),
        click.option("--logit-bias", multiple=True, metavar="ID=BIAS", help="added to a token's logit; -inf forbids it"),
        click.option("--dry-breaker", multiple=True, metavar="TEXT",
                     help=r"DRY repeats do not reach over it; default \n : \" *"),
    ):
        command = option(command)
    return _number_options(command)


def _engine_options(command: Callable) -> Callable:
    for option in (
        click.option("--draft", metavar="SOURCES", default="auto", show_default=True,
                     help="speculation, which never changes the text: auto, off, or of mtp,ngram,model"),
        click.option("--draft-max", type=int, help="most drafts a round; default: 4"),
        click.option("--draft-fixed", is_flag=True, help="always draft --draft-max tokens, whether it pays or not"),
    ):
        command = option(command)
    return _loading_options(command)


def _loading_options(command: Callable) -> Callable:
    for option in (
        click.option("--quiet", "-q", is_flag=True, help="no plan and no speed on stderr"),
        click.option("--kv", metavar="TYPE", default="f16", show_default=True, help="cache type: f16, q8_0 or f32"),
        click.option("--threads", type=int, help="default: the physical cores"),
        click.option("--draft-model", metavar="FILE", help="a smaller .gguf with the same vocabulary that drafts too"),
        click.option("--ctx", type=int, help="tokens of context; default: 8192 or what fits"),
        click.argument("model", metavar="[MODEL]", required=False),
    ):
        command = option(command)
    return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(tandem.__version__, prog_name="tandem")
def commands() -> None:
    """Runs language models from GGUF files on this computer.

    MODEL is a .gguf file, any part of a split one, or the name of a pulled one; without it, the small demonstration
    model of the package.
    """


@commands.command()
@_engine_options
@_sampling_options
@click.option("--system", metavar="TEXT", help="system message")
@click.option("--loop-guard/--no-loop-guard", default=True, show_default=True, help="stop answers that run in circles")
def chat(model: str | None, **options: Any) -> None:
    """Talk with a model. From a pipe: one question per line."""
    from tandem.chat import Chat, converse

    with _load(model, options) as engine:
        talk = Chat(
            engine,
            _overrides(engine, options),
            profile=options["profile"],
            template_options=_template_options(options),
            system=options["system"],
            quiet=options["quiet"],
        )
        sys.stdout.flush()
        code = converse(talk)
    click.get_current_context().exit(code)


@commands.command()
@_engine_options
@_sampling_options
@click.argument("prompt", required=False)
@click.option("--system", metavar="TEXT", help="system message")
@click.option("--raw", is_flag=True, help="continue the prompt as it stands, without the chat template")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object instead of the text")
@click.option("--loop-guard/--no-loop-guard", default=False, show_default=True, help="stop answers that run in circles")
def run(model: str | None, prompt: str | None, **options: Any) -> None:
    """Answer one PROMPT and exit. Without PROMPT, or with -, it is read from standard input.

    A single argument that is no .gguf file is the PROMPT, for the packaged model.
    """
    from tandem.chat import Answer, checked_text

    if options["raw"] and options["system"]:
        raise click.UsageError("--system needs the chat template: leave out --raw")
    if prompt is None and model is not None and _is_prompt(model):
        model, prompt = None, model
    text = checked_text(_prompt_text(prompt))
    with _load(model, options) as engine:
        messages = [{"role": "user", "content": text}]
        if options["system"]:
            messages.insert(0, {"role": "system", "content": options["system"]})
        answer = Answer(
            engine,
            text if options["raw"] else messages,
            _overrides(engine, options),
            profile=options["profile"],
            template_options=_template_options(options),
        )
        if options["as_json"]:
            _write_json(engine, answer, options["quiet"])
        else:
            answer.show(options["quiet"])
    if answer.stats.stop_reason == "cancelled":
        click.get_current_context().exit(130)


def _write_json(engine: "Engine", answer, quiet: bool) -> None:
    from tandem.show import stats_line, stats_object

    answer.run()
    stats = answer.stats
    result = {
        "model": engine.summary.name,
        "text": answer.text,
        "reasoning": answer.reasoning,
        "token_ids": answer.generation.token_ids,
        "tokens": {"prompt": stats.prompt_tokens, "reused": stats.reused_tokens, "completion": stats.completion_tokens},
        "timings": stats_object(stats),
        "stop_reason": stats.stop_reason,
        "seed": answer.generation.sampler.seed,
        "version": tandem.__version__,
    }
    click.echo(json.dumps(result))
    if not quiet:
        click.echo(stats_line(stats), err=True)


@commands.command()
@click.argument("model", metavar="[MODEL]", required=False)
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def info(model: str | None, as_json: bool) -> None:
    """Tell what a model file holds and what memory it needs, without loading it."""
    from tandem.machine import machine
    from tandem.runtime.plan import describe
    from tandem.show import summary_lines, summary_object

    summary = describe(_existing(model))
    if as_json:
        click.echo(json.dumps(summary_object(summary)))
    else:
        click.echo("\n".join(summary_lines(summary, machine().free_bytes)))


@commands.group(cls=_Benchmarks)
def bench() -> None:
    """Measure speed (bench MODEL, the same as bench speed MODEL), what drafts bring, how tokens spread over experts."""


@bench.command()
@_engine_options
@click.option("--prefill", type=click.IntRange(0), default=512, show_default=True, help="tokens of the prefill")
@click.option("--depths", default="0,2048", show_default=True, help="tokens already in the context at decode")
@click.option("--decode", type=click.IntRange(0), default=64, show_default=True, help="tokens to decode")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="runs of which the median counts")
def speed(model: str | None, prefill: int, depths: str, decode: int, repeats: int, **options: Any) -> None:
    """Measure prefill and decode speed; the last line of output is one JSON object."""
    from tandem.bench.decode import bench as measure
    from tandem.bench.decode import report

    places = _numbers(depths, "--depths", "0,2048")
    if options["ctx"] is None:
        options["ctx"] = max(prefill, *places) + decode
    with _load(model, options) as engine:
        on_run = (lambda line: None) if options["quiet"] else click.echo
        speeds = measure(engine, prefill, places, decode, repeats, on_run)
        click.echo(report(engine, speeds, prefill))


def _in_a_folder(ctx: click.Context, param: click.Parameter, file: str | None) -> str | None:
    """The name of a file to be written, refused at once if that could not be done after the measurement."""
    if file is not None and (Path(file).is_dir() or not Path(file).absolute().parent.is_dir()):
        raise click.BadParameter(f"{file!r} cannot be written: name a file in a folder that exists", ctx, param)
    return file


def _report_options(command: Callable) -> Callable:
    for option in (
        click.option("--json", "json_file", metavar="FILE", callback=_in_a_folder,
                     help="write the JSON object there, not as the last line"),
        click.option("--tokens", type=click.IntRange(2), default=200, show_default=True, help="most of one answer"),
        _loading_options,
    ):
        command = option(command)
    return command


@bench.command()
@_report_options
@click.option("--drafts", default="1,2,3,4", show_default=True, help="fixed numbers of drafts to measure")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="runs of which the median counts")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the most likely token")
@click.option("--tasks", help="only these of the nine, such as code,story")
@click.option("--ignore-eos", is_flag=True, help="answers do not end before --tokens: for files that write noise")
@click.option("--plot", metavar="FILE.png", callback=_in_a_folder, help="draw ratios and acceptance; needs matplotlib")
def mtp(model: str | None, tasks: str | None, drafts: str, plot: str | None, **options: Any) -> None:
    """Measure what drafts bring on nine kinds of task, and check that they leave the text alone."""
    from tandem.bench import mtp
    from tandem.bench import plot as picture
    from tandem.bench.tasks import chosen

    counts = tuple(_numbers(drafts, "--drafts", "1,2,4"))
    asked = {name: options[name] for name in ("tokens", "repeats", "temperature", "ignore_eos")}
    settings = mtp.MtpSettings(tuple(chosen(tasks)), counts, **asked)
    if plot:
        picture.require(plot)
    tell = (lambda *_: None) if options["quiet"] else lambda task, _: click.echo(f"measured: {task}", err=True)
    with _load(model, {"ctx": None, **options}, mtp.loading(settings)) as engine:
        report = mtp.report(engine, settings, mtp.measure(engine, settings, tell))
    click.echo("\n".join(mtp.lines(report)))
    if plot:
        picture.draw(report, plot)
    _write_report(report, options["json_file"])


@bench.command()
@_report_options
@click.option("--text", "files", multiple=True, metavar="FILE", type=click.Path(exists=True, dir_okay=False),
              help="text to route, may be repeated; default: the tasks of bench mtp with the model's answers")
def routing(model: str | None, files: tuple[str, ...], json_file: str | None, tokens: int, **options: Any) -> None:
    """Measure how evenly tokens spread over the experts of each layer."""
    from tandem.bench import routing
    from tandem.runtime.decode import DraftSettings

    with _load(model, options, DraftSettings()) as engine:
        texts = list(routing.file_texts(engine, files) if files else routing.task_texts(engine, tokens))
        source = ", ".join(Path(file).name for file in files) or "tasks of bench mtp with the model's answers"
        report = routing.report(engine, routing.measure(engine, texts), source)
    click.echo("\n".join(routing.lines(report)))
    _write_report(report, json_file)


def _write_report(report: dict, file: str | None) -> None:
    text = json.dumps(report)
    if file is None:
        click.echo(text)
    else:
        Path(file).write_text(text + "\n")


def _server_options(command: Callable) -> Callable:
    """Adds every setting of the server as an option; values stay texts, so that all sources are read alike."""
    for spec in reversed(SERVED.values()):
        if not spec.secret and spec.name != "model":
            command = _setting_option(spec)(command)
    return command


def _setting_option(spec: Setting) -> Callable:
    shown = ",".join(spec.default) if spec.kind == "list" else str(spec.default).lower()
    about = f"{spec.meaning}{f'  [default: {shown}]' if shown and shown != '0' else ''}"
    if spec.kind == "switch":
        return click.option(f"{spec.flag}/--no-{spec.flag[2:]}", spec.name, default=None, help=about)
    metavar = "|".join(spec.choices) or {"text": "TEXT", "list": "TEXT"}.get(spec.kind, spec.kind.upper())
    return click.option(spec.flag, spec.name, metavar=metavar, multiple=spec.kind == "list", help=about)


@commands.command(
    epilog="Each option is also a variable, --max-queue is TANDEM_MAX_QUEUE, and a line of the configuration file, "
    "max_queue = 64; options win over variables, variables over the file. Keys that clients must show come from "
    "TANDEM_API_KEY, api_key of the file, or --api-key-file."
)
@click.argument("model", metavar="[MODEL]", required=False)
@click.option("--config", metavar="FILE", help="configuration file; default: ~/.config/tandem/tandem.toml, if there")
@_server_options
def serve(config: str | None, **flags: Any) -> None:
    """Answer OpenAI- and Anthropic-style clients over HTTP, and serve a page to chat with."""
    from tandem.serve.command import serve as serve_until_stopped
    from tandem.serve.config import load_config

    click.get_current_context().exit(serve_until_stopped(load_config(flags, path=config)))


@commands.command()
@click.argument("source", metavar="ORG/REPO[:QUANT]")
@click.option("--name", help="name of the model afterwards; default: that of the file, without its ending")
@click.option("--revision", metavar="REF", help="branch, tag or commit of the repository; default: main")
@click.option("--quiet", "-q", is_flag=True, help="no progress")
def pull(source: str, name: str | None, revision: str | None, quiet: bool) -> None:
    """Download a model from the Hugging Face hub, to be used by its name afterwards.

    QUANT is a quantization such as Q4_K_M, or the name of one file. A download that was interrupted goes on where it
    stopped. HF_ENDPOINT names another hub, HF_TOKEN gives access to closed repositories.
    """
    from tandem.pull import pull as download

    entry = download(source, name=name, revision=revision, quiet=quiet)
    click.echo(f"{entry.name}: {entry.path}")


@commands.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="print one JSON array")
def list_models(as_json: bool) -> None:
    """List the models that were pulled."""
    from tandem.catalog import entries
    from tandem.show import size, table

    found = entries()
    if as_json:
        click.echo(json.dumps([entry.as_dict() for entry in found]))
    elif found:
        rows = [(entry.name, size(entry.size_bytes), f"{entry.repo} at {entry.revision[:12]}") for entry in found]
        click.echo("\n".join(table([("name", "size", "from"), *rows])))
    else:
        click.echo("no models yet: tandem pull ORG/REPO:QUANT", err=True)


@commands.command()
@click.argument("model", metavar="[MODEL]", required=False)
@click.option("--config", metavar="FILE", help="configuration file to check; default: the one that serve would read")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def doctor(model: str | None, config: str | None, as_json: bool) -> None:
    """Check this machine, the configuration and a model, and say what to do. Exit code 1 if something would fail."""
    from tandem.doctor import examine

    report = examine(model and _existing(model), config)
    click.echo(json.dumps(report.as_dict()) if as_json else "\n".join(report.lines()))
    click.get_current_context().exit(0 if report.healthy else 1)


def _numbers(text: str, option: str, example: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 0:
        raise click.BadParameter(f"{text!r} is not a list of token counts such as {example}", param_hint=option)
    return numbers


def _is_prompt(word: str) -> bool:
    """Whether the only argument of `run` is meant as the prompt: it looks like no path and there is no such file."""
    looks_like_path = word.endswith(".gguf") or ("/" in word and " " not in word)
    return word != "-" and not looks_like_path and not Path(word).exists() and find(word) is None


def _existing(model: str | None) -> Path:
    if model is None:
        click.echo(NOTICE, err=True)
    return model_path(model)


def draft_settings(sources: str, longest: int | None, fixed: bool, with_model: bool) -> "DraftSettings":
    """Speculation as the options state it. Raises SettingError for unknown sources and numbers out of range."""
    from tandem.runtime.decode import SOURCES, DraftSettings

    if sources == "off":
        return DraftSettings(sources=(), longest=0)
    chosen = SOURCES if sources == "auto" else tuple(sources.split(","))
    if "model" in chosen and not with_model and sources != "auto":
        raise click.UsageError("--draft model needs --draft-model FILE")
    return DraftSettings(chosen, 4 if longest is None else longest, adaptive=not fixed)


def _load(model: str | None, options: Mapping[str, Any], drafts: "DraftSettings | None" = None) -> "Engine":
    """The engine as the options say; drafts: instead of those of the options."""
    from tandem.runtime.decode import NO_DRAFTS

    path, quiet = _existing(model), options["quiet"]

    def tell(text: str) -> None:
        if not quiet:
            click.echo(text, err=True)

    tell(f"loading {path.name}")
    start = time.monotonic()
    loading = {key: options[key] for key in ("ctx", "threads", "kv")}
    small = options["draft_model"] and tandem.load(_existing(options["draft_model"]), **loading, drafts=NO_DRAFTS)
    engine = tandem.load(
        path,
        **loading,
        drafts=drafts or draft_settings(options["draft"], options["draft_max"], options["draft_fixed"], bool(small)),
        draft_model=small,
        on_plan=lambda plan: tell("\n".join(f"  {line}" for line in plan.lines())),
    )
    tell(f"ready after {time.monotonic() - start:.1f} s, {engine.plan.threads} threads")
    return engine


def _prompt_text(prompt: str | None) -> str:
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError("no PROMPT given and standard input is a terminal")
    text = sys.stdin.buffer.read().decode() if prompt in (None, "-") else prompt
    if not text.strip():
        raise RequestError("the prompt is empty: give some text")
    return text


def _template_options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {"enable_thinking": False} if options["no_think"] else {}


def _overrides(engine: "Engine", options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of Sampling that the command line sets."""
    names = [name.replace("-", "_") for name, _, _ in _SAMPLING_NUMBERS]
    given: dict[str, Any] = {name: options[name] for name in names if options[name] is not None}
    given["loop_guard"] = options["loop_guard"]
    if options["stop"]:
        given["stop"] = options["stop"]
    if options["logit_bias"]:
        given["logit_bias"] = [_bias(text) for text in options["logit_bias"]]
    if given.get("dry_multiplier"):
        given["dry_breakers"] = breaker_ids(engine.tokenizer, options["dry_breaker"] or _DRY_BREAKERS)
    elif options["dry_breaker"]:
        raise click.UsageError("--dry-breaker has no effect without --dry-multiplier")
    return given


def _bias(text: str) -> tuple[str, float]:
    token, equals, bias = text.partition("=")
    try:
        return token, float(bias)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not of the form ID=BIAS", param_hint="--logit-bias") from None


def breaker_ids(tokenizer: "Tokenizer", texts: tuple[str, ...]) -> tuple[int, ...]:
    """Ids of all tokens whose text holds one of these."""
    wanted = [text.encode() for text in texts]
    return tuple(
        token for token in range(tokenizer.vocab_size) if any(part in tokenizer.token_bytes(token) for part in wanted)
    )
