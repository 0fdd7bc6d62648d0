"""Talking with a model: one answer shown as it comes, and the conversation around it, in a terminal or from a pipe.

In: an engine and lines of text. Out: answers on stdout, reasoning dimmed; speed and notes on stderr.
"""

import json
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from tandem.errors import EngineError, RequestError, nearest
from tandem.generation import Generation
from tandem.requests import GenerationStats
from tandem.show import STOP_NOTES, Progress, printable, stats_line
from tandem.text.reasoning import CLOSE, OPEN, Piece, ReasoningSplitter, prompt_end

if TYPE_CHECKING:
    from tandem.engine import Engine

class Answer:
    """One answer to a conversation, or the continuation of a raw text (str).

    Settings are resolved here, since how a model should be sampled depends on whether its template lets it reason.
    After `run` or `show`: `text`, `reasoning` (None if there was none), `stats`.
    """

    def __init__(
        self,
        engine: "Engine",
        prompt: str | Sequence[dict],
        overrides: Mapping[str, Any],
        *,
        profile: str | None = None,
        template_options: Mapping[str, Any] | None = None,
    ):
        options = dict(template_options or {})
        raw = isinstance(prompt, str)
        end = "none" if raw else prompt_end(engine.apply_chat_template(prompt, **options))
        sampling = engine.sampling(None, profile=profile, thinking=end != "closed", **overrides)
        self._splitter = None if raw else ReasoningSplitter(end)
        self._progress = Progress("reading the prompt")
        self.generation: Generation = engine.generate(
            prompt, sampling=sampling, template_options=options, raw=raw, on_progress=self._progress
        )
        self._parts: dict[str, list[str]] = {"reasoning": [], "answer": []}

    @property
    def text(self) -> str:
        """The answer without its reasoning."""
        return "".join(self._parts["answer"])

    @property
    def reasoning(self) -> str | None:
        """The reasoning before the answer, None if there was none."""
        return "".join(self._parts["reasoning"]) or None

    @property
    def stats(self) -> GenerationStats:
        """How the run went; only after its end."""
        assert self.generation.stats is not None
        return self.generation.stats

    def run(self, on_piece: Callable[[Piece], None] = lambda piece: None) -> None:
        """Generates to the end, calling on_piece for each piece of text. Ctrl-C ends the answer, not the program."""
        try:
            with _cancelled_by_ctrl_c(self.generation):
                for piece in self._pieces():
                    self._parts[piece.kind].append(piece.text)
                    on_piece(piece)
        finally:
            self._progress.clear()

    def show(self, quiet: bool) -> None:
        """Runs, writing to stdout as it goes, and then the notes and the speed to stderr."""
        shown = _Shown()
        self.run(shown.write)
        shown.close()
        note = STOP_NOTES.get(self.stats.stop_reason)
        if note:
            click.echo(f"[{note}]", err=True)
        if not quiet:
            click.echo(click.style(stats_line(self.stats), dim=True), err=True)

    def _pieces(self) -> Iterator[Piece]:
        for text in self.generation:
            yield from self._splitter.push(text) if self._splitter else (Piece("answer", text),)
        if self._splitter:
            yield from self._splitter.flush()


@contextmanager
def _cancelled_by_ctrl_c(generation: Generation) -> Iterator[None]:
    """The first Ctrl-C cancels the generation; a second one, if that does not help, interrupts as usual."""
    before = signal.getsignal(signal.SIGINT)

    def cancel(signum: int, frame: object) -> None:
        generation.cancel()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Shown:
    """Writes pieces to stdout: reasoning dimmed between its tags, the answer as it is, control characters replaced."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._kind: str | None = None
        self._ends_line = True

    def write(self, piece: Piece) -> None:
        if piece.kind != self._kind:
            self._change(piece.kind)
        self._put(printable(piece.text) if self._terminal else piece.text)

    def close(self) -> None:
        if self._kind == "reasoning":
            self._change(None)
        elif not self._ends_line:
            self._put("\n")

    def _change(self, kind: str | None) -> None:
        if self._kind == "reasoning":
            self._put(f"\n{CLOSE}\n\n" if kind else f"\n{CLOSE}\n")
        elif kind == "reasoning":
            self._kind = kind
            self._put(f"{OPEN}\n")
        self._kind = kind

    def _put(self, text: str) -> None:
        self._ends_line = text.endswith("\n")
        click.echo(click.style(text, dim=True) if self._kind == "reasoning" else text, nl=False)
        sys.stdout.flush()


class Chat:
    """A conversation and its slash commands. `handle` takes one line and answers it or carries it out."""

    def __init__(
        self,
        engine: "Engine",
        overrides: Mapping[str, Any],
        *,
        profile: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        system: str | None = None,
        quiet: bool = False,
    ):
        self.engine, self.overrides, self.profile, self.quiet = engine, dict(overrides), profile, quiet
        self.template_options = dict(template_options or {})
        self.system = system
        self.turns: list[dict[str, str]] = []
        self.commands: dict[str, tuple[Callable[[str], bool], str]] = {
            "/help": (self._help, "this list"),
            "/clear": (self._clear, "forget the conversation; the system message stays"),
            "/system": (self._system, "TEXT: set the system message; without TEXT: remove it"),
            "/think": (self._think, "on or off: whether the model reasons before it answers"),
            "/retry": (self._retry, "answer the last question again"),
            "/undo": (self._undo, "forget the last question and its answer"),
            "/save": (self._save, "FILE: write the conversation as JSON"),
            "/load": (self._load, "FILE: read a conversation that /save wrote"),
            "/quit": (self._quit, "leave; Ctrl-D does too"),
        }

    @property
    def messages(self) -> list[dict[str, str]]:
        """The whole conversation, as templates take it."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + self.turns

    def handle(self, line: str) -> bool:
        """Answers a question or runs a command; False when the conversation is over. Raises EngineError."""
        if not line.strip():
            return True
        if line.startswith("/") and not line.startswith("//"):
            name, _, argument = line.partition(" ")
            if name not in self.commands:
                raise RequestError(f"unknown command {name}{nearest(name, self.commands)}; // begins a text with /")
            return self.commands[name][0](argument.strip())
        self._ask(line.removeprefix("/") if line.startswith("//") else line)
        return True

    def _ask(self, question: str) -> None:
        self.turns.append({"role": "user", "content": question})
        try:
            answer = Answer(
                self.engine,
                self.messages,
                self.overrides,
                profile=self.profile,
                template_options=self.template_options,
            )
            answer.show(self.quiet)
        except BaseException:
            self.turns.pop()
            raise
        if not answer.text and not answer.reasoning:
            self.turns.pop()
            return
        turn = {"role": "assistant", "content": answer.text}
        if answer.reasoning:
            turn["reasoning_content"] = answer.reasoning
        self.turns.append(turn)

    def _help(self, _: str) -> bool:
        width = max(map(len, self.commands))
        for name, (_action, meaning) in self.commands.items():
            click.echo(f"{name:<{width}}  {meaning}", err=True)
        click.echo("Ctrl-C stops an answer, Esc Enter begins a new line, // begins a text with /", err=True)
        return True

    def _clear(self, _: str) -> bool:
        self.turns.clear()
        return True

    def _system(self, text: str) -> bool:
        self.system = text or None
        return True

    def _think(self, choice: str) -> bool:
        if choice not in ("on", "off"):
            raise RequestError(f"/think {choice}: expected on or off")
        self.template_options["enable_thinking"] = choice == "on"
        return True

    def _retry(self, _: str) -> bool:
        question = self._last_question()
        kept = self.turns[question:]
        del self.turns[question:]
        try:
            self._ask(kept[0]["content"])
        except BaseException:
            self.turns += kept
            raise
        return True

    def _undo(self, _: str) -> bool:
        del self.turns[self._last_question() :]
        return True

    def _last_question(self) -> int:
        for place in range(len(self.turns) - 1, -1, -1):
            if self.turns[place]["role"] == "user":
                return place
        raise RequestError("there is no question yet")

    def _save(self, name: str) -> bool:
        if not name:
            raise RequestError("/save: expected a file name")
        record = {"model": self.engine.summary.name, "messages": self.messages}
        try:
            with open(name, "x", encoding="utf-8") as file:
                json.dump(record, file, ensure_ascii=False, indent=1)
                file.write("\n")
        except OSError as error:
            raise RequestError(f"/save {name}: {error.strerror}") from None
        click.echo(f"[{len(self.messages)} messages in {name}]", err=True)
        return True

    def _load(self, name: str) -> bool:
        try:
            with open(name, encoding="utf-8") as file:
                messages = json.load(file)["messages"]
        except OSError as error:
            raise RequestError(f"/load {name}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise RequestError(f"/load {name}: no conversation that /save wrote ({error})") from None
        self.system, self.turns = _checked_messages(name, messages)
        click.echo(f"[{len(messages)} messages from {name}]", err=True)
        return True

    def _quit(self, _: str) -> bool:
        return False


def _checked_messages(name: str, messages: object) -> tuple[str | None, list[dict[str, str]]]:
    """(system message, turns) of a saved conversation. Raises RequestError if it is none."""
    system, turns = None, []
    for at, message in enumerate(messages if isinstance(messages, list) else [messages]):
        texts = isinstance(message, dict) and all(isinstance(value, str) for value in message.values())
        role = message.get("role") if texts else None
        if role not in ("system", "user", "assistant") or "content" not in message or role == "system" and at:
            raise RequestError(f"/load {name}: message {at} is not a message of a user, assistant or first system")
        if role == "system":
            system = message["content"]
        else:
            turns.append(message)
    return system, turns


def converse(chat: Chat) -> int:
    """Reads lines until the end, from the terminal or a pipe; the exit code: 2 if a piped line could not be answered."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        click.echo("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves", err=True)
        _handle_all(chat, _typed_lines(chat.commands), interactive=True)
        return 0
    return _handle_all(chat, (checked_text(line.rstrip("\r\n")) for line in sys.stdin), interactive=False)


def checked_text(text: str) -> str:
    """The text itself. Raises RequestError if it holds bytes that were no UTF-8 on the way in."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the text is not valid UTF-8 at character {error.start}: convert it first") from None
    return text


def _handle_all(chat: Chat, lines: Iterable[str], *, interactive: bool) -> int:
    code = 0
    for line in lines:
        try:
            if not chat.handle(line):
                break
        except KeyboardInterrupt:
            if not interactive:
                raise
            click.echo("[stopped]", err=True)
        except EngineError as error:
            click.echo(f"tandem: {error}", err=True)
            code = 2
    return code


def _typed_lines(commands: Iterable[str]) -> Iterator[str]:
    """Lines edited in the terminal with history and completion of commands. Ctrl-C drops the line, Ctrl-D ends."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event) -> None:
        event.current_buffer.insert_text("\n")

    completer = WordCompleter(sorted(commands), sentence=True)
    session: PromptSession = PromptSession(completer=completer, key_bindings=keys, complete_while_typing=False)
    while True:
        try:
            yield session.prompt("> ")
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
