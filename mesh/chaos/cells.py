"""The matrix: what is done to which process while a request is where."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

HOW = ("kill", "hang")
VICTIMS = ("prefill", "decode", "kvstore", "nats", "iam", "router")
PHASES = ("queued", "prefilling", "handing_over", "first_token", "streaming")


@dataclass(frozen=True, slots=True)
class Cell:
    """`how` is a signal (SIGKILL, SIGSTOP), `victim` a role, `phase` a fault point of a router."""

    how: str
    victim: str
    phase: str

    @property
    def strikes(self) -> bool:
        return bool(self.how)

    @property
    def name(self) -> str:
        return f"{self.how}:{self.victim}:{self.phase}" if self.how else "undisturbed"

    @property
    def may_break_streams(self) -> bool:
        """A stream cannot move to another router: it must break visibly."""
        return self.victim == "router"


# The same load with nothing done to it: what the others are compared with.
CONTROL = Cell("", "", "")


def matrix(patterns: Sequence[str]) -> list[Cell]:
    """All cells whose name matches one of the patterns (`kill:*:streaming`); all without patterns."""
    cells = [Cell(how, victim, phase) for how in HOW for victim in VICTIMS for phase in PHASES]
    return [c for c in cells if not patterns or any(fnmatch.fnmatch(c.name, p) for p in patterns)]
