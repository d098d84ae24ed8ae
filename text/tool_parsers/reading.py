"""What the readers of all formats are made of: a source of characters, a sink of parts, and a few loops.

A reader is a generator that takes one character at a time (`yield from source.take()`, "" at the end of the
answer) and writes parts into a `Sink` as soon as they are certain. Taking single characters is what makes the
result independent of how the text was cut into pieces. Knows no format.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Sequence
from typing import TypeVar

from text.parts import End, Part, Reasoning, Text, ToolCallArguments, ToolCallStart, joined

T = TypeVar("T")
Reader = Generator[None, str, T]
Write = Callable[[str], None]


class Source:
    """Characters of the answer in order. A character that was taken too early can be put back."""

    def __init__(self) -> None:
        self.trimmed = ""
        """The white space that the last `until` dropped before its mark."""
        self._back: list[str] = []
        self._over = False

    def take(self) -> Reader[str]:
        """The next character; "" when the answer is over, and from then on."""
        if self._back:
            return self._back.pop()
        if self._over:
            return ""
        char = yield
        self._over = not char
        return char

    def put_back(self, text: str) -> None:
        self._back.extend(reversed(text))

    def peek(self) -> Reader[str]:
        """The next character, which stays."""
        char = yield from self.take()
        self.put_back(char)
        return char

    def skip_space(self) -> Reader[str]:
        """The white space that comes next."""
        space = ""
        while True:
            char = yield from self.take()
            if not char or not char.isspace():
                self.put_back(char)
                return space
            space += char

    def begins(self, text: str) -> Reader[bool]:
        """Takes `text` if it is what comes next."""
        taken = ""
        while taken != text:
            char = yield from self.take()
            if not char or not text.startswith(taken + char):
                self.put_back(taken + char)
                return False
            taken += char
        return True

    def until(self, marks: Sequence[str], write: Write) -> Reader[str]:
        """Gives everything before the first of `marks` to `write`, without the white space next to the mark.

        Returns the mark, or "" at the end of the answer; white space there is given out.
        """
        space = held = ""
        firsts = {mark[0] for mark in marks}
        while True:
            char = yield from self.take()
            if not char:
                write(space + held)
                return ""
            if not held and char not in firsts:
                if char.isspace():
                    space += char
                else:
                    write(space + char)
                    space = ""
                continue
            held += char
            if held in marks:
                self.trimmed = space
                return held
            while held and not any(mark.startswith(held) for mark in marks):
                first, held = held[0], held[1:]
                write(space + first)
                space = ""

    def rest(self, write: Write) -> Reader[None]:
        """Everything up to the end of the answer."""
        while True:
            char = yield from self.take()
            if not char:
                return
            write(char)


class Sink:
    """Where a reader writes. `known` are the functions there are; `new_id` makes the id of a call."""

    def __init__(
        self, known: Container[str], new_id: Callable[[], str], calls_max: int | None = None
    ) -> None:
        self.known = known
        self.calls = 0
        self.thinking = False
        self._new_id = new_id
        self._calls_max = calls_max
        self._dropping = False
        self._parts: list[Part] = []

    def text(self, text: str) -> None:
        if text:
            joined(self._parts, [Text(text)])

    def reasoning(self, text: str) -> None:
        if text:
            joined(self._parts, [Reasoning(text)])

    def start(self, name: str) -> None:
        """A call begins; arguments from here on are its own."""
        self._dropping = self.calls == self._calls_max
        if not self._dropping:
            self._parts.append(ToolCallStart(self.calls, self._new_id(), name))
            self.calls += 1

    def arguments(self, text: str) -> None:
        if text and not self._dropping:
            joined(self._parts, [ToolCallArguments(self.calls - 1, text)])

    def end(self) -> None:
        self._parts.append(End(self.calls))

    def drain(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts
