"""What tools a request offers: the lists of three APIs come in, one `Tool` per function goes out.

Also answers which JSON types a parameter may have, which decides how the raw text of an argument is read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tandem.errors import RequestError

MAX_TOOLS = 1024
MAX_NAME_CHARS = 256
MAX_REF_DEPTH = 32
MAX_SCHEMAS = 500
ANY_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_KIND_OF_VALUE = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


@dataclass(frozen=True)
class Tool:
    """One function. parameters: JSON Schema of its arguments object; strict: its calls must follow the schema."""

    name: str
    parameters: Mapping[str, object] = field(default_factory=dict)
    description: str = ""
    strict: bool = False

    def property_schema(self, key: str) -> object:
        """The schema of one argument; {} if the schema says nothing about it."""
        schema = resolved(self.parameters, self.parameters)
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and key in properties:
            return properties[key]
        extra = schema.get("additionalProperties")
        return extra if isinstance(extra, Mapping) else {}

    def types_of(self, key: str) -> frozenset[str]:
        """JSON types that the schema allows for one argument; all of them where it does not say."""
        return types_of(self.property_schema(key), self.parameters)

    def choices_of(self, key: str) -> tuple[object, ...] | None:
        """The values of `enum` or `const` of one argument, None if it has neither."""
        schema = resolved(self.property_schema(key), self.parameters)
        if "const" in schema:
            return (schema["const"],)
        choices = schema.get("enum")
        return tuple(choices) if isinstance(choices, (list, tuple)) else None

    @property
    def required(self) -> frozenset[str]:
        """Names of the arguments that every call must have."""
        required = resolved(self.parameters, self.parameters).get("required")
        return frozenset(key for key in required if isinstance(key, str)) if isinstance(required, list) else frozenset()


def read_tools(tools: Sequence[object] | None) -> dict[str, Tool]:
    """The functions in `tools` by name, in order; {} for None.

    Takes the shape of chat completions ({"type": "function", "function": {...}}), of the Responses API (the same, flat)
    and of the Messages API (`input_schema`). Entries of a `type` that is no function are left out: a model can call
    functions only. Raises RequestError that names the place for entries that cannot be read.
    """
    if tools is None:
        return {}
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise RequestError(f"tools: found {type(tools).__name__}, expected a list of functions")
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools: found {len(tools)}, at most {MAX_TOOLS} are allowed")
    found: dict[str, Tool] = {}
    for index, entry in enumerate(tools):
        tool = _read_tool(entry, f"tools[{index}]")
        if tool is None:
            continue
        if tool.name in found:
            raise RequestError(f"tools[{index}]: the name {tool.name!r} occurs twice; names must differ")
        found[tool.name] = tool
    return found


def _read_tool(entry: object, place: str) -> Tool | None:
    if isinstance(entry, Tool):
        return entry
    if not isinstance(entry, Mapping):
        raise RequestError(f"{place}: found {type(entry).__name__}, expected an object")
    function = entry.get("function", entry)
    kind = entry.get("type", "function")
    if kind not in ("function", "custom") or (function is entry and "name" not in entry):
        if isinstance(kind, str) and kind != "function":
            return None
        raise RequestError(f"{place}: found no name, expected a function with a name")
    if not isinstance(function, Mapping):
        raise RequestError(f"{place}.function: found {type(function).__name__}, expected an object")
    name = function.get("name")
    if not isinstance(name, str) or not name or len(name) > MAX_NAME_CHARS or set(name) & set("<>{}\"'\n\r"):
        raise RequestError(
            f"{place}: found the name {str(name)[:60]!r}, expected 1 to {MAX_NAME_CHARS} characters without brackets, "
            "braces, quotes and line breaks"
        )
    parameters = function.get("parameters", function.get("input_schema"))
    if parameters is not None and not isinstance(parameters, Mapping):
        found = type(parameters).__name__
        raise RequestError(f"{place}: found {found} as parameters, expected a JSON schema object")
    description = function.get("description")
    return Tool(
        name, parameters or {}, description if isinstance(description, str) else "", bool(function.get("strict"))
    )


def resolved(schema: object, root: object) -> Mapping[str, object]:
    """`schema` with a local `$ref` followed; {} for what is no schema object, leads outside, or goes in circles."""
    for _ in range(MAX_REF_DEPTH):
        if not isinstance(schema, Mapping):
            return {}
        ref = schema.get("$ref")
        if not isinstance(ref, str):
            return schema
        schema = _pointed_at(root, ref)
    return {}


def types_of(schema: object, root: object) -> frozenset[str]:
    """JSON types of the values that `schema` may allow; all types where it does not say. root: where `$ref` points."""
    return _types(schema, root, MAX_REF_DEPTH, [MAX_SCHEMAS])


def _types(schema: object, root: object, depth: int, left: list[int]) -> frozenset[str]:
    """left: how many more schemas may be looked at, so that references in circles cost no more."""
    schema = resolved(schema, root)
    left[0] -= 1
    if depth == 0 or left[0] < 0:
        return ANY_TYPES
    found = ANY_TYPES
    stated = schema.get("type")
    if isinstance(stated, str):
        found = frozenset({stated})
    elif isinstance(stated, (list, tuple)):
        found = frozenset(kind for kind in stated if isinstance(kind, str))
    if "const" in schema:
        found &= _kinds([schema["const"]])
    elif isinstance(schema.get("enum"), (list, tuple)):
        found &= _kinds(schema["enum"])
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        if isinstance(branches, (list, tuple)) and branches:
            found &= frozenset().union(*(_types(branch, root, depth - 1, left) for branch in branches[:64]))
    branches = schema.get("allOf")
    if isinstance(branches, (list, tuple)):
        for branch in branches[:64]:
            found &= _types(branch, root, depth - 1, left)
    if found is ANY_TYPES or not found:
        return _hinted(schema)
    return found | {"integer"} if "number" in found else found


def _hinted(schema: Mapping[str, object]) -> frozenset[str]:
    """Types of a schema that states none but speaks of one kind only."""
    if "properties" in schema:
        return frozenset({"object"})
    if "items" in schema or "prefixItems" in schema:
        return frozenset({"array"})
    return ANY_TYPES


def _kinds(values: Sequence[object]) -> frozenset[str]:
    return frozenset("null" if value is None else _KIND_OF_VALUE.get(type(value), "string") for value in values) | (
        {"integer"} if any(isinstance(value, float) and value.is_integer() for value in values) else set()
    )


def _pointed_at(root: object, ref: str) -> object:
    if not ref.startswith("#"):
        return None
    found = root
    for part in ref[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(part)
        elif isinstance(found, (list, tuple)) and part.isdigit() and int(part) < len(found):
            found = found[int(part)]
        else:
            return None
    return found
