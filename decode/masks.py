"""What grammars allow in a step, computed in a thread of its own while the model computes.

All that a mask depends on is known before the step: the tokens so far and the drafts. It knows no logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from decode.choice import Choice
from decode.scheduler import Part
from text.grammar import Allowed


class StepMasks:
    """The masks of one step, by choice."""

    def __init__(self, running: dict[Choice, Future[list[Allowed]]]) -> None:
        self._running = running

    def of(self, choice: Choice) -> list[Allowed] | None:
        """One per row that is sampled, fewer where a draft is not allowed; None without a grammar. Waits."""
        future = self._running.get(choice)
        return None if future is None else future.result()


class Masks:
    """Owns the thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def begin(self, parts: Sequence[Part]) -> StepMasks:
        return StepMasks(
            {
                part.choice: self._pool.submit(part.choice.matcher.allowed, part.drafts)
                for part in parts
                if part.samples and part.choice.matcher is not None
            }
        )

    def close(self) -> None:
        self._pool.shutdown(wait=False)
