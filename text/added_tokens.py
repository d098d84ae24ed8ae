"""Cuts a text at tokens that are matched whole: control tokens such as `<|im_start|>`, user-defined ones such
as a run of blanks. The leftmost match wins, at one place the longest.

Time is linear in the text: only places where the first one or two characters fit are looked at, and there one
lookup is made per token length that begins so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping


class AddedTokens:
    """A fixed set of texts with their ids."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._ids = {text: token_id for text, token_id in tokens.items() if text}
        lengths: dict[str, set[int]] = {}
        for text in self._ids:
            lengths.setdefault(text[:2], set()).add(len(text))
        single = {text for text in lengths if len(text) == 1}
        for start, found in lengths.items():
            if (
                start[0] in single
            ):  # where the two-character start is seen, the one-character token fits as well
                found.add(1)
        self._lengths = {start: sorted(found, reverse=True) for start, found in lengths.items()}
        self._starts = re.compile("|".join(_start_pattern(lengths))) if lengths else None

    def split(self, text: str) -> Iterator[str | int]:
        """The parts of `text` in order: plain stretches (never empty) as str, matched tokens as their id."""
        if self._starts is None:
            if text:
                yield text
            return
        plain = at = 0
        search = self._starts.search
        while (found := search(text, at)) is not None:
            at = found.start()
            for length in self._lengths[found.group()]:
                token_id = self._ids.get(text[at : at + length])
                if token_id is not None:
                    if plain < at:
                        yield text[plain:at]
                    yield token_id
                    plain = at = at + length
                    break
            else:
                at += 1
        if plain < len(text):
            yield text[plain:]


def _start_pattern(starts: Mapping[str, object]) -> Iterator[str]:
    """Alternatives for all starts, one per first character, so that a search tries few of them."""
    by_first: dict[str, list[str]] = {}
    for start in starts:
        by_first.setdefault(start[0], []).append(start[1:])
    for first, seconds in by_first.items():
        several = "".join(re.escape(second) for second in seconds if second)
        optional = "?" if "" in seconds else ""
        yield re.escape(first) + (f"[{several}]{optional}" if several else "")
