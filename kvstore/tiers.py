"""When blocks go from memory to disk and come back. Without a disk it does nothing.

Memory that is asked for is made free here, before the pool is asked: what eviction
would take next is kept first. A reservation's blocks that are on disk are brought into
memory before it is made, so a lease is always on memory. Whatever the disk cannot do
in time happens without it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from itertools import chain as chained
from pathlib import Path

from kvstore.arena import Arena
from kvstore.disk import DiskTier
from kvstore.disk_files import DiskFiles
from kvstore.guests import guest
from kvstore.options import StoreOptions
from kvstore.owners import Sealed

log = logging.getLogger(__name__)

# Blocks that are written between two looks at what is needed.
BATCH = 16
# Computing a block again takes about as long as this per prompt; a disk that hangs is not waited for.
LOAD_S = 2.0
LEASE = "from disk"


class Tiers:
    """`settle(arena)` makes changes known; `dropped(arena, block_ids)`: blocks that are off the disk."""

    def __init__(
        self,
        root: Path,
        options: StoreOptions,
        settle: Callable[[Arena], None],
        dropped: Callable[[str, list[bytes]], None],
    ) -> None:
        self._root = root
        self._settle = settle
        self._loads: set[asyncio.Task[None]] = set()
        self.disk: DiskTier | None = None
        if options.disk_bytes:
            self.disk = DiskTier(root, options.disk_bytes, org_share=options.org_share, dropped=dropped)

    async def start(self) -> None:
        """Takes up what an earlier store kept, or removes it where nothing is to be kept any more."""
        if self.disk is not None:
            await self.disk.start()
        else:
            await asyncio.to_thread(DiskFiles(self._root).remove_all)

    async def close(self) -> None:
        """Waits for what still writes to memory or disk."""
        if self._loads:
            await asyncio.wait(self._loads)
        if self.disk is not None:
            await asyncio.to_thread(self.disk.close)

    # -- questions ------------------------------------------------------------

    def lookup(self, arena: Arena, chain: Sequence[bytes]) -> int:
        """How many leading blocks are in memory or on disk."""
        n = arena.pool.lookup(chain)
        kept = self.on_disk(arena)
        if kept:
            index = arena.pool.table.index
            while n < len(chain) and (chain[n] in kept or chain[n] in index):
                n += 1
        return n

    def on_disk(self, arena: Arena) -> Collection[bytes]:
        """Blocks on disk."""
        return () if self.disk is None else self.disk.books.of(arena.name).keys()

    def blocks(self, arena: Arena) -> list[bytes]:
        """Every block, wherever it is."""
        return list(dict.fromkeys(chained(arena.pool.table.index, self.on_disk(arena))))

    # -- memory → disk --------------------------------------------------------

    async def make_room(self, arena: Arena, pages: int, org: str = "") -> None:
        """Keeps what has to go for `pages` more (of an organisation, within its share), and lets it go."""
        if self.disk is None or pages > arena.pool.table.room():
            return
        table = arena.pool.table
        while True:
            over = arena.pool.over_share(org, pages) if org else 0
            short = over if over > 0 else pages - table.free_count
            if short <= 0:
                return
            going = table.next_to_go(min(short, BATCH), org if over > 0 else "")
            marks = [(record, record.last_use, record.generation) for record in going]
            await self.disk.keep(arena, going)
            gone = [table.evict(*mark) for mark in marks]
            if not any(gone):
                return
            self._settle(arena)

    def lost(self, arena: Arena, block_ids: Sequence[bytes]) -> list[bytes]:
        """Those of the blocks that memory lost that are not on disk either; what continues them goes too."""
        if self.disk is None or not block_ids:
            return list(block_ids)
        kept = self.disk.books.of(arena.name)
        gone = [block_id for block_id in block_ids if block_id not in kept]
        self.disk.lose(arena.name, gone)
        return gone

    async def forget(self, org: str) -> None:
        """Nothing of an organisation is on disk when this returns."""
        if self.disk is not None:
            await self.disk.forget(org)

    # -- disk → memory --------------------------------------------------------

    @asynccontextmanager
    async def in_memory(self, arena: Arena, org: str, block_ids: Sequence[bytes]) -> AsyncIterator[None]:
        """Within the block, the leading blocks that are here are leased in memory, as far as they fit."""
        if self.disk is None or self.lookup(arena, block_ids) == arena.pool.lookup(block_ids):
            yield
            return
        there, done = asyncio.Event(), asyncio.Event()
        # A task of its own: a caller that gives up must not free pages that are being written.
        load = asyncio.create_task(self._load(arena, org, block_ids, there, done))
        self._loads.add(load)
        load.add_done_callback(self._ended)
        waiting = asyncio.create_task(there.wait())
        try:
            await asyncio.wait({waiting, load}, timeout=LOAD_S, return_when=asyncio.FIRST_COMPLETED)
            if load.done():
                load.result()
            yield
        finally:
            waiting.cancel()
            done.set()

    def _ended(self, load: asyncio.Task[None]) -> None:
        self._loads.discard(load)
        if not load.cancelled() and (error := load.exception()) is not None:
            log.info("blocks did not come from disk: %s", error)

    async def _load(
        self,
        arena: Arena,
        org: str,
        block_ids: Sequence[bytes],
        there: asyncio.Event,
        done: asyncio.Event,
    ) -> None:
        assert self.disk is not None
        pool = arena.pool
        with guest(arena, LEASE, self._settle) as epoch:
            leading = block_ids[: self.lookup(arena, block_ids)]
            here = [record for b in leading if (record := pool.table.find(b)) is not None]
            pool.lease(pool.owner(epoch), LEASE, here)
            self._settle(arena)
            wanted = [b for b in leading if b not in pool.table.index]
            kept = self.disk.books.of(arena.name)
            parents = {block_id: kept[block_id].place.parent_id for block_id in wanted}
            await self.make_room(arena, min(len(wanted), pool.table.room()), org)
            pages = pool.admit(epoch, org, len(wanted))
            self._settle(arena)
            checksums = await self.disk.load(arena, wanted[: len(pages)], pages)
            sealed = [
                Sealed(page, block_id, parents[block_id], checksum)
                for page, block_id, checksum in zip(pages, wanted, checksums, strict=False)
            ]
            pool.commit(epoch, LEASE, sealed, org=org)
            pool.release(epoch, (), pages[len(sealed) :])
            self._settle(arena)
            there.set()
            await done.wait()
