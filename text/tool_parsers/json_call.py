"""Reads JSON as it comes: one value copied to where it belongs, one call `{"name": …, "arguments": …}`.

Only structure is looked at; the text of the arguments goes out as the model wrote it. Knows no marks.
"""

from __future__ import annotations

import json

from text.tool_parsers.reading import Reader, Sink, Source, Write

NAME_KEYS = ("name", "function")
ARGUMENT_KEYS = ("arguments", "parameters")
_SCALAR_ENDS = ",]} \t\r\n"


def copy_value(source: Source, write: Write) -> Reader[bool]:
    """Copies one JSON value to `write`; false if the answer ended first, or there is no value."""
    char = yield from source.take()
    if char == '"':
        write(char)
        return (yield from _copy_string(source, write))
    if char in ("{", "["):
        write(char)
        depth = 1
        while depth:
            char = yield from source.take()
            if not char:
                return False
            write(char)
            if char == '"':
                if not (yield from _copy_string(source, write)):
                    return False
            elif char in "{[":
                depth += 1
            elif char in "}]":
                depth -= 1
        return True
    some = False
    while char and char not in _SCALAR_ENDS:
        write(char)
        some = True
        char = yield from source.take()
    source.put_back(char)
    return some and bool(char)


def _copy_string(source: Source, write: Write) -> Reader[bool]:
    """The rest of a string whose opening quote was copied already."""
    while True:
        char = yield from source.take()
        if not char:
            return False
        write(char)
        if char == '"':
            return True
        if char == "\\":
            char = yield from source.take()
            if not char:
                return False
            write(char)


class Call:
    """One `{"name": …, "arguments": …}`. What was read before it was certain to be a call is in `raw`."""

    def __init__(self, source: Source, sink: Sink, *, known_only: bool) -> None:
        self._source = source
        self._sink = sink
        self._known_only = known_only
        self._waiting: list[str] = []
        self._argued = False
        self.started = False
        self.raw = ""

    def read(self) -> Reader[bool]:
        """True for a whole call. False where it is none, or was cut off: look at `started` then.

        A call is given out as soon as its name is known; arguments that came before wait for it.
        """
        if not (yield from self._expect("{")):
            return False
        while True:
            if not (yield from self._member()):
                return False
            char = yield from self._structure()
            if char == "}":
                break
            if char != ",":
                return False
        if self.started and not self._argued:
            self._sink.arguments("{}")
        return self.started

    def _member(self) -> Reader[bool]:
        key = yield from self._string()
        if key is None or not (yield from self._expect(":")):
            return False
        self._keep((yield from self._source.skip_space()))
        if key in NAME_KEYS and not self.started:
            name = yield from self._string()
            return name is not None and self._start(name)
        if key in ARGUMENT_KEYS and not self._argued:
            self._argued = True
            return (yield from self._arguments())
        return (yield from copy_value(self._source, self._keep))

    def _start(self, name: str) -> bool:
        if not name or (self._known_only and name not in self._sink.known):
            return False
        self.started = True
        self._sink.start(name)
        self._sink.arguments("".join(self._waiting))
        return True

    def _arguments(self) -> Reader[bool]:
        """An object goes out as it comes. A string is JSON inside JSON; null means none."""
        char = yield from self._source.take()
        self._source.put_back(char)
        if char in ("{", "["):
            return (yield from copy_value(self._source, self._argue))
        value: list[str] = []
        whole = yield from copy_value(self._source, value.append)
        self._keep("".join(value))
        if not whole:
            return False
        try:
            read = json.loads("".join(value))
        except ValueError:
            return False
        text = read if isinstance(read, str) else "".join(value)
        self._argue("{}" if read is None or not text.strip() else text, seen=True)
        return True

    def _argue(self, text: str, *, seen: bool = False) -> None:
        if not seen:
            self._keep(text)
        if self.started:
            self._sink.arguments(text)
        else:
            self._waiting.append(text)

    def _keep(self, text: str) -> None:
        if not self.started:
            self.raw += text

    def _structure(self) -> Reader[str]:
        """The next character that is no white space."""
        self._keep((yield from self._source.skip_space()))
        char = yield from self._source.take()
        self._keep(char)
        return char

    def _expect(self, wanted: str) -> Reader[bool]:
        return (yield from self._structure()) == wanted

    def _string(self) -> Reader[str | None]:
        self._keep((yield from self._source.skip_space()))
        char = yield from self._source.take()
        if char != '"':
            self._keep(char)
            return None
        value = [char]
        whole = yield from _copy_string(self._source, value.append)
        self._keep("".join(value))
        if not whole:
            return None
        try:
            read = json.loads("".join(value))
        except ValueError:
            return None
        return str(read)
