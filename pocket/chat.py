"""Conversations made from the training text itself: code and its docstrings, documentation and its headings.

In: documents of the corpus. Out: lists of messages (and tools) for the chat template. No sentence comes from another
model: answers are docstrings, code and headings of the text, and the frames around them are written here.
"""

import ast
import json
import random
import re
import textwrap
from collections.abc import Iterator

import exercises
import smalltalk
import toolcalls

MAX_SOURCE_LINES, MAX_CHARS = 60, 9000
SHORT_BODY_LINES, SOLO_BODY_LINES = 8, 25
Message = dict
Conversation = dict  # {"messages": [...], "tools": [...] or absent}


def turn(rng: random.Random, user: str, answer: str, thought: str, thinking_share: float = 0.3) -> Conversation:
    """One question and answer, with the thought in some conversations."""
    reply = {"role": "assistant", "content": answer}
    if thought and rng.random() < thinking_share:
        reply["reasoning_content"] = thought
    messages = [{"role": "user", "content": user}, reply]
    if rng.random() < 0.15:
        messages.insert(0, {"role": "system", "content": rng.choice(smalltalk.SYSTEM_PROMPTS)})
    return {"messages": messages}


def fenced(code: str) -> str:
    """Code as a Markdown block."""
    return f"```python\n{code.rstrip()}\n```"


def paragraph(doc: str) -> str:
    """First paragraph of a docstring on one line, ending with a full stop; empty if it is no prose."""
    first = re.split(r"\n\s*\n|\n\s*[:@-]", doc.strip())[0]
    text = " ".join(first.split())
    text = re.sub(r":\w+:`~?([^`<]+?)(?: <[^>]*>)?`", r"`\1`", text).replace("``", "`")
    if not 15 <= len(text) <= 400 or not text[0].isalpha() or " " not in text:
        return ""
    return text if text[-1] in ".!?" else text.rstrip(":;,") + "."


def lower_first(text: str) -> str:
    """'Return the x.' -> 'return the x.', unless the first word is a name."""
    head = text.split()[0]
    return text[0].lower() + text[1:] if head[1:].islower() else text


def join_names(names: list[str]) -> str:
    """`a`, `b` and `c`."""
    quoted = [f"`{name}`" for name in names]
    return quoted[0] if len(quoted) == 1 else ", ".join(quoted[:-1]) + " and " + quoted[-1]


def _does_nothing(statement: ast.stmt) -> bool:
    """pass, `...`, a docstring, or raise NotImplementedError."""
    if isinstance(statement, ast.Raise):
        return "NotImplemented" in ast.unparse(statement)
    constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return constant or isinstance(statement, ast.Pass)


class Function:
    """A function of the text: source without surrounding indentation, docstring, and facts read from its tree."""

    def __init__(self, node: ast.FunctionDef, lines: list[str], owner: str):
        self.node, self.owner = node, owner
        start = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
        self.source = textwrap.dedent("\n".join(lines[start : node.end_lineno]))
        self.doc = ast.get_docstring(node) or ""
        self.summary = paragraph(self.doc)
        body = node.body[1:] if self.doc else node.body
        self.body_lines = (body[-1].end_lineno - body[0].lineno + 1) if body else 0
        self.head = self._head(lines, start, node)
        self.trivial = all(map(_does_nothing, body))
        self.bare = self._bare(lines, start, node, body) if self.doc and body else self.source

    def _head(self, lines: list[str], start: int, node: ast.FunctionDef) -> str:
        end = node.body[0].end_lineno if self.doc else node.body[0].lineno - 1
        return textwrap.dedent("\n".join(lines[start:end]))

    def _bare(self, lines: list[str], start: int, node: ast.FunctionDef, body: list[ast.stmt]) -> str:
        return textwrap.dedent("\n".join(lines[start : node.body[0].lineno - 1] + lines[body[0].lineno - 1 : node.end_lineno]))

    @property
    def signature(self) -> str:
        """`name(a, b=1)` as Python writes it."""
        return f"{self.node.name}({ast.unparse(self.node.args)})"

    @property
    def arguments(self) -> list[str]:
        """Names of the parameters, without self and cls."""
        a = self.node.args
        names = [arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
        return [name for name in names if name not in ("self", "cls")]

    def facts(self) -> list[str]:
        """Sentences about parameters, results, exceptions and calls, read from the code."""
        out = []
        defaults = dict(zip([a.arg for a in self.node.args.args][::-1], self.node.args.defaults[::-1], strict=False))
        if self.arguments:
            shown = [f"`{n}`" + (f" (default `{ast.unparse(defaults[n])}`)" if n in defaults else "") for n in self.arguments]
            out.append("It takes " + (", ".join(shown[:-1]) + " and " if len(shown) > 1 else "") + shown[-1] + ".")
        walked = list(ast.walk(self.node))
        results = [ast.unparse(n.value) for n in walked if isinstance(n, ast.Return) and n.value is not None]
        if any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in walked):
            out.append("It is a generator.")
        elif len(set(results)) == 1 and len(results[0]) < 60:
            out.append(f"It returns `{results[0]}`.")
        elif results:
            out.append(f"It returns in {len(results)} places, at the end with `{results[-1]}`." if len(results[-1]) < 60 else
                       f"It returns in {len(results)} places.")  # fmt: skip
        raised = sorted({ast.unparse(n.exc.func) for n in walked if isinstance(n, ast.Raise) and isinstance(n.exc, ast.Call)})
        if raised:
            out.append(f"It raises {join_names(raised[:3])} when something is wrong.")
        called = [ast.unparse(n.func) for n in walked if isinstance(n, ast.Call) and isinstance(n.func, (ast.Name, ast.Attribute))]
        called = [c for c in dict.fromkeys(called) if len(c) < 30 and c not in raised and "\n" not in c]
        if called:
            out.append(f"On the way it calls {join_names(called[:4])}.")
        if any(isinstance(n, (ast.For, ast.While)) for n in walked):
            loops = [n for n in walked if isinstance(n, ast.For)]
            if loops and len(ast.unparse(loops[0].iter)) < 40:
                out.append(f"It loops over `{ast.unparse(loops[0].iter)}`.")
        return out


def functions(tree: ast.Module, lines: list[str]) -> Iterator[Function]:
    """Functions and methods of a module that are worth a conversation."""
    for outer in tree.body:
        members = outer.body if isinstance(outer, ast.ClassDef) else [outer]
        owner = outer.name if isinstance(outer, ast.ClassDef) else ""
        for node in members:
            if isinstance(node, ast.FunctionDef) and 2 <= node.end_lineno - node.lineno <= MAX_SOURCE_LINES:
                yield Function(node, lines, owner)


WRITE = (
    "Write a Python function `{sig}` that does this: {doc}",
    "Write the function `{sig}`. {doc}",
    "I need a Python function `{name}` with the signature `{sig}`. {doc}",
    "Please implement `{sig}` in Python. {doc}",
    "Can you write `{name}({args})` for me? {doc}",
    "{doc}\n\nWrite this as a Python function called `{name}`.",
)
COMPLETE = (
    "Complete this function:\n\n{head}", "Write the body of this function:\n\n{head}", "{head}\n\nFinish this function.",
    "Fill in the code for this signature and docstring:\n\n{head}", "Implement this:\n\n{head}",
)  # fmt: skip
EXPLAIN = (
    "Explain this function:\n\n{code}", "What does this function do?\n\n{code}", "{code}\n\nWhat does this do?",
    "Can you explain this Python code?\n\n{code}", "Please describe what `{name}` does.\n\n{code}",
    "Tell me in a few sentences what this code does:\n\n{code}",
)  # fmt: skip
DOCUMENT = ("Write a docstring for this function:\n\n{code}", "{code}\n\nAdd a docstring.", "Document this function:\n\n{code}")
MODULE = (
    "What does the module `{module}` offer?", "What is in the module `{module}`?", "Give me an overview of this module.",
    "What can I do with `{module}`?", "Summarise this module.", "Which functions and classes does this module have?",
)  # fmt: skip


def about_function(rng: random.Random, f: Function) -> Conversation:
    """Write, complete, explain or document one function."""
    names = {"sig": f.signature, "name": f.node.name, "args": ", ".join(f.arguments), "doc": f.summary}
    kind = rng.choices(("complete", "write", "explain", "document"), (4, 3, 4, 1))[0]
    if f.owner and kind == "write":
        kind = "complete"
    facts = " ".join(f.facts()[:4])
    if kind in ("complete", "write"):
        frames = COMPLETE if kind == "complete" else WRITE
        user = rng.choice(frames).format(head=fenced(f.head), **names)
        lead = rng.choice(("", "", f"Here is `{f.node.name}`:\n\n", "Here is the function:\n\n"))
        tail = rng.choice(("", "", "", f"\n\n{facts}")) if facts else ""
        thought = f"I have to write `{f.node.name}`. {f.summary} " + (f"Its parameters: {', '.join(f.arguments)}. " if f.arguments else "")
        return turn(rng, user, lead + fenced(f.source) + tail, thought + rng.choice(smalltalk.WRITE_THOUGHTS))
    if kind == "document":
        user = rng.choice(DOCUMENT).format(code=fenced(f.bare))
        return turn(rng, user, fenced(f.head), f"The function is called `{f.node.name}`. {facts} The docstring should say so.")
    user = rng.choice(EXPLAIN).format(code=fenced(f.bare if rng.random() < 0.8 else f.source), **names)
    owner = f" is a method of `{f.owner}`. In short" if f.owner else ""
    opening = rng.choice((f"`{f.node.name}`{owner}: {lower_first(f.summary)}", f"{f.summary}", f"This is `{f.node.name}`. {f.summary}"))
    thought = f"The function is `{f.node.name}`" + (f", a method of `{f.owner}`" if f.owner else "") + f". {facts}"
    return turn(rng, user, f"{opening}\n\n{facts}".strip(), thought)


def about_module(rng: random.Random, tree: ast.Module, path: str) -> Conversation | None:
    """What a module offers: its docstring and the first lines of its public names."""
    intro = paragraph(ast.get_docstring(tree) or "")
    items, outline = [], []
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        line = paragraph(ast.get_docstring(node) or "")
        if isinstance(node, ast.ClassDef):
            methods = [m.name for m in node.body if isinstance(m, ast.FunctionDef) and not m.name.startswith("_")]
            bases = ", ".join(map(ast.unparse, node.bases))
            outline.append(f"class {node.name}({bases}):" if bases else f"class {node.name}:")
            outline += [f"    def {m}(...)" for m in methods[:5]] or ["    ..."]
            items.append(f"- `{node.name}`: {line}" if line else f"- the class `{node.name}`" + (f" with {join_names(methods[:4])}" if methods else ""))
        else:
            outline.append(f"def {node.name}({ast.unparse(node.args)})")
            items.append(f"- `{node.name}`: {line}" if line else f"- the function `{node.name}`")
    if not intro or not 2 <= len(items) <= 14:
        return None
    module = re.sub(r"^(src|lib|Lib)/", "", path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    user = rng.choice(MODULE).format(module=module) + "\n\n" + fenced(f'"""{ast.get_docstring(tree).strip()[:300]}"""\n\n' + "\n".join(outline))
    answer = f"{intro}\n\n{rng.choice(('It offers', 'The public names are', 'You find there'))}:\n\n" + "\n".join(items)
    return turn(rng, user, answer, f"The module is `{module}` and has {len(items)} public names. I list them.")


HEADING = re.compile(r"^(?P<title>[A-Z][^\n]{4,60})\n(?P<rule>[=\-~^*+#])(?P=rule){3,}\n\n?|^#{1,3} (?P<md>[A-Z][^\n]{4,60})\n\n?", re.M)
ASK = ("What can you tell me about {topic}?", "Explain {topic}.", "{title}: what is that about?", "Tell me about {topic}.",
       "I am reading the documentation of {source}. What does it say about {topic}?", "In {source}, what about {topic}?")  # fmt: skip


def about_docs(rng: random.Random, text: str, source: str) -> Iterator[Conversation]:
    """Questions about sections of documentation, answered with what the section says first."""
    matches = list(HEADING.finditer(text))
    for match, following in zip(matches, [*matches[1:], None], strict=False):
        section = text[match.end() : following.start() if following else match.end() + 3000].strip()
        title = (match["title"] or match["md"]).strip()
        prose = [p for p in re.split(r"\n\s*\n", section) if p[:1].isalpha() and not p.startswith("..")][:3]
        answer = "\n\n".join(" ".join(p.split()) for p in prose)
        answer = re.sub(r"\{[\w:-]+\}(?=`)", "", answer)
        answer = re.sub(r":[\w:]+:`~?([^`<]+?)(?: <[^>]*>)?`", r"`\1`", answer).replace("``", "`")
        if not 120 <= len(answer) <= 1500 or re.search(r"[|{}<>]{2}|https?://\S{60}", answer):
            continue
        names = {"title": title, "topic": lower_first(title), "source": source}
        yield turn(rng, rng.choice(ASK).format(**names), answer, f"The question is about {lower_first(title)}, in {source}.", 0.2)


def tool_use(rng: random.Random, f: Function, path: str) -> Conversation:
    """A request, one call in the model's syntax, the tool's answer and a closing sentence."""
    return smalltalk.tool_conversation(rng, path, f.node.name, f.source, f.summary)


def conversations(kind: str, source: str, path: str, text: str, seed: int) -> list[Conversation]:
    """Everything that one document gives; at most a few per document."""
    rng = random.Random(f"{seed}:{source}:{path}")
    package = source.split()[0]
    if kind == "docs":
        found = list(about_docs(rng, text, package))
        return rng.sample(found, min(3, len(found)))
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    if re.search(r"(^|/)tests?[/.]|test_", path):
        return []
    made = [f for f in functions(tree, text.split("\n")) if f.summary and not f.trivial]
    chosen = _mostly_short(rng, made, 8)
    out = [about_function(rng, f) for f in chosen]
    if chosen and rng.random() < 0.06:
        out.append(tool_use(rng, chosen[0], path))
    module = about_module(rng, tree, path)
    if module:
        out.append(module)
    return [c for c in out if sum(len(str(m.get("content"))) for m in c["messages"]) < MAX_CHARS]


def _mostly_short(rng: random.Random, made: list[Function], count: int) -> list[Function]:
    """At most count of the functions; those with short bodies, which a small model can learn to write, come first."""
    order = sorted(made, key=lambda f: rng.random() * (1.0 if f.body_lines <= SHORT_BODY_LINES else 3.0))
    return order[:count]


def bare_functions(text: str) -> list[str]:
    """Documented functions of a module that do something, each as a text of its own: how raw completion is used."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found = functions(tree, text.split("\n"))
    return [f.source.strip("\n") + "\n" for f in found if f.doc and not f.trivial and f.body_lines <= SOLO_BODY_LINES]


def practice(count: int, seed: int) -> list[Conversation]:
    """Exercises, tool calls and small talk, all from frames of ours."""
    rng, out = random.Random(f"{seed}:practice"), small_talk(count // 5, seed)
    for _ in range(count * 2 // 5):
        user, answer, thought = exercises.conversation(rng, exercises.sample(rng))
        out.append(turn(rng, user, answer, thought, 0.4))
        out.append(toolcalls.conversation(rng))
    rng.shuffle(out)
    return out


def small_talk(count: int, seed: int) -> list[Conversation]:
    """Conversations about the model itself and first steps in Python, from the frames of `smalltalk`."""
    rng = random.Random(f"{seed}:smalltalk")
    out = []
    for _ in range(count):
        messages: list[Message] = []
        for question, answer in smalltalk.exchange(rng):
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        if rng.random() < 0.25:
            messages[-1]["reasoning_content"] = rng.choice(smalltalk.TALK_THOUGHTS).format(question=messages[-2]["content"])
        if rng.random() < 0.2:
            messages.insert(0, {"role": "system", "content": rng.choice(smalltalk.SYSTEM_PROMPTS)})
        out.append({"messages": messages})
    return out


def renderer():
    """The chat template as a function of a conversation."""
    from pathlib import Path

    import jinja2.sandbox

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string((Path(__file__).parent / "chat_template.jinja").read_text())
    return lambda conversation: template.render(**conversation)
