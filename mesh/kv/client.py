"""A worker's hold on the KV store: pages to write, leases on what is committed.

One per process, on the event loop of the process. It keeps a session with the
store; when that breaks it attaches again by itself and tells what is held, so a
restart of the store costs nothing that was held. While the store is away, pages
in use and idle ones stay usable, releases wait, and everything else raises
`Unavailable`. It does not know what the pages hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio
from kvmesh.v1 import pages_pb2

from mesh.errors import MeshError, NotFound, OutOfPages, StaleHandle, Unavailable, from_rpc_error
from mesh.kv.calls import Calls, handle_of, pages_of
from mesh.kv.grants import GrantPolicy, Grants
from mesh.kv.header_file import Header
from mesh.kv.layout import Layout
from mesh.kv.page import CommitItem, Drawn, Page, Reservation
from mesh.kv.session import Attached, StoreSession
from mesh.kv.waiting import Waiting

log = logging.getLogger(__name__)

# A transfer goes on while prefill computes; the router gives up on one long before.
FETCH_S = 600.0

T = TypeVar("T")
OnLost = Callable[[str, MeshError], None]


class KvClient:
    """Made by `attach`. `arena` is the whole arena, writable; page i begins at i * page_bytes.

    Views of `arena` must not be used after `close`.
    """

    def __init__(self, session: StoreSession, *, on_lost: OnLost | None) -> None:
        self._session = session
        self._books = session.books
        self._stub = session.stub
        self._on_lost = on_lost
        self._waiting: dict[str, Waiting] = {}
        self._in_use: Counter[str] = Counter()
        self._ended_in_use: set[str] = set()
        self._calls = Calls(session)
        self._grants = Grants(session.books, self._calls)
        session.on_committed = self._committed
        session.on_lost = self._lost
        session.on_listing = self._listing
        session.on_attached = self._attached
        session.on_failed = self._failed

    @classmethod
    async def attach(
        cls,
        channel: grpc.aio.Channel,
        *,
        worker: str,
        model: str,
        fingerprint: bytes,
        layout: Layout,
        on_lost: OnLost | None = None,
        on_away: Callable[[], None] | None = None,
        standby: bool = False,
        protect: bool = False,
    ) -> KvClient:
        """Waits for the store, maps its arena and takes the owner lock.

        `worker` is the name in the channel's identity. `on_lost(lease_id, error)` is
        called when a lease could not be taken up again after the store restarted: its
        pages must not be used for an answer, `on_away()` when the session breaks. With
        `standby` some pages are always kept for prompts that have to be computed while
        the store is away. `protect` is for tests: what may not be
        written is mapped read-only. Raises MeshError where the store refuses.
        """
        session = StoreSession(channel, worker=worker, model=model, fingerprint=fingerprint, layout=layout)
        client = cls(session, on_lost=on_lost)
        await session.start()
        if protect:
            session.books.protect(session.mapping.protection())
        if on_away is not None:
            session.on_away = on_away
        client._grants.policy = GrantPolicy.for_arena(client.pages, standby=standby)
        client._grants.fill()
        return client

    # -- what it is -----------------------------------------------------------

    @property
    def arena(self) -> memoryview:
        """All pages, shared with the store and every worker of the node."""
        return self._session.mapping.arena

    @property
    def pages(self) -> int:
        """Pages in the arena."""
        return self._session.mapping.pages

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self._session.mapping.page_bytes

    @property
    def epoch(self) -> int:
        """The name of this life of this process."""
        return self._session.epoch

    @property
    def connected(self) -> bool:
        """Whether the store can be asked now."""
        return self._session.number != 0

    @property
    def idle_pages(self) -> int:
        """Pages that `take` could give now."""
        return self._books.idle

    @property
    def failed(self) -> asyncio.Future[MeshError]:
        """Resolves if the store refuses this process for good: it has to start anew."""
        return self._session.failed

    def header(self, index: int) -> Header:
        """What the store's headers say of a page."""
        return self._session.mapping.header(index)

    async def wait_connected(self) -> None:
        """Returns as soon as the store can be asked."""
        await self._session.wait_connected()

    # -- hand-over --------------------------------------------------------------

    async def reserve(
        self,
        handoff_id: str,
        capability: str,
        block_ids: Sequence[bytes],
        root_id: bytes,
        extra_pages: int,
        attempt: int = 0,
    ) -> Reservation:
        """All or nothing: leases the cached prefix, sets the rest aside, grants extra pages.

        Raises OutOfPages when it does not fit now, Conflict when another worker has
        reserved for this handoff, unless `attempt` is above its. `extra` pages are the
        caller's, as from `take`. If the caller is cancelled, whatever was reserved is given back.
        """
        request = pages_pb2.ReserveRequest(
            handoff_id=handoff_id,
            capability=capability,
            block_ids=block_ids,
            root_id=root_id,
            extra_pages=extra_pages,
            attempt=attempt,
        )
        return await self._calls.finish(
            self._using(handoff_id, self._reserve(request, block_ids)),
            undo=lambda reserved: self._undo_reserve(handoff_id, reserved),
        )

    def committed(self, handoff_id: str) -> AsyncIterator[list[tuple[int, Page]]]:
        """Blocks of a reservation as they are committed, leased to this worker.

        Ends when every block is leased or the lease is released. Raises NotFound with
        code `reservation_lost` when the store lost the reservation.
        """
        waiting = self._waiting.get(handoff_id)
        if waiting is None:
            raise NotFound(f"nothing is reserved for {handoff_id}", code="reservation_lost")
        return aiter(waiting)

    async def draw(self, handoff_id: str, attempt: int, capability: str) -> Drawn:
        """Takes the missing pages of a reservation for writing, leases the committed ones.

        Raises StaleAttempt when a later attempt has drawn, NotFound when there is no
        such reservation, OutOfPages when pages taken from an earlier drawer cannot be replaced.
        """
        return await self._calls.finish(self._using(handoff_id, self._draw(handoff_id, attempt, capability)))

    async def fetch(
        self, handoff_id: str, attempt: int, capability: str, root_id: bytes, address: str
    ) -> int:
        """Has the store bring what a reservation misses from another node's; how many blocks came.

        They arrive through `committed`. Cancelling it stops the transfer. Raises
        Unavailable when either store is away, StaleAttempt when a later attempt took over.
        """
        if not self.connected:
            raise Unavailable("the KV store is away")
        request = pages_pb2.FetchRequest(
            epoch=self._session.epoch,
            session=self._session.number,
            handoff_id=handoff_id,
            attempt=attempt,
            capability=capability,
            root_id=root_id,
            address=address,
        )
        call = self._stub.Fetch(request, timeout=FETCH_S)
        # It ends with the session too: a store that hangs brings nothing.
        self._session.flying.add(call)
        try:
            response: pages_pb2.FetchResponse = await call
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Unavailable("the session with the KV store broke") from None
        finally:
            self._session.flying.discard(call)
        return response.pulled_blocks

    async def commit(self, lease_id: str, blocks: Sequence[CommitItem], attempt: int = 0) -> list[Page]:
        """Gives full blocks their ids; for each, the page that has it now, leased to `lease_id`.

        Where that is not the block's own page, the caller swaps its table and gives
        its own page back. Raises Unavailable when the store is away: the pages stay
        the caller's, and the commit may be repeated.
        """
        return await self._calls.finish(self._using(lease_id, self._commit(lease_id, blocks, attempt)))

    async def release(self, lease_id: str) -> None:
        """Ends a lease. Never fails: while the store is away it is remembered."""
        if lease_id in self._in_use:
            self._ended_in_use.add(lease_id)
        self._books.release(lease_id)
        waiting = self._waiting.pop(lease_id, None)
        if waiting is not None:
            waiting.end()
        await self._grants.end(lease_id)

    # -- growth -------------------------------------------------------------------

    def take(self, n: int) -> list[Page] | None:
        """`n` pages to write from the local pool, or None; the pool is refilled behind it."""
        return self._grants.take(n)

    async def grow(self, n: int) -> bool:
        """Asks for pages so that `take(n)` succeeds. False if the store has none or is away."""
        return await self._calls.finish(self._grants.grow(n))

    def give(self, pages: Iterable[Page]) -> None:
        """Pages that nobody here uses any more. Drawn and committed ones are passed over:
        those go with their lease. A surplus is returned to the store behind it."""
        self._grants.give(pages)

    async def close(self) -> None:
        """A clean goodbye: everything that is held goes back at once."""
        self._grants.close()
        self._calls.close()
        for waiting in self._waiting.values():
            waiting.end(Unavailable("the KV client is closed"))
        await self._session.close()

    # -- inside: rpcs ---------------------------------------------------------------

    async def _using(self, lease_id: str, work: Coroutine[Any, Any, T]) -> T:
        """Runs an rpc that takes something for a lease. If the lease is released meanwhile,
        nobody knows which of the two the store saw last: it is released once more."""
        self._in_use[lease_id] += 1
        try:
            return await work
        finally:
            self._in_use[lease_id] -= 1
            if not self._in_use[lease_id]:
                del self._in_use[lease_id]
                if lease_id in self._ended_in_use:
                    self._ended_in_use.discard(lease_id)
                    self._calls.spawn(self.release(lease_id))

    async def _reserve(self, request: pages_pb2.ReserveRequest, block_ids: Sequence[bytes]) -> Reservation:
        handoff_id = request.handoff_id
        self._books.release(handoff_id)
        await self._grants.ended(handoff_id)
        waiting = self._waiting[handoff_id] = Waiting(block_ids)
        try:
            try:
                response = await self._calls.call(self._stub.Reserve, request)
            except OutOfPages:
                # Pages that lie idle here are the first to be used.
                if not await self._grants.return_all():
                    raise
                response = await self._calls.call(self._stub.Reserve, request)
        except BaseException:
            self._waiting.pop(handoff_id, None)
            raise
        have, extra = pages_of(response.have), pages_of(response.extra)
        for page, block_id in zip(have, block_ids, strict=False):
            self._books.hold(handoff_id, page, block_id)
        self._books.grant(extra)
        waiting.reserved(len(have))
        return Reservation(have, response.missing, extra)

    def _undo_reserve(self, handoff_id: str, reserved: Reservation) -> None:
        self.give(reserved.extra)
        self._calls.spawn(self.release(handoff_id))

    async def _draw(self, handoff_id: str, attempt: int, capability: str) -> Drawn:
        request = pages_pb2.DrawRequest(handoff_id=handoff_id, attempt=attempt, capability=capability)
        response = await self._calls.call(self._stub.Draw, request)
        drawn = Drawn(_blocks(response.committed), _blocks(response.writable))
        self._books.draw(handoff_id, (page for _, page in drawn.writable))
        waiting = self._waiting.get(handoff_id)
        for _, page in drawn.committed:
            # A drawer is not told the chain: which block a page holds, its header says.
            self._books.hold(handoff_id, page, self.header(page.index).block_id)
        if waiting is not None:
            waiting.got(i for i, _ in drawn.committed)
        return drawn

    async def _commit(self, lease_id: str, blocks: Sequence[CommitItem], attempt: int) -> list[Page]:
        if not self.connected:
            # Nothing is sent, so nothing is in doubt: the pages can be used again at once.
            raise Unavailable("the KV store is away")
        request = pages_pb2.CommitRequest(lease_id=lease_id, attempt=attempt)
        for block in blocks:
            request.blocks.add(
                handle=handle_of(block.page), block_id=block.block_id, parent_id=block.parent_id
            )
        self._books.doubt(lease_id, blocks)
        try:
            response = await self._calls.call(self._stub.Commit, request)
        except Unavailable:
            raise
        except MeshError:
            self._books.refused(blocks)
            raise
        winners = pages_of(response.pages)
        self._books.committed(lease_id, blocks, winners)
        waiting = self._waiting.get(lease_id)
        if waiting is not None:
            index = {b: i for i, b in enumerate(waiting.block_ids)}
            waiting.got(index[b.block_id] for b in blocks if b.block_id in index)
        return winners

    # -- inside: what the session tells ---------------------------------------------------

    def _committed(self, handoff_id: str, blocks: list[tuple[int, Page]]) -> None:
        waiting = self._waiting.get(handoff_id)
        if waiting is None:
            return
        for i, page in blocks:
            self._books.hold(handoff_id, page, waiting.block_ids[i])
        waiting.push(blocks)

    def _lost(self, handoff_id: str, message: str) -> None:
        waiting = self._waiting.get(handoff_id)
        if waiting is not None and not waiting.complete:
            waiting.end(NotFound(f"{handoff_id}: {message}", code="reservation_lost"))

    def _listing(self) -> list[str]:
        """What is not listed needs no release; reservations are listed even while empty."""
        self._grants.settled()
        return [handoff_id for handoff_id, w in self._waiting.items() if not w.complete]

    def _attached(self, attached: Attached) -> None:
        for lease_id in attached.rejected_leases:
            error = StaleHandle(f"lease {lease_id} could not be taken up again", code="lease_lost")
            log.warning("%s", error)
            waiting = self._waiting.get(lease_id)
            if waiting is not None:
                waiting.end(error)
            if self._on_lost is not None:
                with contextlib.suppress(Exception):
                    self._on_lost(lease_id, error)
        self._grants.resume()

    def _failed(self, error: MeshError) -> None:
        for waiting in self._waiting.values():
            waiting.end(error)


def _blocks(blocks: Iterable[pages_pb2.CommittedBlock]) -> list[tuple[int, Page]]:
    return [(b.index, Page(b.handle.page, b.handle.generation)) for b in blocks]
