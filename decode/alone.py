"""How hand-overs go on while the KV store is away: this worker computes their prompts itself.

It takes the pages from its own grant and computes in small pieces, as it does with any
prompt that has no other source; blocks are committed when the store is back. It takes on
no more than it can compute in about the time in which a store is started again: what is
beyond that is served sooner by waiting. Leased blocks of the prompt are used, cached
ones that nobody leased cannot be: only the store knows that they stay.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from decode.opening import extra_pages
from decode.request import Phase, Request
from decode.scheduler import Scheduler
from mesh.kv.client import KvClient

# A session that breaks while its store lives is back before that.
GRACE_S = 0.2
# About what a killed store takes to serve again.
STORE_BACK_S = 2.0
LOOK_AGAIN_S = 0.3

log = logging.getLogger(__name__)


class Alone:
    """`begun(request)` is called for each hand-over that goes on alone. `step_s` is what a step takes."""

    def __init__(
        self,
        kv: KvClient,
        scheduler: Scheduler,
        page_tokens: int,
        step_s: Callable[[], float],
        begun: Callable[[Request], None],
    ) -> None:
        self._kv = kv
        self._scheduler = scheduler
        self._page_tokens = page_tokens
        self._step_s = step_s
        self._begun = begun
        self._looking: asyncio.TimerHandle | None = None

    async def back_soon(self) -> bool:
        """Waits a moment for the store; whether it is there."""
        try:
            async with asyncio.timeout(GRACE_S):
                await self._kv.wait_connected()
        except TimeoutError:
            return False
        return True

    def went_away(self) -> None:
        """The session with the store broke: if it does not come back at once, hand-overs go on alone."""
        self._look_after(GRACE_S)

    def take_on(self, request: Request) -> bool:
        """Begins to compute a request in its hand-over; False if pages or time do not suffice."""
        fresh = request.phase is Phase.RESERVING
        missing = request.opening.prefix_blocks if fresh else request.missing_blocks
        extra = extra_pages(request.opening, self._page_tokens) if fresh else 0
        # Whoever runs has to be able to grow.
        if missing + extra + self._scheduler.sequences > self._kv.idle_pages:
            return False
        steps = self._scheduler.fill_steps
        if steps and steps * self._step_s() > STORE_BACK_S:
            return False
        if fresh:
            request.reserved([], [])
        if not request.begin_alone(self._page_tokens, extra, self._kv.take):
            return False
        log.info("request %s goes on without the KV store", request.opening.request_id)
        self._begun(request)
        return True

    def _look_after(self, seconds: float) -> None:
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._looking = None
        if self._kv.connected:
            return
        pending = [r for r in self._scheduler if r.phase is Phase.HANDING_OVER]
        refused = [r for r in sorted(pending, key=lambda r: r.arrival) if not self.take_on(r)]
        if refused:
            self._look_after(LOOK_AGAIN_S)
