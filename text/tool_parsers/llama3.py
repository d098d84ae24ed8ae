"""`{"name": …, "parameters": …}` as the whole answer, maybe behind `<|python_tag|>`; `; ` between several."""

from __future__ import annotations

from collections.abc import Sequence

from text.tool_parsers.json_call import Call
from text.tool_parsers.lark import Function, Mark, each, json_call
from text.tool_parsers.reading import Reader, Sink, Source

MARKS = ("<|python_tag|>", "dictionary of argument name and its value")


def read(source: Source, sink: Sink) -> Reader[None]:
    """See `text.tool_parsers.Format.read`. Without a mark only known functions make a call."""
    before = yield from source.skip_space()
    if (yield from source.begins(MARKS[0])):
        before = ""
    while True:
        call = Call(source, sink, known_only=True)
        whole = yield from call.read()
        if not call.started:
            sink.text(before + call.raw)
            break
        if not whole:
            break
        before = yield from source.skip_space()
        if not (yield from source.begins(";")):
            char = yield from source.take()
            source.put_back(char)
            if char != "{":
                sink.text(before if char else "")
                break
        before = yield from source.skip_space()
    yield from source.rest(sink.text)


def grammar(functions: Sequence[Function], mark: Mark, *, many: bool, opened: bool = False) -> str:
    """See `text.tool_parsers.Format.grammar`."""
    several = 'calls: call ("; " call)*' if many else "calls: call"
    return several + "\n" + each(functions, json_call(arguments_key="parameters"))
