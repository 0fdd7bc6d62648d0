"""Conversations in which the model calls a tool: known tools, and invented ones whose names and arguments it must copy.

In: a seed. Out: conversations for the chat template, with tools, one or two calls, the tool's answer and a closing
sentence; some need no tool. One in eight invented tools is held out (by hash of its name) for `evaluate.py`.
"""

import hashlib
import json
import random

from smalltalk import SYSTEM_PROMPTS

VERBS = ("get", "find", "create", "delete", "update", "send", "start", "stop", "open", "close", "list", "count", "check",
         "add", "remove", "show", "move", "copy", "rename", "read", "save", "load", "book", "cancel", "convert", "fetch")  # fmt: skip
NOUNS = ("user", "order", "invoice", "ticket", "message", "meeting", "song", "photo", "report", "task", "room", "light",
         "timer", "account", "customer", "product", "review", "recipe", "flight", "hotel", "train", "parcel", "note",
         "contact", "payment", "server", "backup", "job", "branch", "issue", "release", "device", "sensor", "book",
         "page", "folder", "document", "image", "video", "playlist", "event", "reminder", "price", "stock")  # fmt: skip
NAMES = ("Ann", "Bob", "Carla", "David", "Emma", "Frank", "Grace", "Henry", "Ines", "Jack", "Karin", "Liam", "Mia", "Noah")
CITIES = ("Paris", "Oslo", "Lima", "Cairo", "Vienna", "Tokyo", "Nairobi", "Quito", "Berlin", "Madrid", "Rome", "Delhi",
          "London", "Boston", "Seoul", "Dublin", "Prague", "Athens", "Lisbon", "Zurich")  # fmt: skip
TOPICS = ("weekly report", "holiday plans", "new release", "budget", "lunch", "broken build", "team meeting", "code review",
          "project start", "garden party", "water bill", "spare parts", "road map", "test results")  # fmt: skip
WORDS = ("red", "blue", "fast", "slow", "small", "large", "north", "south", "alpha", "beta", "daily", "final", "main", "draft")
PATHS = ("notes.txt", "src/app.py", "README.md", "data/table.csv", "docs/index.rst", "tests/test_app.py", "setup.cfg")
# parameter: JSON type, what it is, how values are drawn
PARAMETERS = {
    "id": ("integer", "number of the {noun}", lambda r: r.randint(1, 9999)),
    "name": ("string", "name of the {noun}", lambda r: r.choice(NAMES)),
    "city": ("string", "name of the city", lambda r: r.choice(CITIES)),
    "title": ("string", "title of the {noun}", lambda r: r.choice(TOPICS)),
    "count": ("integer", "how many", lambda r: r.randint(1, 50)),
    "path": ("string", "path of the file", lambda r: r.choice(PATHS)),
    "color": ("string", "a colour", lambda r: r.choice(("red", "green", "blue", "white", "black", "yellow"))),
    "tag": ("string", "a tag", lambda r: r.choice(WORDS)),
    "amount": ("number", "an amount", lambda r: round(r.uniform(1, 500), r.choice((0, 1, 2)))),
    "minutes": ("integer", "time in minutes", lambda r: r.randint(1, 120)),
    "date": ("string", "date as YYYY-MM-DD", lambda r: f"20{r.randint(20, 30)}-{r.randint(1, 12):02}-{r.randint(1, 28):02}"),
    "email": ("string", "e-mail address", lambda r: f"{r.choice(NAMES).lower()}@example.com"),
    "active": ("boolean", "whether it is active", lambda r: r.random() < 0.5),
    "query": ("string", "text to look for", lambda r: r.choice(TOPICS)),
}
DESCRIPTIONS = ("{Verb} {a} {noun}.", "{Verb} the {noun}.", "{Verb} one {noun} and return the result.", "{Verb} {a} {noun} by its {first}.")
REQUESTS = (
    "{Verb} the {noun} with {pairs}.", "Please {verb} {a} {noun} with {pairs}.", "Can you {verb} the {noun} with {pairs}?",
    "{Verb} {a} {noun}: {colons}.", "Call `{tool}` with {pairs}.", "Use {tool} with {pairs}.", "I want to {verb} {a} {noun}, {pairs}.",
)  # fmt: skip
# tool, description, parameters, requests, answer of the tool, closing sentence; {..} are drawn values
KNOWN = (
    ("get_weather", "Get the weather of a city.", "city", ("What is the weather in {city}?", "How is the weather in {city} today?", "Is it raining in {city}?", "Weather in {city}?", "Do I need an umbrella in {city}?"), '{{"temperature": {t}, "sky": "{sky}"}}', "It is {sky} in {city}, {t} degrees."),
    ("get_time", "Get the current time of a city.", "city", ("What time is it in {city}?", "Tell me the time in {city}.", "How late is it in {city}?"), "{clock}", "It is {clock} in {city}."),
    ("calculate", "Evaluate an arithmetic expression.", "expression", ("What is {expression}?", "Compute {expression}.", "How much is {expression}?", "Calculate {expression} for me."), "{value}", "{expression} is {value}."),
    ("read_file", "Read a text file.", "path", ("What is in {path}?", "Read {path}.", "Show me {path}.", "Open the file {path}."), "{text}", "`{path}` says: {text}"),
    ("list_files", "List the files in a folder.", "folder", ("Which files are in {folder}?", "List the files in {folder}.", "What is in the folder {folder}?"), "{path}\nnotes.md", "There are two files: `{path}` and `notes.md`."),
    ("search", "Search the project for a text.", "query", ("Search for {query}.", "Find {query} in the project.", "Where is {query} mentioned?"), "{path}: {query}", "I found it in `{path}`."),
    ("run_tests", "Run the tests of a file.", "path", ("Run the tests in {path}.", "Do the tests in {path} pass?"), "{n} passed", "All {n} tests pass."),
    ("run_python", "Run Python code and return its output.", "code", ("Run {code}.", "What does `{code}` print?", "Execute {code}."), "{value}", "It prints {value}."),
    ("send_email", "Send an e-mail.", "email title", ("Send an e-mail to {email} about the {title}.", "Write to {email}: {title}."), "sent", "The e-mail to {email} is sent."),
    ("set_timer", "Set a timer.", "minutes", ("Set a timer for {minutes} minutes.", "Wake me in {minutes} minutes."), "ok", "The timer runs for {minutes} minutes."),
    ("translate", "Translate a text.", "text language", ("Translate \"{text}\" to {language}.", "How do you say \"{text}\" in {language}?"), "{word}", "In {language} it is \"{word}\"."),
    ("create_event", "Add an event to the calendar.", "title date", ("Put the {title} on {date} in my calendar.", "Create an event: {title}, {date}."), "created", "The {title} is in your calendar on {date}."),
)  # fmt: skip
SKIES = ("sunny", "cloudy", "rainy", "windy", "clear", "foggy")
LANGUAGES = ("French", "German", "Spanish", "Italian", "Dutch", "Swedish")
SENTENCES = ("The meeting is at noon.", "Buy milk.", "Remember the keys.", "Version two is ready.", "See you soon.", "Good morning.")
CLOSINGS = ("Done: {result}.", "The answer is {result}.", "`{tool}` returned {result}.", "It worked: {result}.", "The result: {result}.")
RESULTS = ("ok", "done", "created", "saved", "not found", "3 results", "42", "true", "queued", "finished")
THOUGHTS = ("I need `{tool}` for this.", "The user wants this done. `{tool}` does it.", "I call `{tool}` with {pairs}.", "`{tool}` fits: {description}")
NO_TOOL = (("Hello!", "Hello! What can I do for you?"), ("Thanks!", "You are welcome."), ("Who are you?", "I am Tandem Pocket, a small language model."),
           ("Which tools do you have?", "I can call {tools}."), ("What can you do?", "I can answer questions about Python and call {tools}."))  # fmt: skip


def is_held_out(tool: str) -> bool:
    """Whether an invented tool is kept for evaluation."""
    return hashlib.blake2b(tool.encode()).digest()[0] % 8 == 0


def schema(name: str, description: str, parameters: dict[str, tuple[str, str]]) -> dict:
    """A tool as clients send it. parameters: name -> (type, description)."""
    properties = {key: {"type": kind, "description": text} for key, (kind, text) in parameters.items()}
    function = {"name": name, "description": description, "parameters": {"type": "object", "properties": properties, "required": list(parameters)}}
    return {"type": "function", "function": function}


def _shown(value) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _pairs(arguments: dict) -> str:
    parts = [f"{key} {_shown(value)}" for key, value in arguments.items()]
    return " and ".join(parts) if len(parts) < 3 else ", ".join(parts[:-1]) + " and " + parts[-1]


def invented(rng: random.Random, held_out: bool) -> tuple[dict, str, dict]:
    """(tool, request, arguments) of a tool made from a verb and a noun."""
    while True:
        verb, noun = rng.choice(VERBS), rng.choice(NOUNS)
        name = f"{verb}_{noun}"
        if is_held_out(name) == held_out:
            break
    keys = rng.sample(sorted(PARAMETERS), rng.choices((1, 2, 3), (4, 4, 2))[0])
    arguments = {key: PARAMETERS[key][2](rng) for key in keys}
    words = {"verb": verb, "Verb": verb.capitalize(), "noun": noun, "tool": name, "first": keys[0], "pairs": _pairs(arguments)}
    words["a"] = "an" if noun[0] in "aeio" else "a"
    words["colons"] = ", ".join(f"{key}: {_shown(value)}" for key, value in arguments.items())
    parameters = {key: (PARAMETERS[key][0], PARAMETERS[key][1].format(noun=noun)) for key in keys}
    tool = schema(name, rng.choice(DESCRIPTIONS).format(**words), parameters)
    return tool, rng.choice(REQUESTS).format(**words), arguments


def _values(rng: random.Random) -> dict:
    a, b, sign = rng.randint(2, 99), rng.randint(2, 99), rng.choice("+-*")
    value = {"+": a + b, "-": a - b, "*": a * b}[sign]
    return {
        "city": rng.choice(CITIES), "t": rng.randint(-5, 35), "sky": rng.choice(SKIES), "expression": f"{a} {sign} {b}",
        "value": value, "code": f"print({a} {sign} {b})", "clock": f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}",
        "path": rng.choice(PATHS), "folder": rng.choice(("src", "docs", ".", "tests", "data", "lib/core")),
        "query": rng.choice((*TOPICS, "TODO", "parse_args", "Config", "main")), "n": rng.randint(1, 30),
        "email": f"{rng.choice(NAMES).lower()}@example.com", "title": rng.choice(TOPICS), "minutes": rng.randint(1, 90),
        "text": rng.choice(SENTENCES), "language": rng.choice(LANGUAGES), "word": rng.choice(WORDS),
        "date": f"20{rng.randint(20, 30)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}",
    }  # fmt: skip


def known(rng: random.Random) -> tuple[dict, str, dict, str, str]:
    """(tool, request, arguments, answer of the tool, closing sentence) of one of KNOWN."""
    name, description, keys, requests, answer, closing = rng.choice(KNOWN)
    values = _values(rng)
    arguments = {key: values[key] for key in keys.split()}
    kinds = {int: "integer", float: "number", str: "string"}
    tool = schema(name, description, {key: (kinds[type(value)], f"the {key}") for key, value in arguments.items()})
    return tool, rng.choice(requests).format(**values), arguments, answer.format(**values), closing.format(**values)


def _others(rng: random.Random, tool: dict, held_out: bool) -> list[dict]:
    """The tool among up to three others, in a random order."""
    tools = {tool["function"]["name"]: tool}
    for _ in range(rng.choice((0, 0, 1, 2, 3))):
        other = known(rng)[0] if rng.random() < 0.4 else invented(rng, held_out)[0]
        tools.setdefault(other["function"]["name"], other)
    out = list(tools.values())
    rng.shuffle(out)
    return out


def conversation(rng: random.Random) -> dict:
    """One conversation for training."""
    if rng.random() < 0.5:
        tool, request, arguments, result, closing = known(rng)
    else:
        tool, request, arguments = invented(rng, False)
        result = rng.choice(RESULTS)
        closing = rng.choice(CLOSINGS).format(result=result, tool=tool["function"]["name"])
    name, tools = tool["function"]["name"], _others(rng, tool, False)
    if rng.random() < 0.07:
        user, answer = rng.choice(NO_TOOL)
        offered = " and ".join(f"`{t['function']['name']}`" for t in tools)
        return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": answer.format(tools=offered)}], "tools": tools}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}
    if rng.random() < 0.4:
        words = {"tool": name, "pairs": _pairs(arguments), "description": tool["function"]["description"]}
        call["reasoning_content"] = rng.choice(THOUGHTS).format(**words)
    messages = [{"role": "user", "content": request}, call]
    if rng.random() < 0.3:
        messages.insert(0, {"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    if rng.random() < 0.7:
        messages += [{"role": "tool", "content": result}, {"role": "assistant", "content": closing}]
    return {"messages": messages, "tools": tools}


def questions(count: int, seed: int) -> list[dict]:
    """Requests for evaluation: user, tools, name and arguments; half of known tools, half of tools never trained on."""
    rng, out = random.Random(f"{seed}:toolcalls"), []
    for i in range(count):
        tool, request, arguments = known(rng)[:3] if i % 2 else invented(rng, True)
        out.append({"user": request, "tools": _others(rng, tool, i % 2 == 0), "name": tool["function"]["name"],
                    "arguments": arguments, "known": bool(i % 2)})  # fmt: skip
    return out
