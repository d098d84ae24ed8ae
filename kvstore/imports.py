"""The receiving end of a transfer: a reservation's missing blocks, from another node's store.

The store draws them like a worker that computes them, writes what arrives, compares
it with the checksum that travels with it, and commits: whoever waits for the
reservation is told as if the blocks had been computed here. Streams that break are
opened again for what is still missing. It does not know how pages travel.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from kvstore.arena import Arena
from kvstore.guests import guest
from kvstore.owners import Sealed
from kvstore.seals import seal
from mesh.errors import InternalError, MeshError, NotFound, StaleAttempt, Unavailable
from mesh.kv.page import Page

log = logging.getLogger(__name__)

STREAMS = 2
# Below this one stream is as good.
STREAM_BYTES = 4 * 1024 * 1024
# A source that cannot be reached for so long will not deliver.
PATIENCE_S = 3.0
RETRY_S = 0.05
# A page that arrives corrupt is asked for again so many times.
CORRUPT_TRIES = 3


@dataclass(frozen=True, slots=True)
class Arrival:
    """A page is complete in its place. `seal` travelled with it, `found` is the xxh3-64 of its bytes."""

    block_id: bytes
    seal: int
    found: int


class Source(Protocol):
    """The way to another node's store."""

    def pull(self, handoff_id: str, places: dict[bytes, memoryview]) -> AsyncIterator[list[Arrival]]:
        """Fills the places of the wanted blocks as they come, each once; ends after the last.

        Gives what has come since it was last asked.

        Raises Unavailable where the stream breaks, any other MeshError where the
        other store refuses.
        """


@dataclass(frozen=True, slots=True)
class Fetching:
    """One order: `attempt` fences it like any drawer's."""

    handoff_id: str
    org: str
    attempt: int
    root_id: bytes


class Import:
    """Runs one order; `pulled` counts what came."""

    def __init__(
        self,
        arena: Arena,
        order: Fetching,
        source: Source,
        settle: Callable[[Arena], None],
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.pulled = 0
        self._arena = arena
        self._order = order
        self._source = source
        self._settle = settle
        self._patience_s = patience_s
        self._corrupt: dict[bytes, int] = {}
        self._heard_at = 0.0

    async def run(self) -> None:
        """Returns when every block of the reservation is committed here.

        Raises NotFound when the reservation ends, StaleAttempt when a later attempt
        takes over, and what makes the source useless.
        """
        order, pool = self._order, self._arena.pool
        with guest(self._arena, f"import of {order.handoff_id}", self._settle) as epoch:
            drawn = pool.draw(epoch, order.handoff_id, order.org, order.attempt)
            self._settle(self._arena)
            slots = pool.handoffs[order.handoff_id].slots
            parents = {s.block_id: slots[i - 1].block_id if i else order.root_id for i, s in enumerate(slots)}
            ids = [s.block_id for s in slots]
            missing = {ids[i]: page for i, page in drawn.writable}
            self._heard_at = time.monotonic()
            streams = STREAMS if len(missing) * self._arena.files.page_bytes > STREAM_BYTES else 1
            shares = [dict(list(missing.items())[n::streams]) for n in range(streams)]
            tasks = [asyncio.create_task(self._stream(epoch, share, parents)) for share in shares if share]
            watch = asyncio.create_task(self._overtaken())
            try:
                await _all_or_first_error(tasks, watch)
            finally:
                for task in (*tasks, watch):
                    task.cancel()
                await asyncio.gather(*tasks, watch, return_exceptions=True)

    async def _stream(self, epoch: int, missing: dict[bytes, Page], parents: dict[bytes, bytes]) -> None:
        """Pulls one share until nothing of it is missing."""
        handoff_id = self._order.handoff_id
        while missing:
            places = {b: self._arena.files.page(page.index) for b, page in missing.items()}
            try:
                async with aclosing(self._source.pull(handoff_id, places)) as arrivals:  # type: ignore[type-var]
                    async for batch in arrivals:
                        self._accept(epoch, missing, batch, parents)
                if missing:
                    raise Unavailable("not every page came as it should")
            except Unavailable as error:
                if time.monotonic() - self._heard_at > self._patience_s:
                    raise
                log.info("a stream of pages broke and is opened again: %s", error)
                await asyncio.sleep(min(RETRY_S, self._patience_s))

    def _accept(
        self, epoch: int, missing: dict[bytes, Page], batch: list[Arrival], parents: dict[bytes, bytes]
    ) -> None:
        """Commits the pages that are what they should be; the others stay missing."""
        order, arena = self._order, self._arena
        sealed: list[Sealed] = []
        for arrival in batch:
            block_id, page = arrival.block_id, missing.get(arrival.block_id)
            if page is None:
                continue
            if arrival.seal != seal(block_id, parents[block_id], arrival.found):
                tries = self._corrupt[block_id] = self._corrupt.get(block_id, 0) + 1
                log.warning("a page of %s arrived corrupt (%d)", order.handoff_id, tries)
                if tries >= CORRUPT_TRIES:
                    raise InternalError("pages arrive corrupt from the other node", code="corrupt_page")
                continue
            sealed.append(Sealed(page, block_id, parents[block_id], arrival.found))
            del missing[block_id]
        if not sealed:
            return
        arena.pool.commit(epoch, order.handoff_id, sealed, order.attempt)
        self._heard_at = time.monotonic()
        self.pulled += len(sealed)
        arena.pulled_blocks += len(sealed)
        self._settle(arena)

    async def _overtaken(self) -> None:
        """Raises when the blocks are not this import's business any more."""
        handoff_id = self._order.handoff_id
        while True:
            stirring = self._arena.stirring(handoff_id)
            handoff = self._arena.pool.handoffs.get(handoff_id)
            if handoff is None:
                raise NotFound(f"the reservation {handoff_id} has ended", code="reservation_lost")
            if handoff.attempt != self._order.attempt:
                raise StaleAttempt(f"a later attempt of {handoff_id} gets its blocks elsewhere")
            await stirring.wait()


async def _all_or_first_error(tasks: Sequence[asyncio.Task[None]], watch: asyncio.Task[None]) -> None:
    pending = {*tasks, watch}
    while pending - {watch}:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            error = task.exception()
            if isinstance(error, MeshError):
                raise error
            task.result()
