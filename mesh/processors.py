"""Which processors there are, and which a worker's threads stay on. Knows nothing of what they compute."""

from __future__ import annotations

import os

ANY = "any"


def allowed() -> tuple[int, ...]:
    """The processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def parse(text: str) -> tuple[int, ...]:
    """`any` is nowhere in particular; else numbers between commas. Raises ValueError."""
    if text == ANY:
        return ()
    found = tuple(int(part) for part in text.split(",") if part.isascii() and part.isdigit())
    if len(found) != text.count(",") + 1:
        raise ValueError(f"{text!r} is neither {ANY!r} nor processors such as 0,1")
    if strange := sorted(set(found) - set(allowed())):
        raise ValueError(f"{text!r}: this process may not use processor {strange[0]}")
    return found


class Places:
    """Hands processors out in turn: workers share them only when there are more threads than processors."""

    def __init__(self, processors: tuple[int, ...]) -> None:
        self._processors = processors
        self._next = 0

    def take(self, count: int) -> str:
        """`count` of them, in the form that `parse` reads."""
        taken = [self._processors[(self._next + i) % len(self._processors)] for i in range(count)]
        self._next += count
        return ",".join(map(str, taken))
