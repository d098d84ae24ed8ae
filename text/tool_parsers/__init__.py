"""How models write tool calls: one module per format, with three names each.

`MARKS` are the texts by which a chat template shows the format and which must be visible to the reader even
where they are control tokens; `read` takes an answer apart; `grammar` is what forces calls. `format_of`
chooses by the template. Knows neither tokens nor the dialect of an API.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from text.tool_parsers import deepseek, gemma, generic_json, hermes, llama3, mistral, pythonic
from text.tool_parsers.lark import Function, Mark
from text.tool_parsers.reading import Reader, Sink, Source


class Format(Protocol):
    """What the modules of this package are."""

    @property
    def MARKS(self) -> tuple[str, ...]: ...

    def read(self, source: Source, sink: Sink) -> Reader[None]:
        """Reads the answer to its end. What is no call is text, exactly as it came."""
        ...

    def grammar(self, functions: Sequence[Function], mark: Mark, *, many: bool, opened: bool = False) -> str:
        """Lark rules that define `calls`: one call of one of the functions, or several (`many`).

        `opened`: without the first mark, which has been read.
        """
        ...


FORMATS: Mapping[str, Format] = {
    "mistral": mistral,
    "deepseek": deepseek,
    "hermes": hermes,
    "llama3": llama3,
    "pythonic": pythonic,
    "gemma": gemma,
    "json": generic_json,
}
GENERIC = "json"
# Formats whose calls begin with the first of their marks, anywhere in an answer.
MARKED = frozenset({"hermes", "mistral", "deepseek", "gemma"})


def format_of(template: str | None) -> str:
    """The format that a chat template teaches; the generic one where it teaches none."""
    for name, form in FORMATS.items():
        if template is not None and any(mark in template for mark in form.MARKS):
            return name
    return GENERIC


__all__ = ["FORMATS", "GENERIC", "MARKED", "Format", "Function", "Mark", "Sink", "Source", "format_of"]
