"""Takes an answer apart as it comes: reasoning, text, tool calls.

The result does not depend on how the answer was cut into pieces. Knows neither tokens nor the dialect of an
API, and takes text that stop strings have been cut from already.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator
from dataclasses import dataclass

from text import reasoning
from text.parts import Part
from text.tool_parsers import FORMATS
from text.tool_parsers.reading import Reader, Sink, Source


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What to look for in an answer. None, in either place, is nothing.

    `functions` are the names that may be called; calls after `calls_max` are dropped; `thinking` says that
    the prompt ends inside of thinking.
    """

    tools: str | None = None
    functions: frozenset[str] = frozenset()
    reasoning: str | None = None
    thinking: bool = False
    calls_max: int | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that must reach the parser, also where they are control tokens."""
        found = FORMATS[self.tools].MARKS if self.tools is not None else ()
        return found + (reasoning.MARKS[self.reasoning] if self.reasoning is not None else ())


class AnswerParser:
    """One answer's. After `end` nothing more may be pushed."""

    def __init__(self, form: AnswerForm) -> None:
        self._source = Source()
        self._sink = Sink(form.functions, _id_maker(form.tools), form.calls_max)
        self._reader: Generator[None, str, None] = _read(form, self._source, self._sink)
        next(self._reader)

    @property
    def thinking(self) -> bool:
        """Whether what comes next is reasoning."""
        return self._sink.thinking

    @property
    def calls(self) -> int:
        """Tool calls that have begun."""
        return self._sink.calls

    def push(self, text: str) -> list[Part]:
        """What has become certain."""
        send = self._reader.send
        for char in text:
            send(char)
        return self._sink.drain()

    def end(self) -> list[Part]:
        """What was still uncertain, and `End`."""
        try:
            while True:
                self._reader.send("")
        except StopIteration:
            self._sink.end()
        return self._sink.drain()


def _read(form: AnswerForm, source: Source, sink: Sink) -> Reader[None]:
    if form.reasoning is not None:
        yield from reasoning.read(source, sink, form.reasoning, opened=form.thinking)
    if form.tools is not None:
        yield from FORMATS[form.tools].read(source, sink)
    yield from source.rest(sink.text)


def _id_maker(tools: str | None) -> Callable[[], str]:
    # Mistral's templates refuse ids of any other form.
    if tools == "mistral":
        return lambda: secrets.token_hex(5)[:9]
    return lambda: f"call_{secrets.token_hex(12)}"
