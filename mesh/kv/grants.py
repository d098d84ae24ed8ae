"""The local pool of pages to write, filled ahead so that no step waits for an rpc.

Also the way back: surplus pages and ended leases go to the store in the
background, as many as there are in one rpc.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from kvmesh.v1 import pages_pb2

from mesh.errors import MeshError, Unavailable
from mesh.kv.books import Books
from mesh.kv.calls import Calls, handle_of, pages_of
from mesh.kv.page import Page

log = logging.getLogger(__name__)

TRIM_AFTER_S = 1.0
# A store without pages is not asked again with every step.
REFILL_PAUSE_S = 0.05
# A decode worker keeps the 32nd part of the arena ready: 5,800 tokens in 4 GiB of SmolLM2-135M.
STANDBY_PART = 32


@dataclass(frozen=True, slots=True)
class GrantPolicy:
    """Below `low` idle pages the pool is filled to `high`; above `limit` the surplus goes back.

    A worker that holds nothing else keeps `idle`; `ready` lie there from the start.
    """

    low: int
    high: int
    limit: int
    idle: int
    ready: int = 0

    @classmethod
    def for_arena(cls, pages: int, *, standby: bool = False) -> GrantPolicy:
        """Small in a small arena: pages that lie idle here are missing elsewhere.

        With `standby` a part of the arena lies ready at any time, for prompts that are
        computed while the store is away.
        """
        growth = max(1, min(32, pages // 64))
        ready = pages // STANDBY_PART if standby else 0
        high = max(growth, ready)
        return cls(
            low=high - growth + (growth + 1) // 2,
            high=high,
            limit=high + growth,
            idle=max(ready, min(4, growth)),
            ready=ready,
        )


class Grants:
    """Takes from and gives to the books' pool; asks and returns behind it."""

    def __init__(self, books: Books, calls: Calls) -> None:
        self.policy = GrantPolicy.for_arena(1)
        self._books = books
        self._calls = calls
        self._ending: list[str] = []
        self._returning: list[Page] = []
        self._flushing: asyncio.Task[None] | None = None
        self._refilling: asyncio.Task[None] | None = None
        self._refill_not_before = 0.0
        self._trimming: asyncio.TimerHandle | None = None

    # -- pages ----------------------------------------------------------------

    def take(self, n: int) -> list[Page] | None:
        """`n` idle pages or None, never waiting."""
        taken = self._books.take(n)
        if taken is None:
            self._refill(n)
        elif self._books.idle < self.policy.low:
            self._refill(0)
        return taken

    async def grow(self, n: int) -> bool:
        """Makes `n` pages idle; False if the store has not as many or is away."""
        missing = n - self._books.idle
        if missing <= 0:
            return True
        try:
            await self._grant(missing, partial=False)
        except MeshError:
            return False
        return True

    def give(self, pages: Iterable[Page]) -> None:
        """Pages that nobody uses."""
        self._books.give(pages)
        if self._books.idle > self.policy.limit:
            self._give_back(self._books.idle - self.policy.high)
        self._trim_later()

    async def return_all(self) -> bool:
        """Every idle page goes back now; False if there was none."""
        if self._books.idle == 0:
            return False
        self._give_back(self._books.idle)
        await asyncio.shield(self._flush())
        return True

    # -- leases ---------------------------------------------------------------

    async def end(self, lease_id: str) -> None:
        """Ends a lease at the store; while that is away, the re-attach does."""
        self._ending.append(lease_id)
        self._trim_later()
        await asyncio.shield(self._flush())

    async def ended(self, lease_id: str) -> None:
        """Waits until an earlier end of that lease has been sent."""
        if lease_id in self._ending or self._flushing is not None:
            await asyncio.shield(self._flush())

    # -- the session ------------------------------------------------------------

    def settled(self) -> None:
        """A re-attach lists what is held: what it does not list needs no release."""
        self._ending.clear()
        self._returning.clear()

    def resume(self) -> None:
        """There is a session again."""
        if self._ending or self._returning:
            self._flush()
        self.fill()

    def fill(self) -> None:
        """Asks for what should lie ready at any time."""
        if self._books.idle < self.policy.ready:
            self._refill(0)

    def close(self) -> None:
        """No timer is left behind."""
        if self._trimming is not None:
            self._trimming.cancel()

    # -- inside -----------------------------------------------------------------

    async def _grant(self, n: int, *, partial: bool) -> int:
        request = pages_pb2.GrantRequest(pages=n, partial=partial)
        response = await self._calls.call(self._calls.stub.Grant, request)
        pages = pages_of(response.pages)
        self._books.grant(pages)
        self._books.store(pages)
        # What made them necessary may have been given back meanwhile.
        self._trim_later()
        return len(pages)

    def _refill(self, wanted: int) -> None:
        now = asyncio.get_running_loop().time()
        if self._refilling is not None or not self._calls.connected or now < self._refill_not_before:
            return
        missing = max(wanted, self.policy.high) - self._books.idle

        async def run() -> None:
            try:
                if await self._grant(missing, partial=True) < missing:
                    self._refill_not_before = asyncio.get_running_loop().time() + REFILL_PAUSE_S
            except MeshError as error:
                log.info("no pages were granted: %s", error)
            finally:
                self._refilling = None

        self._refilling = self._calls.spawn(run())

    def _flush(self) -> asyncio.Task[None]:
        if self._flushing is None:
            self._flushing = self._calls.spawn(self._send_back())
        return self._flushing

    async def _send_back(self) -> None:
        try:
            while (self._ending or self._returning) and self._calls.connected:
                ending, self._ending = self._ending, []
                returning, self._returning = self._returning, []
                request = pages_pb2.ReleaseRequest(
                    lease_ids=ending, granted=[handle_of(page) for page in returning]
                )
                await self._calls.call(self._calls.stub.Release, request)
        except Unavailable:
            # The re-attach does not list them: the store lets them go.
            pass
        except MeshError as error:
            log.warning("a release was refused: %s", error)
        finally:
            self._flushing = None

    def _give_back(self, n: int) -> None:
        self._returning.extend(self._books.give_up(n))
        self._flush()

    def _trim_later(self) -> None:
        if self._trimming is None and self._books.idle > self.policy.idle:
            self._trimming = asyncio.get_running_loop().call_later(TRIM_AFTER_S, self._trim)

    def _trim(self) -> None:
        self._trimming = None
        keep = self.policy.high if self._books.busy else self.policy.idle
        if self._books.idle > keep and self._calls.connected:
            self._give_back(self._books.idle - keep)
