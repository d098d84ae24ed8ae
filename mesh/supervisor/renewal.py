"""Replaces every process before its certificate expires.

A process gets a certificate when it is started, and can be replaced without a request
being lost: so what renews certificates is a rolling restart, in time. Connections that
stand do not care; every new one, and every token, needs a certificate that is good.
Knows neither processes nor certificates.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

# After this part of a certificate's life; the rest is for tries that fail.
RENEW_AT, AGAIN_AFTER = 0.6, 0.05
# Timers stand still while a machine sleeps, certificates do not.
LOOK_S = 3600.0


class Renewal:
    """`replace` does it all; what it raises is told to `report`, and it is tried again soon."""

    def __init__(
        self,
        life_s: float,
        replace: Callable[[], Awaitable[object]],
        report: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._life_s = life_s
        self._replace = replace
        self._report = report
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Every process has been started a moment ago."""
        due = self._clock() + RENEW_AT * self._life_s
        self._task = asyncio.create_task(self._run(due), name="renewal of certificates")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self, due: float) -> None:
        while True:
            await asyncio.sleep(max(0.0, min(LOOK_S, due - self._clock())))
            if self._clock() < due:
                continue
            began = self._clock()
            self._report("certificates are renewed: every process is replaced")
            try:
                await self._replace()
            except Exception as error:
                self._report(f"certificates could not be renewed, it is tried again: {error}")
                due = self._clock() + AGAIN_AFTER * self._life_s
            else:
                due = began + RENEW_AT * self._life_s
