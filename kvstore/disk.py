"""The disk tier of a store: keeps blocks that memory has no room for, gives them back.

Reads and writes run in two threads of their own. A disk that is full or fails is left
alone for a while: then blocks are simply lost, as without a disk, and `trouble` says
why. It does not know when a block should go or come.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from kvstore.arena import Arena
from kvstore.disk_books import DiskBooks, Kept
from kvstore.disk_files import DiskFiles, Found, Place, organisation_digest
from kvstore.table import COMMITTED, PageRecord
from mesh.errors import Unavailable
from mesh.kv.page import Page

log = logging.getLogger(__name__)

# Memory that somebody waits for is not held back longer for the sake of the disk.
PATIENCE_S = 0.5
# A disk that refused is asked again after so long.
REST_S = 10.0

T = TypeVar("T")

_digest = lru_cache(1024)(organisation_digest)


class DiskTier:
    """At most `limit_bytes` under `root`. `dropped(arena, block_ids)`: blocks that are no longer on disk."""

    def __init__(
        self,
        root: Path,
        limit_bytes: int,
        *,
        org_share: float = 1.0,
        dropped: Callable[[str, list[bytes]], None] = lambda _arena, _ids: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.books = DiskBooks(limit_bytes, org_share)
        self.trouble = ""
        # Blocks since the start: written, given back, found damaged, refused by the disk.
        self.written = self.loaded = self.damaged = self.refused = 0
        self._files = DiskFiles(root)
        self._dropped = dropped
        self._clock = clock
        self._rest_until = 0.0
        self._writer = ThreadPoolExecutor(1, "disk out")
        self._reader = ThreadPoolExecutor(1, "disk in")
        self._writing = asyncio.Lock()
        self._late: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Takes up what an earlier store left, the oldest first, as far as it may stay."""
        for found in await self._in(self._writer, self._find):
            place = found.place
            gone = self.books.make_room(place.org, found.file_bytes)
            if gone is None or place.block_id in self.books.of(place.arena):
                self._writer.submit(self._files.remove, place)
                continue
            self._remove(gone)
            self.books.add(place, found.file_bytes)

    def close(self) -> None:
        """Finishes what runs; what was kept stays."""
        self._writer.shutdown()
        self._reader.shutdown()

    async def keep(self, arena: Arena, records: Sequence[PageRecord]) -> None:
        """Writes pages whose organisation is known, one after another, as long as the disk takes them.

        A page that is given to somebody else meanwhile is not kept.
        """
        if self._late is not None and not self._late.done():
            return
        # What has begun is finished whether anybody waits or not: its file has to be in the books.
        work = asyncio.get_running_loop().create_task(self._keep(arena, records))
        await asyncio.wait({work}, timeout=PATIENCE_S)
        if not work.done():
            self._late = work
            self.trouble = f"a write takes longer than {PATIENCE_S} s"

    async def load(self, arena: Arena, block_ids: Sequence[bytes], pages: Sequence[Page]) -> list[int]:
        """Fills pages with blocks until one cannot be had; the checksums of those that were.

        Must run to its end: until then the pages are written to.
        """
        kept = [self.books.of(arena.name).get(block_id) for block_id in block_ids]
        wanted: list[tuple[Kept, memoryview]] = []
        for block, page in zip(kept, pages, strict=True):
            if block is None:
                break
            wanted.append((block, arena.files.page(page.index)))
        checksums = await self._in(self._reader, lambda: self._read(wanted))
        for block, _ in wanted[: len(checksums)]:
            if self._is_kept(block):
                self.books.used(block)
        self.loaded += len(checksums)
        if len(checksums) < len(wanted):
            bad = wanted[len(checksums)][0]
            if self._is_kept(bad):
                self.damaged += 1
                log.warning("a block on disk is damaged or gone")
                self.lose(arena.name, [bad.place.block_id])
        return checksums

    def lose(self, arena: str, block_ids: Iterable[bytes]) -> None:
        """Blocks that are nowhere else: with them go those that continue them."""
        self._remove([kept for block_id in block_ids for kept in self.books.lose(arena, block_id)])

    async def forget(self, org: str) -> None:
        """Nothing of an organisation is on disk when this returns. Raises Unavailable if that failed."""
        digest = _digest(org)
        async with self._writing:
            self._remove(self.books.of_organisation(digest), lose=True)
            try:
                await self._in(self._writer, lambda: self._files.remove_organisation(digest))
            except OSError as error:
                raise Unavailable(f"not everything could be removed: {error}") from error

    # -- inside -------------------------------------------------------------

    async def _keep(self, arena: Arena, records: Sequence[PageRecord]) -> None:
        async with self._writing:
            for record in records:
                if self._clock() < self._rest_until:
                    return
                place = Place(arena.name, _digest(record.org), record.block_id, record.parent_id)
                if not record.org or record.state not in COMMITTED or self._has(place):
                    continue
                await self._write(arena, record, place)

    async def _write(self, arena: Arena, record: PageRecord, place: Place) -> None:
        size = self._files.file_bytes(arena.files.page_bytes)
        gone = self.books.make_room(place.org, size)
        if gone is None:
            return
        self._remove(gone)
        generation, checksum, page = record.generation, record.checksum, arena.files.page(record.index)

        def write() -> bool:
            return self._files.write(place, page, checksum, lambda: record.generation == generation)

        try:
            whole = await self._in(self._writer, write)
        except OSError as error:
            self.refused += 1
            self._rest_until = self._clock() + REST_S
            if not self.trouble:
                log.warning("blocks cannot be kept on disk: %s", error)
            self.trouble = error.strerror or str(error)
            return
        self.trouble = ""
        if whole:
            self.written += 1
            self.books.add(place, size)

    def _has(self, place: Place) -> bool:
        return place.block_id in self.books.of(place.arena)

    def _is_kept(self, kept: Kept) -> bool:
        return self.books.of(kept.place.arena).get(kept.place.block_id) is kept

    def _remove(self, gone: Iterable[Kept], *, lose: bool = False) -> None:
        by_arena: dict[str, list[bytes]] = {}
        for kept in gone:
            if lose:
                self.books.lose(kept.place.arena, kept.place.block_id)
            self._writer.submit(self._files.remove, kept.place)
            by_arena.setdefault(kept.place.arena, []).append(kept.place.block_id)
        for arena, block_ids in by_arena.items():
            self._dropped(arena, block_ids)

    def _find(self) -> list[Found]:
        return sorted(self._files.find(), key=lambda found: found.modified_at)

    def _read(self, wanted: Iterable[tuple[Kept, memoryview]]) -> list[int]:
        checksums: list[int] = []
        for kept, page in wanted:
            checksum = self._files.read(kept.place, page)
            if checksum is None:
                break
            checksums.append(checksum)
        return checksums

    async def _in(self, executor: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(executor, work)
