"""Where the time of a request goes: contiguous phases that add up.

Exactly one phase runs at any moment from the edge's start of the request to its
end, so the phases before the first token sum to the time to first token. A
phase may be entered again (a refused request queues once more); the times of
both visits add up. It does not know what the phases do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

AUTHORISE, TOKENISE, QUEUE, PLACE = "authorise", "tokenise", "queue", "place"
PREFILL, HANDOVER, FIRST_STEP, DECODE = "prefill", "handover", "first_step", "decode"
BEFORE_FIRST_TOKEN = (AUTHORISE, TOKENISE, QUEUE, PLACE, PREFILL, HANDOVER, FIRST_STEP)


@dataclass(frozen=True, slots=True)
class Visit:
    """One stretch of one phase, in unix nanoseconds."""

    phase: str
    start_ns: int
    end_ns: int


@dataclass(slots=True)
class Phases:
    """Begins in `authorise` at `start_ns`, which is when the edge took the request."""

    start_ns: int
    clock: Callable[[], int] = time.time_ns
    visits: list[Visit] = field(default_factory=list)
    current: str = AUTHORISE
    _since_ns: int = 0

    def __post_init__(self) -> None:
        # Clocks of two hosts differ; a start in the future would make a negative phase.
        self.start_ns = min(self.start_ns, self.clock())
        self._since_ns = self.start_ns

    def enter(self, phase: str) -> None:
        """Ends the running phase now and begins `phase`; entering the running one changes nothing.

        Once tokens flow (`decode`), what happens to the request belongs to that phase.
        """
        if phase == self.current or self.current in (DECODE, ""):
            return
        self._close(phase)

    def finish(self) -> None:
        """Ends the running phase for good."""
        if self.current:
            self._close("")

    def total_s(self, *phases: str) -> float:
        """Seconds spent in the given phases so far, without the one that runs."""
        return sum(v.end_ns - v.start_ns for v in self.visits if v.phase in phases) / 1e9

    def elapsed_s(self) -> float:
        """Seconds since the edge took the request."""
        return (self.clock() - self.start_ns) / 1e9

    def _close(self, following: str) -> None:
        now = max(self.clock(), self._since_ns)
        self.visits.append(Visit(self.current, self._since_ns, now))
        self._since_ns = now
        self.current = following
