"""The session of a worker with the store: attach, listen, and attach again.

It keeps the epoch and its lock for the life of the process. `number` names the
present session in every rpc and is 0 while there is none; the store refuses an
rpc of an earlier session, so what a re-attach settles stays settled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from kvmesh.v1 import common_pb2, pages_pb2, pages_pb2_grpc

from mesh.errors import (
    Conflict,
    InvalidRequest,
    MeshError,
    PermissionDenied,
    StaleHandle,
    Unavailable,
    from_rpc_error,
)
from mesh.kv.books import Books
from mesh.kv.layout import Layout, layout_to_proto
from mesh.kv.mapping import ArenaMapping, OwnerLock
from mesh.kv.page import Page

log = logging.getLogger(__name__)

# An arena that is made for a first worker takes about a second per 4 GiB.
ATTACH_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 2.0
# What a read gives at the end of a stream.
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]

FIRST_RETRY_S = 0.02
LAST_RETRY_S = 0.3

# Coming again does not help against these.
_FINAL = (Conflict, InvalidRequest, PermissionDenied, StaleHandle)


@dataclass(frozen=True, slots=True)
class Attached:
    """What the store answered to a re-attach."""

    rejected_leases: list[str]


class StoreSession:
    """Set the `on_` hooks before `start`; they run on the event loop and must not raise."""

    def __init__(
        self, channel: grpc.aio.Channel, *, worker: str, model: str, fingerprint: bytes, layout: Layout
    ) -> None:
        self._channel = channel
        self.books = Books()
        # The generated stub is typed for callers that pass iterators; this one writes and reads.
        self.stub: Any = pages_pb2_grpc.PagesStub(channel)
        self.epoch = 0
        self.number = 0
        self.failed: asyncio.Future[MeshError] = asyncio.get_running_loop().create_future()
        self.on_committed: Callable[[str, list[tuple[int, Page]]], None] = lambda _, __: None
        self.on_lost: Callable[[str, str], None] = lambda _, __: None
        # Called when the list of what is held is made; names further leases to list.
        self.on_listing: Callable[[], list[str]] = list
        self.on_attached: Callable[[Attached], None] = lambda _: None
        self.on_away: Callable[[], None] = lambda: None
        self.on_failed: Callable[[MeshError], None] = lambda _: None
        # Rpcs in flight: they end with the session that they belong to.
        self.flying: set[Any] = set()
        self._who = pages_pb2.Attach(
            worker=worker, model=model, content_fingerprint=fingerprint, layout=layout_to_proto(layout)
        )
        self._mapping: ArenaMapping | None = None
        self._lock: OwnerLock | None = None
        self._call: Any = None
        self._task: asyncio.Task[None] | None = None
        self._connected = asyncio.Event()
        self._closing = False

    @property
    def mapping(self) -> ArenaMapping:
        """Valid after `start`."""
        assert self._mapping is not None
        return self._mapping

    async def start(self) -> None:
        """The first attach. Waits for the store; raises what it refuses."""
        await self._open_patiently(Unavailable)
        self._task = asyncio.get_running_loop().create_task(self._run(), name="kv-session")

    async def wait_connected(self) -> None:
        """Returns as soon as there is a session."""
        await self._connected.wait()

    def renew(self, number: int) -> None:
        """The outcome of an rpc of this session is not known: attach again and settle it."""
        if self.number == number and number:
            self._over()
            self._call.cancel()

    async def close(self) -> None:
        """A clean goodbye if there is a session; the lock goes in any case."""
        self._closing = True
        if self.number:
            with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError, asyncio.InvalidStateError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._call.write(pages_pb2.AttachRequest(detach=pages_pb2.Detach()))
                    if self._task is not None:
                        await asyncio.wait({self._task})
        self._over()
        if self._call is not None:
            self._call.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._lock is not None:
            self._lock.release()

    # -- inside ---------------------------------------------------------------

    def _over(self) -> None:
        self.number = 0
        self._connected.clear()
        for call in list(self.flying):
            call.cancel()

    async def _run(self) -> None:
        while True:
            await self._listen()
            self._over()
            if self._closing:
                return
            log.info("the session with the KV store broke; attaching again")
            self.on_away()
            try:
                await self._open_patiently(MeshError)
            except MeshError as error:
                log.error("no way back to the KV store: %s", error)
                if not self.failed.done():
                    self.failed.set_result(error)
                self.on_failed(error)
                return

    async def _listen(self) -> None:
        """Until the stream ends."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            while (response := await self._call.read()) is not EOF:
                match response.WhichOneof("frame"):
                    case "committed":
                        frame = response.committed
                        blocks = [(b.index, Page(b.handle.page, b.handle.generation)) for b in frame.blocks]
                        self.on_committed(frame.handoff_id, blocks)
                    case "lost":
                        self.on_lost(response.lost.handoff_id, response.lost.message)
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            raise asyncio.CancelledError

    async def _open_patiently(self, passing: type[MeshError]) -> None:
        """Attaches. Errors of kind `passing` are waited out unless they are final in nature."""
        retry_s = FIRST_RETRY_S
        while True:
            try:
                await self._open()
                return
            except MeshError as error:
                if isinstance(error, _FINAL) or not isinstance(error, passing):
                    raise
                log.debug("not attached: %s", error)
            await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))  # noqa: S311
            retry_s = min(retry_s * 2, LAST_RETRY_S)

    async def _open(self) -> None:
        try:
            # Until there is a connection; nothing is polled. What is held is listed
            # afterwards, so that the list is not older than the wait.
            await self._channel.channel_ready()
        except grpc.aio.UsageError as error:
            raise StaleHandle(f"the channel to the KV store is gone: {error}", code="no_channel") from error
        names = self.on_listing()
        held, granted = self.books.listing(names)
        request = pages_pb2.Attach()
        request.CopyFrom(self._who)
        request.epoch = self.epoch
        for lease in held:
            request.leases.add(
                lease_id=lease.lease_id, pages=_handles(lease.pages), block_ids=lease.block_ids
            )
        request.granted.extend(_handles(granted))
        call = self.stub.Attach()
        try:
            async with asyncio.timeout(ATTACH_TIMEOUT_S):
                await call.write(pages_pb2.AttachRequest(attach=request))
                response = await call.read()
            if response is EOF or response.WhichOneof("frame") != "attached":
                raise Unavailable("the KV store ended the session")
            self._enter(response.attached)
        except TimeoutError:
            call.cancel()
            raise Unavailable("the KV store did not answer") from None
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.InvalidStateError as error:
            # Writing to a call that ended already; its status says why.
            raise Unavailable(f"the KV store ended the session: {await call.details()}") from error
        except BaseException:
            call.cancel()
            raise
        self._call = call
        self.number = response.attached.session
        self._connected.set()
        self.on_attached(Attached(list(response.attached.rejected_leases)))

    def _enter(self, attached: pages_pb2.Attached) -> None:
        """Maps and locks on the first attach; makes sure of the same arena on later ones."""
        if self._mapping is None:
            lock = OwnerLock(attached.owner_lock_path)
            try:
                self._mapping = ArenaMapping(
                    attached.arena_path, attached.headers_path, attached.pages, attached.page_bytes
                )
            except OSError as error:
                lock.release()
                raise StaleHandle(f"the arena cannot be mapped: {error}", code="no_arena") from error
            self._lock, self.epoch = lock, attached.epoch
        elif not self._mapping.is_at(attached.arena_path):
            raise StaleHandle("the arena was replaced by another", code="no_arena")
        self.books.reattached(Page(h.page, h.generation) for h in attached.rejected_granted)


def _handles(pages: list[Page] | tuple[Page, ...]) -> list[common_pb2.PageHandle]:
    return [common_pb2.PageHandle(page=p.index, generation=p.generation) for p in pages]
