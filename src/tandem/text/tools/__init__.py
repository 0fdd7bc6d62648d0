"""Tool calls and reasoning in the formats of the model families: an answer's text to deltas, and which format it is."""

from tandem.text.tools.answer import FORMATS, AnswerParser
from tandem.text.tools.deltas import Content, Delta, Reasoning, ToolCallArguments, ToolCallEnd, ToolCallStart
from tandem.text.tools.formats import Capabilities, capabilities, format_of

__all__ = [
    "FORMATS",
    "AnswerParser",
    "Capabilities",
    "Content",
    "Delta",
    "Reasoning",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallStart",
    "capabilities",
    "format_of",
]
