"""`kvmesh.v1.Pages` on the wire: protobuf on one side, plain data on the other.

Checks who calls and what the router's capability allows; the rules for pages are
in `pool.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from kvmesh.v1 import common_pb2, pages_pb2, pages_pb2_grpc

from kvstore.capability import check_capability
from kvstore.fields import block_id, block_ids, named, unpacked
from kvstore.files import ArenaKey
from kvstore.imports import Fetching
from kvstore.invariants import violations
from kvstore.owners import CommittedFrame
from kvstore.peers import messages
from kvstore.store import Frame, Session, Store
from kvstore.table import PageState
from kvstore.transfers import Transfers
from mesh.errors import InvalidRequest, PermissionDenied
from mesh.faults import NO_FAULTS, Action, FaultPoints
from mesh.identity import TokenVerifier
from mesh.kv.layout import layout_from_proto
from mesh.kv.page import CommitItem, Held, Page
from mesh.rpc import caller

WORKERS = ("prefill", "decode")
PAGES = "/kvmesh.v1.Pages/"
SERVICE_NAME = "kvmesh.v1.Pages"
ALLOWED = {
    PAGES: WORKERS,
    PAGES + "Lookup": ("router",),
    PAGES + "ListBlocks": ("router",),
    PAGES + "Pull": ("kvstore",),
    PAGES + "Stats": ("operator",),
    PAGES + "Forget": ("operator",),
}
BLOCKS_PER_MESSAGE = 16384

Context = Any


class PagesService(pages_pb2_grpc.PagesServicer):
    """One per process."""

    def __init__(
        self,
        store: Store,
        transfers: Transfers,
        verifier: TokenVerifier,
        *,
        node: str,
        faults: FaultPoints = NO_FAULTS,
    ) -> None:
        self._store = store
        self._transfers = transfers
        self._verifier = verifier
        self._node = node
        self._faults = faults

    async def Attach(
        self, request_iterator: AsyncIterator[pages_pb2.AttachRequest], context: Context
    ) -> AsyncIterator[pages_pb2.AttachResponse]:
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("frame") != "attach":
            raise InvalidRequest("a session begins with attach")
        session = await self._attach(first.attach, caller(context).name)
        goodbye = asyncio.create_task(_goodbye(request_iterator, session))
        try:
            yield pages_pb2.AttachResponse(attached=self._attached(session))
            while (frame := await session.frames.get()) is not None:
                fault = self._faults.at("page_leased")
                if fault is not None and fault.action is Action.DELAY:
                    await asyncio.sleep(fault.seconds)
                elif fault is not None:
                    yield _frame(frame)
                yield _frame(frame)
        finally:
            clean = goodbye.done() and not goodbye.cancelled() and goodbye.result()
            goodbye.cancel()
            self._store.leave(session, clean=clean)

    async def Reserve(self, request: pages_pb2.ReserveRequest, context: Context) -> pages_pb2.ReserveResponse:
        session = self._session(request, context)
        wanted = block_ids(request.block_ids)
        org = self._organisation(session, request, wanted)
        reserved = await self._store.reserve(
            session, request.handoff_id, org, wanted, request.extra_pages, request.attempt
        )
        return pages_pb2.ReserveResponse(
            have=_handles(reserved.have), missing=reserved.missing, extra=_handles(reserved.extra)
        )

    async def Draw(self, request: pages_pb2.DrawRequest, context: Context) -> pages_pb2.DrawResponse:
        session = self._session(request, context)
        org = self._organisation(session, request)
        drawn = self._store.draw(session, request.handoff_id, org, request.attempt)
        return pages_pb2.DrawResponse(committed=_blocks(drawn.committed), writable=_blocks(drawn.writable))

    async def Commit(self, request: pages_pb2.CommitRequest, context: Context) -> pages_pb2.CommitResponse:
        session = self._session(request, context)
        items: list[CommitItem] = []
        for block in request.blocks:
            handle = block.handle
            page = Page(handle.page, handle.generation)
            items.append(CommitItem(page, block_id(block.block_id), block_id(block.parent_id)))
        winners = await self._store.commit(
            session, named(request.lease_id, "lease_id"), items, request.attempt
        )
        return pages_pb2.CommitResponse(pages=_handles(winners))

    async def Release(self, request: pages_pb2.ReleaseRequest, context: Context) -> pages_pb2.ReleaseResponse:
        session = self._session(request, context)
        self._store.release(session, list(request.lease_ids), _pages(request.granted))
        return pages_pb2.ReleaseResponse()

    async def Grant(self, request: pages_pb2.GrantRequest, context: Context) -> pages_pb2.GrantResponse:
        session = self._session(request, context)
        pages = await self._store.grant(session, request.pages, partial=request.partial)
        return pages_pb2.GrantResponse(pages=_handles(pages))

    async def Lookup(self, request: pages_pb2.LookupRequest, context: Context) -> pages_pb2.LookupResponse:
        chains: list[Sequence[bytes]] = [chain.block_ids for chain in request.chains]
        if chains and request.packed_chains:
            raise InvalidRequest("either chains or packed_chains", param="packed_chains")
        chains += [unpacked(chain) for chain in request.packed_chains]
        found = self._store.lookup(request.model, request.content_fingerprint, chains)
        return pages_pb2.LookupResponse(prefix_blocks=found)

    async def ListBlocks(
        self, request: pages_pb2.ListBlocksRequest, context: Context
    ) -> AsyncIterator[pages_pb2.ListBlocksResponse]:
        sequence, block_ids = self._store.blocks(request.model, request.content_fingerprint)
        for start in range(0, max(len(block_ids), 1), BLOCKS_PER_MESSAGE):
            yield pages_pb2.ListBlocksResponse(
                sequence=sequence, block_ids=block_ids[start : start + BLOCKS_PER_MESSAGE]
            )

    async def Pull(
        self, request: pages_pb2.PullRequest, context: Context
    ) -> AsyncIterator[pages_pb2.PullResponse]:
        async with aclosing(self._transfers.export(request)) as batches:
            async for batch in batches:
                for page in batch:
                    for message in messages(page, compress=request.compress):
                        yield message

    async def Fetch(self, request: pages_pb2.FetchRequest, context: Context) -> pages_pb2.FetchResponse:
        session = self._session(request, context)
        org = self._organisation(session, request)
        order = Fetching(request.handoff_id, org, request.attempt, block_id(request.root_id))
        pulled = await self._transfers.fetch(session, order, request.address, request.capability)
        return pages_pb2.FetchResponse(
            pulled_blocks=pulled, pulled_bytes=pulled * session.arena.files.page_bytes
        )

    async def Forget(self, request: pages_pb2.ForgetRequest, context: Context) -> pages_pb2.ForgetResponse:
        await self._store.forget(named(request.organisation, "organisation"))
        return pages_pb2.ForgetResponse()

    async def Stats(self, request: pages_pb2.StatsRequest, context: Context) -> pages_pb2.StatsResponse:
        response = pages_pb2.StatsResponse(node=self._node)
        for key, arena in self._store.arenas.items():
            counts = arena.pool.counts()
            response.arenas.add(
                model=key.model,
                total=arena.files.pages,
                free=counts[PageState.FREE],
                granted=counts[PageState.GRANTED],
                cached=counts[PageState.CACHED],
                leased=counts[PageState.LEASED],
                quarantined=counts[PageState.QUARANTINED],
                page_bytes=arena.files.page_bytes,
                leases=arena.pool.leases(),
                reservations=len(arena.pool.handoffs),
                hit_blocks=arena.pool.hit_blocks,
                missed_blocks=arena.pool.missed_blocks,
                evicted_blocks=arena.pool.table.evicted,
                pulled_blocks=arena.pulled_blocks,
                sent_blocks=arena.sent_blocks,
            )
            response.violations.extend(f"{key.model}: {v}" for v in violations(arena.pool))
        if (disk := self._store.tiers.disk) is not None:
            response.disk.CopyFrom(
                pages_pb2.DiskStats(
                    limit_bytes=disk.books.limit_bytes,
                    bytes=disk.books.bytes,
                    blocks=disk.books.blocks,
                    written_blocks=disk.written,
                    loaded_blocks=disk.loaded,
                    damaged_blocks=disk.damaged,
                    refused_blocks=disk.refused,
                    trouble=disk.trouble,
                )
            )
        return response

    async def _attach(self, attach: pages_pb2.Attach, name: str) -> Session:
        if attach.worker != name:
            raise PermissionDenied(f"{name} cannot attach as {attach.worker}")
        if not attach.model or not attach.content_fingerprint:
            raise InvalidRequest("attach names no model or no fingerprint", param="attach")
        layout = layout_from_proto(attach.layout)
        if attach.epoch == 0:
            return await self._store.attach(name, attach.model, attach.content_fingerprint, layout)
        key = ArenaKey(attach.model, attach.content_fingerprint, layout.digest())
        held = [
            Held(lease.lease_id, tuple(_pages(lease.pages)), tuple(block_ids(lease.block_ids)))
            for lease in attach.leases
        ]
        if any(len(h.pages) != len(h.block_ids) for h in held):
            raise InvalidRequest("a held lease has not one block id per page", param="leases")
        return await self._store.reattach(name, attach.epoch, key, layout, held, _pages(attach.granted))

    def _attached(self, session: Session) -> pages_pb2.Attached:
        files = session.arena.files
        return pages_pb2.Attached(
            epoch=session.epoch,
            session=session.number,
            arena_path=str(files.pages_path),
            headers_path=str(files.headers_path),
            owner_lock_path=str(self._store.locks.path(session.epoch)),
            pages=files.pages,
            page_bytes=files.page_bytes,
            node=self._node,
            rejected_leases=session.rejected_leases,
            rejected_granted=_handles(session.rejected_granted),
        )

    def _organisation(self, session: Session, request: Any, wanted: Sequence[bytes] | None = None) -> str:
        """Whose request this is, by its capability, for this model and the handoff that it names."""
        return check_capability(
            self._verifier,
            request.capability,
            handoff_id=named(request.handoff_id, "handoff_id"),
            model=session.arena.key.model,
            block_ids=wanted,
        )

    def _session(self, request: Any, context: Context) -> Session:
        return self._store.session(request.epoch, request.session, caller(context).name)


async def _goodbye(requests: AsyncIterator[pages_pb2.AttachRequest], session: Session) -> bool:
    """True when the worker detaches, False when its side of the stream just ends."""
    clean = False
    with contextlib.suppress(Exception):
        async for request in requests:
            if request.WhichOneof("frame") == "detach":
                clean = True
                break
    session.frames.put_nowait(None)
    return clean


def _frame(frame: Frame) -> pages_pb2.AttachResponse:
    if isinstance(frame, CommittedFrame):
        committed = pages_pb2.Committed(handoff_id=frame.handoff_id, blocks=_blocks(frame.blocks))
        return pages_pb2.AttachResponse(committed=committed)
    lost = pages_pb2.Lost(handoff_id=frame.handoff_id, message="the store has no such reservation")
    return pages_pb2.AttachResponse(lost=lost)


def _handles(pages: Iterable[Page]) -> list[common_pb2.PageHandle]:
    return [common_pb2.PageHandle(page=p.index, generation=p.generation) for p in pages]


def _pages(handles: Iterable[common_pb2.PageHandle]) -> list[Page]:
    return [Page(h.page, h.generation) for h in handles]


def _blocks(blocks: Iterable[tuple[int, Page]]) -> list[pages_pb2.CommittedBlock]:
    return [
        pages_pb2.CommittedBlock(index=i, handle=common_pb2.PageHandle(page=p.index, generation=p.generation))
        for i, p in blocks
    ]
