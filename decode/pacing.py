"""How long decode leaves the processors to prompts between two steps. Pure: the caller brings the times.

Steps that follow each other without a pause keep a core busy even for one sequence, and on a shared host
take it from the prompts that would make the next steps fuller: many thin steps cost more than few full ones.
So while prompts of this worker are being computed, a step begins no sooner than `interval_s` after the one
before; with no prompt waiting, at once.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pacing:
    """`interval_s` 0: never a pause."""

    interval_s: float

    def pause_s(self, since_step_began_s: float, prompts_waiting: int) -> float:
        """Seconds until the next step."""
        return max(0.0, self.interval_s - since_step_began_s) if prompts_waiting else 0.0


NEVER = Pacing(0.0)
