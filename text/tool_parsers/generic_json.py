"""`{"name": …, "arguments": …}` or an array of them as the whole answer, maybe fenced: for models without a
format of their own, which are told so in the system message."""

from __future__ import annotations

from collections.abc import Sequence

from text.tool_parsers.json_call import Call
from text.tool_parsers.lark import Function, Mark, each, json_call
from text.tool_parsers.reading import Reader, Sink, Source

MARKS: tuple[str, ...] = ()
_FENCE = "```"


def read(source: Source, sink: Sink) -> Reader[None]:
    """See `text.tool_parsers.Format.read`. Only known functions make a call."""
    before = yield from source.skip_space()
    fenced = yield from source.begins(_FENCE)
    if fenced:
        before += _FENCE
        if (yield from source.begins("json")):
            before += "json"
        before += yield from source.skip_space()
    yield from read_calls(source, sink, before)
    if fenced and sink.calls:
        yield from source.skip_space()
        yield from source.begins(_FENCE)
        yield from source.skip_space()
    yield from source.rest(sink.text)


def read_calls(source: Source, sink: Sink, before: str) -> Reader[None]:
    """One call or an array of them. `before` was read already and is text if there is no call."""
    array = yield from source.begins("[")
    if array:
        before += "["
    while True:
        before += yield from source.skip_space()
        call = Call(source, sink, known_only=True)
        whole = yield from call.read()
        if not call.started:
            sink.text(before + call.raw)
            return
        if not whole:
            return
        before = yield from source.skip_space()
        if array and (yield from source.begins(",")):
            before += ","
            continue
        if array and not (yield from source.begins("]")):
            sink.text(before)
        if array:
            before = ""
            break
        char = yield from source.take()
        source.put_back(char)
        if char != "{":
            break
    char = yield from source.take()
    source.put_back(char)
    if char and not char.isspace():
        sink.text(before)


def grammar(functions: Sequence[Function], mark: Mark, *, many: bool, opened: bool = False) -> str:
    """See `text.tool_parsers.Format.grammar`."""
    several = 'calls: call | "[" call (", " call)* "]"' if many else "calls: call"
    return several + "\n" + each(functions, json_call())
