"""Tells routers how busy this worker is: on change, at most five times a second."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from mesh.news import Load

LEAST_INTERVAL_S = 0.2


class LoadReporter:
    """`measure` says what the load is now; `send` publishes it."""

    def __init__(self, measure: Callable[[], Load], send: Callable[[Load], Awaitable[None]]) -> None:
        self._measure = measure
        self._send = send
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """The load may be another one."""
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled. Sleeps while nothing changes."""
        told: Load | None = None
        while True:
            await self._changed.wait()
            self._changed.clear()
            load = self._measure()
            if load != told:
                told = load
                await self._send(load)
                await asyncio.sleep(LEAST_INTERVAL_S)
