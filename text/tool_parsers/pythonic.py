"""`[f(a=1, b="x"), g()]` as the whole answer: Llama 4 and small Llama 3.2 models, Olmo."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from text.tool_parsers.lark import Function, Mark, each, json_of, literal
from text.tool_parsers.reading import Reader, Sink, Source

MARKS = ("[func_name1(params_name1",)
_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
_CLOSES = {"(": ")", "[": "]", "{": "}"}


def read(source: Source, sink: Sink) -> Reader[None]:
    """See `text.tool_parsers.Format.read`. Only known functions make a call."""
    before = yield from source.skip_space()
    if (yield from source.begins("[")):
        yield from read_calls(source, sink, before + "[", "]")
        yield from source.skip_space()
        before = ""
    sink.text(before)
    yield from source.rest(sink.text)


def read_calls(source: Source, sink: Sink, before: str, end: str) -> Reader[None]:
    """Calls up to `end`. `before` was read already and is text if there is no call."""
    while True:
        before += yield from source.skip_space()
        raw = yield from _call(source, sink)
        if raw is not None:
            sink.text(before + raw)
            return
        before = yield from source.skip_space()
        if (yield from source.begins(end)):
            return
        yield from source.begins(",")
        if (yield from source.peek()) == "":
            return


def _call(source: Source, sink: Sink) -> Reader[str | None]:
    """None after a call, the text that was read where there is none."""
    name = yield from _word(source)
    if name not in sink.known or not (yield from source.begins("(")):
        return name
    raw = name + "("
    space = yield from source.skip_space()
    if (yield from source.begins(")")):
        sink.start(name)
        sink.arguments("{}")
        return None
    first = True
    while True:
        key = yield from _word(source)
        raw += space + key
        gap = yield from source.skip_space()
        if not key or not (yield from source.begins("=")):
            return raw + gap if first else None
        if first:
            sink.start(name)
        sink.arguments(("{" if first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        value = yield from _value(source)
        sink.arguments(_as_json(value))
        first = False
        if (yield from source.begins(")")):
            sink.arguments("}")
            return None
        if not (yield from source.begins(",")):
            return None
        space = yield from source.skip_space()


def _word(source: Source) -> Reader[str]:
    word = ""
    while True:
        char = yield from source.take()
        if not char or char not in _NAME:
            source.put_back(char)
            return word
        word += char


def _value(source: Source) -> Reader[str]:
    """A Python value, up to the comma or bracket that ends it."""
    value, quote, open_ = "", "", ""
    while True:
        char = yield from source.take()
        if not char:
            return value
        if quote:
            value += char
            if char == "\\":
                value += yield from source.take()
            elif char == quote:
                quote = ""
            continue
        if not open_ and char in ",)]":
            source.put_back(char)
            return value
        if char in "\"'":
            quote = char
        elif char in _CLOSES:
            open_ += _CLOSES[char]
        elif open_ and char == open_[-1]:
            open_ = open_[:-1]
        value += char


def _as_json(value: str) -> str:
    """A Python (or JSON) value as JSON; what is neither becomes a string."""
    value = value.strip()
    try:
        json.loads(value)
    except (ValueError, RecursionError):
        pass
    else:
        return value
    try:
        return json.dumps(ast.literal_eval(value), ensure_ascii=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return json.dumps(value, ensure_ascii=False)


def grammar(functions: Sequence[Function], mark: Mark, *, many: bool, opened: bool = False) -> str:
    """See `text.tool_parsers.Format.grammar`."""
    several = '"[" call (", " call)* "]"' if many else '"[" call "]"'
    return f"calls: {several}\n" + call_grammar(functions)


def call_grammar(functions: Sequence[Function]) -> str:
    """The rule `call`. Arguments come in the order of the schema."""
    extra: list[str] = []

    def write(function: Function) -> str:
        rule = f"arguments_{len(extra)}"
        extra.append(_arguments(rule, function.schema))
        return f'{literal(function.name + "(")} {rule} ")"'

    return "\n".join([each(functions, write), *extra])


def _arguments(rule: str, schema: Mapping[str, Any]) -> str:
    """One rule per argument, once as the first that is there (`f`) and once after others (`l`)."""
    properties = schema.get("properties") or {}
    required = set(schema.get("required") or ())
    shared = {key: schema[key] for key in ("$defs", "definitions", "x-guidance") if key in schema}
    if not properties:
        # Nothing is said of the arguments: none, or any.
        pair = f'/[a-z_]{{1,32}}/ "=" {json_of({})}'
        free = "" if schema.get("additionalProperties") is False else f' | {pair} (", " {pair})*'
        return f'{rule}: ""{free}'
    lines = [f"{rule}: {rule}_f0"]
    for place, (name, inner) in enumerate(properties.items()):
        value = json_of({**inner, **shared} if isinstance(inner, dict) else inner)
        for kind, comma in (("f", ""), ("l", ", ")):
            given = f"{literal(comma + name + '=')} {value} {rule}_l{place + 1}"
            skip = "" if name in required else f" | {rule}_{kind}{place + 1}"
            lines.append(f"{rule}_{kind}{place}: {given}{skip}")
    lines += [f'{rule}_{kind}{len(properties)}: ""' for kind in "fl"]
    return "\n".join(lines)
