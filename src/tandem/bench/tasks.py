"""Prompts for measuring drafts and routing: nine kinds of task, two or three conversations of each, written for this.

Drafts are right more often where the text repeats its prompt (edit, summarise) or follows a form (code, tool call) than
in free prose (story, chat), so one figure for a model says little.
"""

from dataclasses import dataclass

from tandem.errors import SettingError, nearest
from tandem.text.template import ChatTemplate
from tandem.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TaskPrompt:
    """One conversation; thinking: whether the template is asked for a reasoning block first."""

    messages: tuple[dict, ...]
    tools: tuple[dict, ...] = ()
    thinking: bool = False


def _ask(text: str, **more) -> TaskPrompt:
    return TaskPrompt(({"role": "user", "content": text},), **more)


_TO_COMPLETE = '''```python
def merge_sorted(a: list[int], b: list[int]) -> list[int]:
    """Merge two sorted lists into one sorted list in linear time."""
```'''

_TO_EDIT = '''```python
import csv


class Inventory:
    def __init__(self, path):
        self.path = path
        self.items = {}

    def load(self):
        f = open(self.path)
        for row in csv.reader(f):
            self.items[row[0]] = int(row[1])
        f.close()

    def take(self, name, n):
        if name in self.items:
            if self.items[name] >= n:
                self.items[name] = self.items[name] - n
                return True
            else:
                return False
        else:
            return False

    def total(self):
        t = 0
        for name in self.items:
            t = t + self.items[name]
        return t
```'''

_TO_RENAME = '''```python
def mean(xs):
    """Return the arithmetic mean of a list of numbers."""
    s = 0.0
    for x in xs:
        s += x
    return s / len(xs)


def variance(xs):
    """Return the population variance of a list of numbers."""
    m = mean(xs)
    s = 0.0
    for x in xs:
        s += (x - m) ** 2
    return s / len(xs)
```'''

_TO_SUMMARISE = (
    "The harbour of Lindesund was dug in 1874, when the railway reached the coast and timber could be brought down "
    "from the valleys in a day instead of a week. For forty years the town lived on that timber: two sawmills, a "
    "rope works and a yard that built small schooners. When steel ships replaced them, the yard turned to repairs, "
    "and the rope works closed. The second life of the harbour began with herring. Between 1921 and 1958 up to "
    "ninety boats landed their catch on the east quay, and a cannery employed three hundred people, most of them "
    "women, who were paid by the tray. The herring stayed away after 1958, for reasons that are still argued over: "
    "colder water, too many nets, or both. Today the quay belongs to a diving school and to the ferry, which takes "
    "visitors to the bird cliffs from May to September. The old cannery holds the town archive. Its most used "
    "document is a ledger of wages, in which grandchildren look for the names of their grandmothers."
)

_MANUAL = (
    "A queue passes objects between threads. `put(item)` adds an object and waits while the queue is full; `get()` "
    "removes one and waits while it is empty. Both take a timeout in seconds, after which they raise `Full` or "
    "`Empty`. Each object that was fetched should be followed by a call of `task_done()` once the work on it has "
    "ended: `join()` blocks until that many calls were made. A queue created with `maxsize` 0 has no limit, so a "
    "fast producer can use up all memory. `qsize()` returns an approximate number, since other threads may change "
    "it before the caller looks at it."
)

_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_forecast",
        "description": "Weather forecast of a town",
        "parameters": {
            "type": "object",
            "properties": {
                "town": {"type": "string", "description": "name of the town"},
                "days": {"type": "integer", "description": "how many days ahead, 1 to 7"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["town", "days"],
        },
    },
}
_READ_FILE = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a text file of the project",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string", "description": "path from the project's root"},
                "first_line": {"type": "integer"},
                "last_line": {"type": "integer"},
            },
            "required": ["path"],
        },
    },
}
_WRITE_FILE = {
    "type": "function",
    "function": {
        "name": "write_file",
        "description": "Write a text file of the project, replacing what it held",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
            "required": ["path", "content"],
        },
    },
}

TASKS: dict[str, tuple[TaskPrompt, ...]] = {
    "code": (
        _ask(
            "Write a Python class LRUCache with a fixed capacity and the methods get(key) and put(key, value), each "
            "in constant time, with a docstring for every method."
        ),
        _ask(f"Complete this function:\n\n{_TO_COMPLETE}"),
        _ask(
            "Write a Python function that counts how often each word occurs in a text file, ignoring case, and "
            "prints the ten most frequent words.",
            thinking=True,
        ),
    ),
    "edit": (
        _ask(
            "Rewrite this class so that it closes its file even when a row is bad, uses `sum` in total, and raises "
            f"KeyError for unknown names. Give the whole class.\n\n{_TO_EDIT}"
        ),
        _ask(f"Add type hints to these two functions and change nothing else. Give the whole code.\n\n{_TO_RENAME}"),
        _ask(f"Rename `xs` to `numbers` and `s` to `total` everywhere. Give the whole code.\n\n{_TO_RENAME}"),
    ),
    "explain": (
        _ask("Explain how a hash table finds a value, and what happens when two keys land in the same place."),
        _ask("What does this function do, and how long does it take for a list of n numbers?\n\n" + _TO_RENAME),
        _ask("Why does a mirror swap left and right, but not up and down?", thinking=True),
    ),
    "summarise": (
        _ask(f"Summarise this text in three sentences.\n\n{_TO_SUMMARISE}"),
        _ask(f"Write a bullet list of the most important points of this manual page.\n\n{_MANUAL}"),
    ),
    "translate": (
        _ask(
            "Translate into German: The ferry leaves the island at seven in the morning. If the wind is too strong, "
            "it stays in the harbour, and the children do not have to go to school."
        ),
        _ask(
            "Translate into English: La bibliothèque du village est ouverte le mercredi et le samedi. On peut "
            "emprunter cinq livres pour trois semaines, et la bibliothécaire connaît tous les lecteurs par leur nom."
        ),
        _ask(f"Translate the first three sentences of this text into Spanish.\n\n{_TO_SUMMARISE}"),
    ),
    "maths": (
        _ask(
            "A tank holds 240 litres. One pipe fills it in 6 hours, a second one in 4 hours, and a leak empties it "
            "in 12 hours. How long does it take to fill the tank with both pipes open and the leak unrepaired? Show "
            "each step."
        ),
        _ask("Prove that the sum of the first n odd numbers is n squared.", thinking=True),
        _ask("Multiply 347 by 86 step by step, and check the result with a second method."),
    ),
    "story": (
        _ask("Write a short story about a lighthouse keeper who finds a letter that is addressed to nobody."),
        _ask("Tell a fairy tale in which a clock is the villain, in about two hundred words."),
    ),
    "chat": (
        _ask("Hello! Who are you, and what can you help me with?"),
        TaskPrompt(
            (
                {"role": "user", "content": "I have a free weekend and no plans at all."},
                {"role": "assistant", "content": "How nice! Would you like to be outside, or to stay in?"},
                {"role": "user", "content": "Outside, but it may rain. And I would like to learn something."},
            )
        ),
        _ask("My bread never rises properly. What am I doing wrong?", thinking=True),
    ),
    "tool call": (
        _ask("Will it rain in Bergen in the next three days? Please use celsius.", tools=(_WEATHER, _READ_FILE)),
        _ask("Look at lines 10 to 40 of src/config.py and tell me what they set.", tools=(_READ_FILE, _WRITE_FILE)),
        _ask(
            "Create the file notes/todo.md with a list of three things: renew the certificate, rotate the logs, "
            "update the manual.",
            tools=(_READ_FILE, _WRITE_FILE, _WEATHER),
            thinking=True,
        ),
    ),
}


def chosen(names: str | None) -> list[str]:
    """The tasks in a comma-separated list, None: all. Raises SettingError for an unknown one."""
    if names is None:
        return list(TASKS)
    wanted = [name.strip().replace("_", " ").replace("-", " ") for name in names.split(",")]
    for name in wanted:
        if name not in TASKS:
            raise SettingError(f"task {name!r} is unknown{nearest(name, TASKS)}")
    return list(dict.fromkeys(wanted))


def encode(prompt: TaskPrompt, template: ChatTemplate, tokenizer: Tokenizer) -> list[int]:
    """Token ids of the conversation in the model's own form; of its plain text for files without a chat template.

    Raises TemplateError.
    """
    if template.source is None:
        return tokenizer.encode("\n\n".join(message["content"] for message in prompt.messages), add_special=True)
    tools = list(prompt.tools) or None
    return template.encode(prompt.messages, tools, True, enable_thinking=prompt.thinking)
