"""What an answer consists of, piece by piece: plain frozen data that the formats make and the APIs send."""

from dataclasses import dataclass
from typing import Literal

Flag = Literal["malformed_tool_call", "partial_tool_call", "unknown_function"]


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks before it answers; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer; never empty. flag: this text is a tool call that could not be read, or was cut off."""

    text: str
    flag: Flag | None = None


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call begins. index counts the answer's calls from 0; flag: "unknown_function" if it was not offered."""

    index: int
    id: str
    name: str
    flag: Flag | None = None


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the JSON text of a call's arguments; never empty."""

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """A tool call ends. arguments: all fragments together, a JSON object if complete. Not complete: the answer was cut
    off inside the call, which must not be run; source is then its text as the model wrote it, else ''."""

    index: int
    arguments: str
    complete: bool = True
    source: str = ""


Delta = Reasoning | Content | ToolCallStart | ToolCallArguments | ToolCallEnd
