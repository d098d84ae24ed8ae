"""Holds the newest policy snapshot, by one `Policy.Watch` stream to one IAM.

While IAM is away the last snapshot stays good for `usable_s`; after that nothing
is decided any more (503). A hint over NATS that names a newer version makes a
stream that has not delivered it start again, so a hung IAM does not delay a
revocation. It does not know how decisions are made.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence

from mesh.errors import Unavailable
from router.core.policy import Snapshot

log = logging.getLogger(__name__)

USABLE_S = 60.0
RETRY_FIRST_S, RETRY_MOST_S = 0.1, 2.0
HINT_PATIENCE_S = 1.0

Watch = Callable[[str, int], AsyncIterator[Snapshot]]


class PolicyHolder:
    """The newest snapshot.

    `watch(address, version)` yields snapshots until the stream breaks; `on_change`
    is called with each. `clock` in seconds, monotonic.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        watch: Watch,
        *,
        usable_s: float = USABLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._addresses = tuple(addresses)
        self._watch = watch
        self._usable_s = usable_s
        self._clock = clock
        self._snapshot: Snapshot | None = None
        self._connected = False
        self._lost_at = clock()
        self._arrived = asyncio.Event()
        self._restart = asyncio.Event()
        self._hint: asyncio.TimerHandle | None = None
        self.on_change: list[Callable[[Snapshot], None]] = []

    @property
    def usable(self) -> bool:
        """Whether `current` would answer."""
        if self._snapshot is None:
            return False
        return self._connected or self._clock() - self._lost_at <= self._usable_s

    def current(self) -> Snapshot:
        """The snapshot to decide by; raises Unavailable when there is none, or only a stale one."""
        if self._snapshot is None or not self.usable:
            raise Unavailable(
                "The authorization service is unavailable. Try again.",
                code="service_unavailable",
                retry_after_s=1.0,
            )
        return self._snapshot

    async def arrived(self, within_s: float) -> bool:
        """Waits for the first snapshot; False if there is none after `within_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._arrived.wait()
        return self._snapshot is not None

    def hint(self, version: int | None = None) -> None:
        """News says that a snapshot of this version exists (None: a newer one than ours)."""
        held = self._snapshot.version if self._snapshot is not None else 0
        if self._hint is not None or (version is not None and version <= held):
            return
        loop = asyncio.get_running_loop()
        self._hint = loop.call_later(HINT_PATIENCE_S, self._late, held)

    def _late(self, held: int) -> None:
        self._hint = None
        if self._connected and self._snapshot is not None and self._snapshot.version == held:
            self._restart.set()

    async def run(self) -> None:
        """Keeps a stream open until cancelled."""
        retry_s = RETRY_FIRST_S
        turn = 0
        while True:
            address = self._addresses[turn % len(self._addresses)] if self._addresses else ""
            turn += 1
            received = await self._follow(address) if address else False
            if self._connected:
                self._connected = False
                self._lost_at = self._clock()
            retry_s = RETRY_FIRST_S if received else min(retry_s * 2, RETRY_MOST_S)
            await asyncio.sleep(retry_s)

    async def _follow(self, address: str) -> bool:
        """One stream, to its end. True if it delivered anything."""
        reading = asyncio.ensure_future(self._read(address))
        restart = asyncio.ensure_future(self._restart.wait())
        try:
            await asyncio.wait({reading, restart}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._restart.clear()
            restart.cancel()
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
        return self._connected

    async def _read(self, address: str) -> None:
        held = self._snapshot.version if self._snapshot is not None else 0
        try:
            async for snapshot in self._watch(address, held):
                self._connected = True
                self._snapshot = snapshot
                self._arrived.set()
                for listener in self.on_change:
                    listener(snapshot)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.warning("policy stream ended", extra={"address": address, "reason": type(error).__name__})
