"""What an answer consists of, as typed events in the order in which they come.

Joining the texts of one kind gives the same result however the answer was cut into pieces: `Text` is the
message, `Reasoning` what the model thought before it, and each call is one `ToolCallStart` followed by
`ToolCallArguments` whose texts join to the arguments as JSON. `End` comes once, last. Knows no dialect.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Call number `index` (from 0, in the order of the answer) of the function `name`."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A fragment of the arguments of call `index`."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class End:
    """The answer is over; `calls` have begun in it, the last one maybe cut off."""

    calls: int


Part = Text | Reasoning | ToolCallStart | ToolCallArguments | End


def joined(parts: list[Part], more: list[Part]) -> list[Part]:
    """Both in a line; neighbours of one kind become one. Changes `parts`."""
    for part in more:
        last = parts[-1] if parts else None
        if isinstance(part, Text) and isinstance(last, Text):
            parts[-1] = Text(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            parts[-1] = Reasoning(last.text + part.text)
        elif (
            isinstance(part, ToolCallArguments)
            and isinstance(last, ToolCallArguments)
            and part.index == last.index
        ):
            parts[-1] = ToolCallArguments(part.index, last.text + part.text)
        else:
            parts.append(part)
    return parts
