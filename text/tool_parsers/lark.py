"""Pieces of the grammars of forced calls, in the Lark dialect of `llguidance`.

A format's `grammar` defines the rule `calls` from these; which functions may be called and the schemas of
their arguments come in as `Function`s. Knows no format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Mark = Callable[[str], str]
"""The terminal of a mark: its token if the model has one for it alone, its text otherwise."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called. `schema` is what its arguments must satisfy."""

    name: str
    schema: dict[str, Any]


def literal(text: str) -> str:
    """A terminal of exactly this text; nothing for the empty one."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def json_of(schema: Any) -> str:
    """A terminal of JSON that satisfies `schema`."""
    return "%json " + json.dumps(schema, ensure_ascii=False)


def each(functions: Sequence[Function], write: Callable[[Function], str], rule: str = "call") -> str:
    """`rule` is a call of one of the functions, as `write` writes it."""
    names = [f"{rule}_{place}" for place in range(len(functions))]
    lines = [f"{rule}: {' | '.join(names)}"]
    lines += [f"{name}: {write(function)}" for name, function in zip(names, functions, strict=True)]
    return "\n".join(lines)


def json_call(name_key: str = "name", arguments_key: str = "arguments") -> Callable[[Function], str]:
    """A call as one JSON object."""

    def write(function: Function) -> str:
        name = json.dumps(function.name)
        head = f'{{"{name_key}": {name}, "{arguments_key}": '
        return f'{literal(head)} {json_of(function.schema)} "}}"'

    return write
