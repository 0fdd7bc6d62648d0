"""Calls of Llama 3: JSON objects with `name` and `parameters`, bare or behind <|python_tag|>, and its older spellings.

In: text by a `Reader`. Out: deltas in a `Sink`. Behind <|python_tag|> also `NAME.call(key="value")`, and code for an
offered interpreter; <function=NAME>{...}</function>; what Hermes writes is read too.
"""

import ast
import json

from tandem.text.tools.coerce import dumped, parsed, quoted
from tandem.text.tools.hermes import Hermes, arguments_in, begins_call, fitted, read_json_calls
from tandem.text.tools.reader import Reading

PYTHON, FUNCTION, FUNCTION_END = "<|python_tag|>", "<function=", "</function>"
_INTERPRETERS = ("python", "code_interpreter", "ipython")
MAX_CODE_CHARS = 65_536


class Llama3(Hermes):
    """Reads one answer; `run` is the generator that does it."""

    bare = ("{", FUNCTION)
    inline = (PYTHON,)
    controls = {**Hermes.controls, PYTHON: PYTHON}

    def _bare_call(self, marker: str, used: str, end: int) -> Reading:
        if marker == PYTHON:
            return (yield from self._python())
        if marker == FUNCTION:
            return (yield from self._function(used, end))
        return (yield from super()._bare_call(marker, used, end))

    def _function(self, used: str, end: int) -> Reading:
        """Reads <function=NAME>{...}; text if no offered function is named."""
        reader, sink = self._reader, self._sink
        name, name_end = yield from reader.name(">", end)
        begins, _ = (yield from reader.ahead("{", offset=name_end)) if name in self._tools else (None, 0)
        if begins != "{":
            return sink.write(used)
        reader.record(used)
        reader.pos += name_end
        yield from reader.skip_space()
        parts: list[str] = []
        missing = yield from reader.json(parts.append)
        arguments = None if missing else arguments_in("".join(parts))
        if arguments is None:
            cut = bool(missing) and reader.ended
            return sink.flagged(reader.recorded(), "partial_tool_call" if cut else "malformed_tool_call")
        reader.recorded()
        tool = self._tools[name]
        sink.call(name, tool).end_whole(dumped(fitted(arguments, tool)))
        marker, end = yield from reader.ahead(FUNCTION_END)
        reader.pos += end if marker == FUNCTION_END else 0

    def _python(self) -> Reading:
        """Reads what follows <|python_tag|>: JSON calls, or code to the end of the answer."""
        reader, sink = self._reader, self._sink
        if (yield from begins_call(reader)):
            return (yield from read_json_calls(reader, sink, self._tools, PYTHON))
        parts: list[str] = []
        yield from reader.rest(parts.append)
        code = "".join(parts)
        if reader.reason != "eos":
            return sink.flagged(PYTHON + code, "partial_tool_call")
        name, arguments = _called(code)
        interpreter = next((name for name in _INTERPRETERS if name in self._tools), None)
        if name in self._tools:
            sink.call(name, self._tools[name]).end_whole(arguments)
        elif interpreter is not None:
            sink.call(interpreter, self._tools[interpreter]).end_whole(f'{{"code":{quoted(code)}}}')
        else:
            sink.flagged(PYTHON + code, "malformed_tool_call")


def _called(code: str) -> tuple[str | None, str]:
    """Name and arguments of `NAME.call(key=value)` or `NAME(key=value)` with literal values; (None, "") otherwise."""
    if len(code) > MAX_CODE_CHARS:
        return None, ""
    try:
        call = ast.parse(code.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None, ""
        function = call.func
        if isinstance(function, ast.Attribute) and function.attr == "call":
            function = function.value
        pairs = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        text = json.dumps(pairs, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None, ""
    return (function.id, text) if isinstance(function, ast.Name) and isinstance(parsed(text), dict) else (None, "")
