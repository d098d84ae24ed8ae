"""How long decode leaves the processors to prompts between two steps. Pure: the caller brings the times.

Steps that follow each other without a pause keep a core busy even for one sequence, and on a shared host
take it from the prompts that would make the next steps fuller: many thin steps cost more than few full ones.
So while prompts of this worker are being computed, a step begins no sooner than `interval_s` after the one
before, and later the more of them wait for each request that generates, up to `MOST` times that: first tokens
are late while most requests wait, and nobody reads as fast as a few generate. With no prompt waiting a step
begins at once.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST = 2.5


@dataclass(frozen=True, slots=True)
class Pacing:
    """`interval_s` 0: never a pause."""

    interval_s: float

    def pause_s(self, since_step_began_s: float, *, waiting: int, generating: int) -> float:
        """Seconds until the next step."""
        if not waiting:
            return 0.0
        interval_s = self.interval_s * min(MOST, 1 + waiting / max(1, generating))
        return max(0.0, interval_s - since_step_began_s)


NEVER = Pacing(0.0)
