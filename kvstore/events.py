"""News of blocks stored and removed, numbered per node.

A number that is skipped tells a listener to ask for a full listing; so a message
that NATS could not take is simply lost. Numbers of a restarted store begin above
those of the one before, which is such a gap too.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

# Above what a store could have counted to since the clock's last tick of 1 ms.
_STEP_PER_MS = 1 << 10
# Listeners are told of this many messages at most after a jam; the rest is a gap.
_BACKLOG = 4096

Publish = Callable[[bytes], Awaitable[object]]


class BlockEvents:
    """Numbers events at once and publishes them in order, in the background."""

    def __init__(self, publish: Publish | None) -> None:
        self.sequence = time.time_ns() // 1_000_000 * _STEP_PER_MS
        self._publish = publish
        self._waiting: deque[bytes] = deque(maxlen=_BACKLOG)
        self._task: asyncio.Task[None] | None = None

    def record(
        self, model: str, fingerprint: bytes, stored: Sequence[bytes], removed: Sequence[bytes]
    ) -> None:
        """One message for what one operation did."""
        if not stored and not removed:
            return
        self.sequence += 1
        if self._publish is None:
            return
        message = {
            "seq": self.sequence,
            "model": model,
            "fingerprint": fingerprint.hex(),
            "stored": [b.hex() for b in stored],
            "removed": [b.hex() for b in removed],
        }
        self._waiting.append(json.dumps(message, separators=(",", ":")).encode())
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._drain())

    async def close(self) -> None:
        """Drops what waits."""
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()

    async def _drain(self) -> None:
        assert self._publish is not None
        try:
            while self._waiting:
                await self._publish(self._waiting.popleft())
        finally:
            self._task = None
