"""Calls in Python's form behind a fence "```tool_code", one a line, as Gemma was taught them."""

from __future__ import annotations

from collections.abc import Sequence

from text.tool_parsers import pythonic
from text.tool_parsers.lark import Function, Mark
from text.tool_parsers.reading import Reader, Sink, Source

MARKS = ("```tool_code", "<start_of_turn>model")
_FENCE = "```"


def read(source: Source, sink: Sink) -> Reader[None]:
    """See `text.tool_parsers.Format.read`. Only known functions make a call."""
    begin = MARKS[0]
    while (yield from source.until([begin], sink.text)):
        text = source.trimmed + begin
        text += yield from source.skip_space()
        bracket = "[" if (yield from source.begins("[")) else ""
        before = sink.calls
        yield from pythonic.read_calls(source, sink, text + bracket, "]" if bracket else _FENCE)
        if bracket and sink.calls > before:
            yield from source.skip_space()
            yield from source.begins(_FENCE)


def grammar(functions: Sequence[Function], mark: Mark, *, many: bool, opened: bool = False) -> str:
    """See `text.tool_parsers.Format.grammar`."""
    begin = "" if opened else '"```tool_code"'
    several = 'call ("\\n" call)*' if many else "call"
    return f'calls: {begin} "\\n" {several} "\\n```"\n' + pythonic.call_grammar(functions)
