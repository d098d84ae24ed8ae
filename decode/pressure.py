"""What happens when a choice needs a page and the worker has none.

First the store is asked for more; if it has none, the request with the latest
arrival is preempted, so that the oldest always advances and nobody waits for
pages while holding pages that another waits for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from decode.closing import Closer
from decode.frames import Ending
from decode.request import Phase
from decode.scheduler import Scheduler
from mesh.kv.client import KvClient

AWAY_RETRY_S = 0.2
# How often, and how far apart, the store is asked again before somebody steps back:
# when the only request here waits for pages that other workers hold, and when the
# last one to step back was still in its hand-over, whose pages prefill returns.
LONE_TRIES = 20
HANDOVER_TRIES = 5
ASK_AGAIN_S = 0.05

log = logging.getLogger(__name__)


class Pressure:
    """`wake` is called when pages came, or when the store has none."""

    def __init__(self, kv: KvClient, scheduler: Scheduler, closer: Closer, wake: Callable[[], None]) -> None:
        self._kv = kv
        self._scheduler = scheduler
        self._closer = closer
        self._wake = wake
        self._asking: asyncio.Task[None] | None = None
        self._refused_at: int | None = None
        self._tries = 0
        self._patience = 0

    def eased(self) -> None:
        """Everybody has the pages of this step."""
        self._refused_at = None
        self._tries = self._patience = 0

    def relieve(self, pages: int) -> bool:
        """To be called between steps. True if somebody was preempted, so that plans must be made anew."""
        if self._asking is not None:
            return False
        if self._refused_at != self._closer.completed:
            self._asking = asyncio.create_task(self._ask(pages, after_s=0.0))
            return False
        if self._closer.busy:
            return False
        victim = self._scheduler.victim()
        if victim is None:
            return False
        if self._tries < (LONE_TRIES if self._scheduler.holders == 1 else self._patience):
            self._tries += 1
            self._asking = asyncio.create_task(self._ask(pages, after_s=ASK_AGAIN_S))
            return False
        log.info("out of pages: request %s steps back", victim.opening.request_id)
        self._refused_at = None
        self._tries = 0
        self._patience = HANDOVER_TRIES if victim.phase is Phase.HANDING_OVER else 0
        self._closer.close(victim, Ending.PREEMPTED)
        return True

    async def _ask(self, pages: int, after_s: float) -> None:
        try:
            await asyncio.sleep(after_s)
            completed = self._closer.completed
            if await self._kv.grow(pages):
                self._refused_at = None
            elif self._kv.connected:
                self._refused_at = completed
            else:
                await asyncio.sleep(AWAY_RETRY_S)
        finally:
            self._asking = None
            self._wake()
