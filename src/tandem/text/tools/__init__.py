"""Tool calls and reasoning in the formats of the model families: an answer's text to deltas, and which format it is."""

from tandem.text.tools.answer import FORMATS, AnswerParser
from tandem.text.tools.deltas import Content, Delta, Reasoning, ToolCallArguments, ToolCallEnd, ToolCallStart

__all__ = [
    "FORMATS",
    "AnswerParser",
    "Content",
    "Delta",
    "Reasoning",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallStart",
]
