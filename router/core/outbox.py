"""What has been generated and not yet been taken by the face.

A slow reader gets fewer and larger deltas: what comes meanwhile is joined. How much
can wait here is bounded by the credit that the worker has been given. It does not
know workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.core.request import Delta


class Outbox:
    """One request's. `on_taken(index, tokens)` is called when the face has taken a delta."""

    def __init__(self, choices: int, on_taken: Callable[[int, int], None]) -> None:
        self._open = set(range(choices))
        self._waiting: dict[int, Delta] = {}
        self._error: BaseException | None = None
        self._news = asyncio.Event()
        self._on_taken = on_taken

    @property
    def complete(self) -> bool:
        """Whether every choice has ended."""
        return not self._open

    def put(self, delta: Delta) -> None:
        """Adds to a choice. After its last delta nothing more is taken for it."""
        if delta.index not in self._open:
            return
        known = self._waiting.get(delta.index)
        if known is None:
            self._waiting[delta.index] = delta
        else:
            known.add(delta)
        if delta.finish is not None:
            self._open.discard(delta.index)
        self._news.set()

    def fail(self, error: BaseException) -> None:
        """The request ends with this error, after what is already here. The first one counts."""
        if self._error is None and not self.complete:
            self._error = error
            self._news.set()

    async def take(self) -> list[Delta]:
        """What is new, by choice; an empty list when every choice has ended. Raises the error."""
        while (deltas := self.taken()) is None:
            await self.news()
        return deltas

    async def news(self) -> None:
        """Waits until there may be something to take, or for a nudge."""
        self._news.clear()
        await self._news.wait()

    def nudge(self) -> None:
        """Wakes who waits for news, to look at something else."""
        self._news.set()

    def taken(self) -> list[Delta] | None:
        """As `take`, without waiting: None while there is nothing to say."""
        if not self._waiting:
            if self.complete:
                return []
            if self._error is not None:
                raise self._error
            return None
        waiting = self._waiting
        deltas = (
            list(waiting.values()) if len(waiting) == 1 else [waiting[index] for index in sorted(waiting)]
        )
        self._waiting = {}
        for delta in deltas:
            self._on_taken(delta.index, len(delta.tokens))
        return deltas
