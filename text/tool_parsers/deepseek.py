"""DeepSeek: calls between their own tokens, as `function⟨sep⟩NAME` with a fenced JSON (V3, R1) or as
`NAME⟨sep⟩{…}` (V3.1)."""

from __future__ import annotations

from collections.abc import Sequence

from text.tool_parsers.json_call import copy_value
from text.tool_parsers.lark import Function, Mark, each, json_of, literal
from text.tool_parsers.reading import Reader, Sink, Source

MARKS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_CALLS_BEGIN, _CALL_BEGIN, _SEPARATOR, _CALL_END, _CALLS_END = MARKS


def read(source: Source, sink: Sink) -> Reader[None]:
    """See `text.tool_parsers.Format.read`."""
    write = sink.text
    while found := (yield from source.until([_CALLS_BEGIN, _CALL_BEGIN, _CALLS_END], write)):
        write = _nothing if found == _CALLS_BEGIN else sink.text
        if found == _CALL_BEGIN:
            write = _nothing
            yield from _call(source, sink)
    yield from source.rest(sink.text)


def _call(source: Source, sink: Sink) -> Reader[None]:
    before = source.trimmed + _CALL_BEGIN
    head: list[str] = []
    found = yield from source.until([_SEPARATOR, _CALL_END], head.append)
    if found != _SEPARATOR:
        sink.text(before + "".join(head) + found)
        return
    name = "".join(head).strip()
    if name == "function":
        line: list[str] = []
        yield from source.until(["\n", "{"], line.append)
        name = "".join(line).strip()
        yield from source.skip_space()
        if (yield from source.begins("```")):
            yield from source.begins("json")
    if not name:
        return
    sink.start(name)
    yield from source.skip_space()
    yield from copy_value(source, sink.arguments)
    yield from source.until([_CALL_END], _nothing)


def _nothing(text: str) -> None:
    """What stands between calls is no text of the answer."""


def grammar(functions: Sequence[Function], mark: Mark, *, many: bool, opened: bool = False) -> str:
    """See `text.tool_parsers.Format.grammar`."""
    several = 'one ("\\n" one)*' if many else "one"

    def write(function: Function) -> str:
        head = literal(f"{function.name}\n```json\n")
        return f'{head} {json_of(function.schema)} "\\n```"'

    return "\n".join(
        [
            f"calls: {'' if opened else mark(_CALLS_BEGIN)} {several} {mark(_CALLS_END)}",
            f'one: {mark(_CALL_BEGIN)} "function" {mark(_SEPARATOR)} call {mark(_CALL_END)}',
            each(functions, write),
        ]
    )
