"""The router's end of a stream: an outbox that never blocks the loop.

Knows frames only. A router that reads too slowly makes its session congested,
which pauses its requests until the outbox has drained.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from decode.frames import Frame

CONGESTED_FRAMES = 256


class RouterSession:
    """`drained` is called when a congested outbox is empty again."""

    def __init__(self, router: str, drained: Callable[[], None]) -> None:
        self.router = router
        self._drained = drained
        self._outbox: deque[Frame] = deque()
        self._news = asyncio.Event()
        self._closed = False
        self._congested = False

    @property
    def congested(self) -> bool:
        return self._congested

    def send(self, frame: Frame) -> None:
        if self._closed:
            return
        self._outbox.append(frame)
        self._congested = self._congested or len(self._outbox) > CONGESTED_FRAMES
        self._news.set()

    def close(self) -> None:
        """Ends `frames` after what is queued; later frames are dropped."""
        self._closed = True
        self._news.set()

    async def frames(self) -> AsyncIterator[Frame]:
        """Frames in the order they were sent, until the session is closed."""
        while True:
            while self._outbox:
                yield self._outbox.popleft()
            if self._congested:
                self._congested = False
                self._drained()
            if self._closed:
                return
            self._news.clear()
            await self._news.wait()
