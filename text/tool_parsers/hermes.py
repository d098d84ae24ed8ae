"""`<tool_call>\\n{"name": …, "arguments": …}\\n</tool_call>`, once per call: Hermes, Qwen 2.5 and 3."""

from __future__ import annotations

from collections.abc import Sequence

from text.tool_parsers.json_call import Call
from text.tool_parsers.lark import Function, Mark, each, json_call
from text.tool_parsers.reading import Reader, Sink, Source

MARKS = ("<tool_call>", "</tool_call>")


def read(source: Source, sink: Sink) -> Reader[None]:
    """See `text.tool_parsers.Format.read`."""
    begin, end = MARKS
    while (yield from source.until([begin], sink.text)):
        space = source.trimmed
        call = Call(source, sink, known_only=False)
        yield from call.read()
        if not call.started:
            sink.text(space + begin + call.raw)
            continue
        yield from source.until([end], _nothing)
        yield from source.skip_space()


def _nothing(text: str) -> None:
    """What stands between a call and its end mark is no text of the answer."""


def grammar(functions: Sequence[Function], mark: Mark, *, many: bool, opened: bool = False) -> str:
    """See `text.tool_parsers.Format.grammar`."""
    begin, end = MARKS
    more = f' ("\\n" {mark(begin)} inside)*' if many else ""
    return "\n".join(
        [
            f"calls: {'' if opened else mark(begin)} inside{more}",
            f'inside: "\\n" call "\\n" {mark(end)}',
            each(functions, json_call()),
        ]
    )
