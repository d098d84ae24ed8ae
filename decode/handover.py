"""How a request gets the pages of its prompt: reserve, then follow, pull or draw.

Runs beside the step loop, one of these per request. What it learns it tells the
`Desk`, which knows when page tables may be touched. An rpc that may have taken
pages is never abandoned; `stop` waits for it, so that the release that follows is
the last word.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from decode.opening import extra_pages
from decode.request import Phase, Request
from mesh.errors import MeshError, StaleAttempt, Unavailable
from mesh.kv.client import KvClient
from mesh.kv.page import Drawn, Page

DRAW_RETRY_S = 0.5

log = logging.getLogger(__name__)


class Desk(Protocol):
    """Whom a hand-over tells what it learns; called on the event loop."""

    def arrived(self, request: Request, blocks: Sequence[tuple[int, Page]]) -> None: ...
    def drawn(self, request: Request, drawn: Drawn) -> None: ...
    def failed(self, request: Request, error: MeshError) -> None: ...
    def source_failed(self, request: Request, attempt: int, error: MeshError) -> None: ...


class Handover:
    """The way of one request from `open` to `ready`."""

    def __init__(self, kv: KvClient, desk: Desk, request: Request, page_tokens: int) -> None:
        self._kv = kv
        self._desk = desk
        self._request = request
        self._page_tokens = page_tokens
        self._follower: asyncio.Task[None] | None = None
        self._taking: asyncio.Task[None] | None = None
        self._pulling: asyncio.Task[None] | None = None

    async def reserve(self) -> None:
        """Asks the store for everything at once. Raises MeshError when it does not fit.

        The rpc goes on if the caller is cancelled: its answer must be known.
        """
        self._taking = asyncio.create_task(self._reserve())
        await asyncio.shield(self._taking)

    async def _reserve(self) -> None:
        opening = self._request.opening
        reservation = await self._kv.reserve(
            opening.handoff_id,
            opening.capability,
            list(opening.block_ids),
            opening.root_id,
            extra_pages(opening, self._page_tokens),
        )
        self._request.reserved(reservation.have, reservation.extra)

    def follow(self) -> None:
        """Watches for blocks that others commit."""
        self._follower = asyncio.create_task(self._follow())

    def pull(self, address: str) -> None:
        """Has the store bring the missing blocks from another node's; `follow` hears of them."""
        self.stop_pulling()
        self._pulling = asyncio.create_task(self._pull(address, self._request.attempt))

    def stop_pulling(self) -> None:
        """Another source is used from now on."""
        if self._pulling is not None:
            self._pulling.cancel()

    def draw(self) -> None:
        """Takes the missing pages for writing: this worker computes the prompt itself."""
        if self._taking is None or self._taking.done():
            self._taking = asyncio.create_task(self._draw())

    def give_up(self) -> None:
        """Nothing is expected of the store any more: this worker goes on without it."""
        self.stop_pulling()
        self.stop_following()

    async def stop(self) -> None:
        """Ends watching and drawing. Afterwards nothing more is taken for the request."""
        for task in (self._follower, self._pulling):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        if self._taking is not None:
            await asyncio.wait({self._taking})

    def stop_following(self) -> None:
        if self._follower is not None:
            self._follower.cancel()

    async def _follow(self) -> None:
        request = self._request
        try:
            async for blocks in self._kv.committed(request.handoff_id):
                self._desk.arrived(request, blocks)
        except MeshError as error:
            self._desk.failed(request, error)

    async def _pull(self, address: str, attempt: int) -> None:
        request, opening = self._request, self._request.opening
        try:
            await self._kv.fetch(request.handoff_id, attempt, opening.capability, opening.root_id, address)
        except MeshError as error:
            self._desk.source_failed(request, attempt, error)

    async def _draw(self) -> None:
        request = self._request
        while request.phase is Phase.HANDING_OVER:
            attempt = request.attempt
            try:
                drawn = await self._kv.draw(request.handoff_id, attempt, request.opening.capability)
            except Unavailable:
                # Nothing can be taken while the store is away; the router gives up when it wants to.
                await asyncio.sleep(DRAW_RETRY_S)
            except MeshError as error:
                if not isinstance(error, StaleAttempt) or attempt == request.attempt:
                    self._cannot_draw(error)
                    return
            else:
                self._desk.drawn(request, drawn)
                return

    def _cannot_draw(self, error: MeshError) -> None:
        """One that went on alone meanwhile does not need to."""
        if self._request.phase is Phase.HANDING_OVER:
            self._desk.failed(self._request, error)
