"""The store of a node: its arenas, its sessions, and the deaths of workers.

Everything here is plain data and runs on one event loop; operations on a pool
happen between two awaits, so they are atomic. It does not know protobuf, tokens
or who may call.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from kvstore import recovery
from kvstore.arena import Arena
from kvstore.events import BlockEvents
from kvstore.files import ArenaFiles, ArenaKey, create_files, find_files
from kvstore.options import StoreOptions
from kvstore.owner_locks import OwnerLocks, OwnerNote
from kvstore.owners import CommittedFrame, Sealed
from kvstore.tiers import Tiers
from mesh.errors import Conflict, NotFound, OutOfPages, PermissionDenied, StaleHandle, Unavailable
from mesh.kv.layout import Layout
from mesh.kv.page import CommitItem, Drawn, Held, Page, Reservation

log = logging.getLogger(__name__)

# A million tokens. Toy models have pages of some hundred bytes: without a limit
# the books of their pages would be larger than the pages.
PAGES_LIMIT = 65536


@dataclass(frozen=True, slots=True)
class LostFrame:
    """News for a worker: no reservation stands behind this lease of its re-attach."""

    handoff_id: str


Frame = CommittedFrame | LostFrame


@dataclass(slots=True)
class Session:
    """One attachment of one worker. `frames` ends with None when the session is over."""

    epoch: int
    number: int
    worker: str
    arena: Arena
    layout: Layout
    rejected_leases: list[str] = field(default_factory=list)
    rejected_granted: list[Page] = field(default_factory=list)
    frames: asyncio.Queue[Frame | None] = field(default_factory=asyncio.Queue)


class Store:
    """`publish` sends one event message; None where there is no NATS."""

    def __init__(
        self,
        state_dir: Path,
        options: StoreOptions,
        *,
        publish: Callable[[bytes], object] | None = None,
    ) -> None:
        self.arenas: dict[ArenaKey, Arena] = {}
        self.events = BlockEvents(publish)  # type: ignore[arg-type]
        self._state_dir = state_dir
        self._options = options
        self._sessions: dict[int, Session] = {}
        self._epochs: dict[int, Arena] = {}
        self._creating = asyncio.Lock()
        self._stopping = False
        self.locks = OwnerLocks(state_dir / "owners", self._died)
        self.tiers = Tiers(state_dir / "kv-disk", options, self.settle, self._off_disk)

    # -- life ---------------------------------------------------------------

    async def start(self) -> None:
        """Takes up what an earlier store left."""
        await self.tiers.start()
        living = dict(self.locks.living())
        for files in find_files(self._state_dir):
            arena = self._map(files)
            mine = {e: note.worker for e, note in living.items() if note.arena == files.key.name()}
            arena.adopt(mine)
            self.arenas[files.key] = arena
            self._epochs.update(dict.fromkeys(mine, arena))
            self.settle(arena)
            log.info(
                "arena of %s taken up: %d blocks, %d workers may still live",
                files.key.model,
                len(arena.pool.table.index),
                len(mine),
            )
        for epoch in living:
            self.locks.watch(epoch)

    def end_sessions(self) -> None:
        """No session goes on and none begins; workers keep what they hold."""
        self._stopping = True
        for session in self._sessions.values():
            session.frames.put_nowait(None)

    async def close(self) -> None:
        """Unmaps everything. Pages stay for a next store while a worker may use them, else they go."""
        await self.events.close()
        await self.tiers.close()
        for arena in self.arenas.values():
            if not arena.pool.owners:
                arena.files.remove()
            arena.files.close()

    # -- sessions -----------------------------------------------------------

    async def attach(self, worker: str, model: str, fingerprint: bytes, layout: Layout) -> Session:
        """A worker process that holds nothing yet."""
        self._check_serving()
        key = ArenaKey(model, fingerprint, layout.digest())
        # A worker that gives up waiting does not undo what others wait for too.
        making = asyncio.get_running_loop().create_task(self._arena(key, layout))
        arena = await asyncio.shield(making)
        epoch = self.locks.create(OwnerNote(worker, key.name()))
        recovery.open_owner(arena.pool, epoch, worker)
        self._epochs[epoch] = arena
        return self._open(epoch, worker, arena, layout)

    async def reattach(
        self,
        worker: str,
        epoch: int,
        key: ArenaKey,
        layout: Layout,
        leases: Sequence[Held],
        granted: Sequence[Page],
    ) -> Session:
        """The same process again, after its session broke or the store was started anew."""
        self._check_serving()
        arena = self._epochs.get(epoch)
        if arena is None:
            raise StaleHandle(f"epoch {epoch} is over: the worker has to start anew", code="stale_epoch")
        owner = arena.pool.owner(epoch)
        if owner.worker != worker:
            raise PermissionDenied(f"epoch {epoch} is of {owner.worker}, not of {worker}")
        if arena.key != key:
            raise Conflict(f"epoch {epoch} uses the arena of {arena.key}, not of {key}")
        await arena.verify([block_id for held in leases for block_id in held.block_ids])
        arena.pool.owner(epoch)
        earlier = self._sessions.pop(epoch, None)
        if earlier is not None:
            earlier.frames.put_nowait(None)
        self.settle(arena)
        answer = recovery.reattach(arena.pool, epoch, leases, granted)
        session = self._open(epoch, worker, arena, layout)
        session.rejected_leases = answer.rejected_leases
        session.rejected_granted = answer.rejected_granted
        for lease_id in answer.unreserved:
            session.frames.put_nowait(LostFrame(lease_id))
        self.settle(arena)
        return session

    def leave(self, session: Session, *, clean: bool) -> None:
        """The session is over. `clean`: the worker said goodbye; else it may still live."""
        if self._sessions.get(session.epoch) is not session:
            return
        del self._sessions[session.epoch]
        if clean:
            self._bury(session.epoch)
        else:
            recovery.orphan(session.arena.pool, session.epoch)
            self.settle(session.arena)
            self.locks.watch(session.epoch)

    def session(self, epoch: int, number: int, worker: str) -> Session:
        """The session that an rpc belongs to; Unavailable if it is over."""
        session = self._sessions.get(epoch)
        if session is None or session.number != number:
            raise Unavailable("this session is over: attach again", code="session_over")
        if session.worker != worker:
            raise PermissionDenied(f"epoch {epoch} is of {session.worker}, not of {worker}")
        return session

    # -- operations ---------------------------------------------------------

    async def reserve(
        self,
        session: Session,
        handoff_id: str,
        org: str,
        block_ids: Sequence[bytes],
        extra_pages: int,
        attempt: int = 0,
    ) -> Reservation:
        """See `PagePool.reserve`."""
        arena = session.arena
        if arena.pool.unverified(block_ids):
            await arena.verify(block_ids)
            self.session(session.epoch, session.number, session.worker)
        async with self.tiers.in_memory(arena, org, block_ids):
            missing = sum(block_id not in arena.pool.table.index for block_id in block_ids)
            await self.tiers.make_room(arena, missing + extra_pages, org)
            self.session(session.epoch, session.number, session.worker)
            try:
                return arena.pool.reserve(session.epoch, handoff_id, org, block_ids, extra_pages, attempt)
            finally:
                self.settle(arena)

    def draw(self, session: Session, handoff_id: str, org: str, attempt: int) -> Drawn:
        """See `PagePool.draw`."""
        try:
            return session.arena.pool.draw(session.epoch, handoff_id, org, attempt)
        finally:
            self.settle(session.arena)

    async def commit(
        self, session: Session, lease_id: str, items: Sequence[CommitItem], attempt: int
    ) -> list[Page]:
        """See `PagePool.commit`; the checksums are taken here, before anybody may read the pages."""
        arena, pool = session.arena, session.arena.pool
        known: dict[Page, int] = {}
        while True:
            index = pool.table.index
            unsealed = [i.page for i in items if i.block_id not in index and i.page not in known]
            if unsealed:
                known |= await arena.checksums(unsealed)
            elif pool.unverified(i.block_id for i in items):
                await arena.verify([i.block_id for i in items])
            else:
                break
            self.session(session.epoch, session.number, session.worker)
        blocks = [Sealed(i.page, i.block_id, i.parent_id, known.get(i.page, 0)) for i in items]
        winners = pool.commit(session.epoch, lease_id, blocks, attempt)
        self.settle(arena)
        return winners

    def release(self, session: Session, lease_ids: Sequence[str], granted: Sequence[Page]) -> None:
        """See `PagePool.release`."""
        session.arena.pool.release(session.epoch, lease_ids, granted)
        self.settle(session.arena)

    async def grant(self, session: Session, pages: int, *, partial: bool) -> list[Page]:
        """See `PagePool.grant`."""
        await self.tiers.make_room(session.arena, pages)
        self.session(session.epoch, session.number, session.worker)
        try:
            return session.arena.pool.grant(session.epoch, pages, partial=partial)
        finally:
            self.settle(session.arena)

    def arenas_of(self, model: str, fingerprint: bytes) -> list[Arena]:
        """Every arena with pages of that content; an empty fingerprint matches all of the model."""
        return [
            a
            for key, a in self.arenas.items()
            if key.model == model and fingerprint in (b"", key.fingerprint)
        ]

    def lookup(self, model: str, fingerprint: bytes, chains: Sequence[Sequence[bytes]]) -> list[int]:
        """How many leading blocks of each chain are here, in memory or on disk."""
        arenas = self.arenas_of(model, fingerprint)
        return [max((self.tiers.lookup(a, chain) for a in arenas), default=0) for chain in chains]

    def blocks(self, model: str, fingerprint: bytes) -> tuple[int, list[bytes]]:
        """Every committed block, and the event number that this is true at."""
        arenas = self.arenas_of(model, fingerprint)
        if not arenas:
            raise NotFound(f"this store has no pages of {model}")
        return self.events.sequence, [b for a in arenas for b in self.tiers.blocks(a)]

    async def forget(self, org: str) -> None:
        """Nobody finds a block of an organisation any more, and nothing of it is on disk."""
        for arena in self.arenas.values():
            arena.pool.forget(org)
            self.settle(arena)
        await self.tiers.forget(org)

    # -- inside -------------------------------------------------------------

    def _check_serving(self) -> None:
        if self._stopping:
            raise Unavailable("the KV store is stopping")

    def _open(self, epoch: int, worker: str, arena: Arena, layout: Layout) -> Session:
        arena.layout = layout
        session = Session(epoch, secrets.randbits(62) + 1, worker, arena, layout)
        self._sessions[epoch] = session
        return session

    async def _arena(self, key: ArenaKey, layout: Layout) -> Arena:
        async with self._creating:
            arena = self.arenas.get(key)
            if arena is None:
                fitting = min(self._share() // layout.page_bytes, PAGES_LIMIT)
                pages = self._options.page_pool or fitting
                if pages < 1:
                    raise OutOfPages(
                        f"less KV memory is left for {key.model} than one page of {layout.page_bytes} bytes"
                    )
                self._retire(pages * layout.page_bytes)
                try:
                    files = await asyncio.to_thread(
                        create_files, self._state_dir, key, str(layout), pages, layout.page_bytes
                    )
                except OSError as error:
                    raise OutOfPages(f"no memory for the pages of {key.model}: {error}") from error
                arena = self.arenas[key] = self._map(files)
                self._changed(arena, list(self.tiers.on_disk(arena)), ())
                log.info("arena of %s: %d pages of %d bytes", key.model, pages, layout.page_bytes)
            return arena

    def _map(self, files: ArenaFiles) -> Arena:
        return Arena(files, debug_fill=self._options.debug_fill, org_share=self._options.org_share)

    def _share(self) -> int:
        """Bytes for one more arena: an equal part, and of what is free once all parts are taken."""
        share = self._options.kv_bytes // self._options.models
        if len(self.arenas) >= self._options.models:
            share = min(share, psutil.virtual_memory().available // 4)
        return share

    def _retire(self, size_bytes: int) -> None:
        """Makes room in the budget: arenas that no worker uses go, the oldest first."""
        for key, arena in list(self.arenas.items()):
            if sum(a.size_bytes for a in self.arenas.values()) + size_bytes <= self._options.kv_bytes:
                return
            if not arena.pool.owners:
                log.info("arena of %s is not used and makes room", key.model)
                self._changed(arena, (), self.tiers.blocks(arena))
                del self.arenas[key]
                arena.files.remove()
                arena.files.close()

    def settle(self, arena: Arena) -> None:
        """Makes what an operation changed known: headers, news, frames."""
        changes, frames = arena.settle()
        self._changed(arena, changes.stored, self.tiers.lost(arena, changes.removed))
        for frame in frames:
            session = self._sessions.get(frame.epoch)
            if session is not None:
                session.frames.put_nowait(frame)

    def _off_disk(self, arena_name: str, block_ids: Sequence[bytes]) -> None:
        """Blocks that are on disk no longer."""
        for arena in self.arenas.values():
            if arena.name == arena_name:
                index = arena.pool.table.index
                self._changed(arena, (), [b for b in block_ids if b not in index])

    def _changed(self, arena: Arena, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        self.events.record(arena.key.model, arena.key.fingerprint, stored, removed)

    def _died(self, epoch: int) -> None:
        session = self._sessions.pop(epoch, None)
        if session is not None:
            session.frames.put_nowait(None)
        self._bury(epoch)

    def _bury(self, epoch: int) -> None:
        arena = self._epochs.pop(epoch, None)
        if arena is not None:
            recovery.bury(arena.pool, epoch)
            self.settle(arena)
        self.locks.forget(epoch)
