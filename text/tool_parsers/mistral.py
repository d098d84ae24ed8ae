"""`[TOOL_CALLS][{"name": …, "arguments": …}, …]`, or `[TOOL_CALLS]name[ARGS]{…}` per call in newer models."""

from __future__ import annotations

from collections.abc import Sequence

from text.tool_parsers.json_call import Call, copy_value
from text.tool_parsers.lark import Function, Mark, each, json_call
from text.tool_parsers.reading import Reader, Sink, Source

MARKS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")


def read(source: Source, sink: Sink) -> Reader[None]:
    """See `text.tool_parsers.Format.read`."""
    begin = MARKS[0]
    while (yield from source.until([begin], sink.text)):
        before = source.trimmed + begin
        before += yield from source.skip_space()
        if (yield from source.begins("[")):
            whole = yield from _array(source, sink, before + "[")
        else:
            whole = yield from _named(source, sink, before)
        if not whole:
            break
    yield from source.rest(sink.text)


def _array(source: Source, sink: Sink, before: str) -> Reader[bool]:
    while True:
        call = Call(source, sink, known_only=False)
        whole = yield from call.read()
        if not call.started:
            sink.text(before + call.raw)
            return False
        if not whole:
            return False
        yield from source.skip_space()
        if not (yield from source.begins(",")):
            break
        before = ""
    yield from source.begins("]")
    yield from source.skip_space()
    return True


def _named(source: Source, sink: Sink, before: str) -> Reader[bool]:
    _, args, call_id = MARKS
    name: list[str] = []
    found = yield from source.until([args, call_id, "{"], name.append)
    if found == call_id:
        found = yield from source.until([args], _nothing)
    if not found or not "".join(name).strip():
        sink.text(before + "".join(name) + found)
        return False
    if found == "{":
        source.put_back(found)
    sink.start("".join(name).strip())
    yield from source.skip_space()
    return (yield from copy_value(source, sink.arguments))


def _nothing(text: str) -> None:
    """The model's own id of a call is not used: ids are unique over all answers."""


def grammar(functions: Sequence[Function], mark: Mark, *, many: bool, opened: bool = False) -> str:
    """See `text.tool_parsers.Format.grammar`. Both kinds of models read the older form."""
    several = '"[" call (", " call)* "]"' if many else '"[" call "]"'
    return f"calls: {'' if opened else mark(MARKS[0])} {several}\n" + each(functions, json_call())
