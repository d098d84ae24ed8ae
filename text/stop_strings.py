"""Ends a stream of text at the first stop string, without ever giving out a part of one.

Text that may be the beginning of a stop string is held back until it is decided. The stop that is complete
first wins; of those complete at the same character, the longest. So the result does not depend on how the
text was cut into pieces. Works by the automaton of Knuth, Morris and Pratt: time is linear in the text, for
each stop.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The stop strings of one choice. After a match everything further is swallowed."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises `ValueError` for an empty stop string, which would match everywhere."""
        if any(not stop for stop in stops):
            raise ValueError("a stop string is empty")
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # how many characters of each stop the text ends with
        self._held = ""
        self._done = False

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that may be shown, the stop string that ended the stream or None)."""
        if self._done:
            return "", None
        if not self._stops:
            return text, None
        for at, char in enumerate(text):
            stop = self._advance(char)
            if stop is not None:
                self._done = True
                whole = self._held + text[: at + 1]
                self._held = ""
                return whole[: len(whole) - len(stop)], stop
        whole = self._held + text
        safe = len(whole) - max(self._matched)
        self._held = whole[safe:]
        return whole[:safe], None

    def flush(self) -> str:
        """The stream ended without a stop: what was held back."""
        held, self._held, self._done = self._held, "", True
        return held

    def _advance(self, char: str) -> str | None:
        """Feeds one character to every automaton; the longest stop that it completes."""
        found = None
        for index, stop in enumerate(self._stops):
            matched = self._matched[index]
            fallbacks = self._fallbacks[index]
            while matched and stop[matched] != char:
                matched = fallbacks[matched - 1]
            if stop[matched] == char:
                matched += 1
            if matched == len(stop):
                if found is None:
                    found = stop
                matched = fallbacks[matched - 1]
            self._matched[index] = matched
        return found


def _fallbacks(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    out = [0]
    length = 0
    for char in stop[1:]:
        while length and stop[length] != char:
            length = out[length - 1]
        if stop[length] == char:
            length += 1
        out.append(length)
    return out
