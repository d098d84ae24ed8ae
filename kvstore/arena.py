"""One arena: the page pool of one kind of page, with its bytes and headers kept in step.

Whoever changes the pool calls `settle` before anybody hears of the change: a store
that is killed in between has promised nothing that its headers do not say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from weakref import WeakValueDictionary

import xxhash

from kvstore import recovery
from kvstore.files import ArenaFiles
from kvstore.owners import CommittedFrame
from kvstore.pool import PagePool
from kvstore.table import Changes
from mesh.kv.layout import Layout
from mesh.kv.page import Page

# Hashing more than this is left to a thread: at about 15 GB/s it takes 70 µs, and a
# thread as long to answer.
INLINE_HASH_BYTES = 1024 * 1024


class Arena:
    """A pool and the files behind it. `debug_fill`: freed pages become NaN."""

    def __init__(self, files: ArenaFiles, *, debug_fill: bool = False, org_share: float = 1.0) -> None:
        self.files = files
        self.key = files.key
        self.name = files.key.name()
        self.pool = PagePool(files.pages, org_share=org_share)
        self._debug_fill = debug_fill
        # Known once a worker has attached to this store.
        self.layout: Layout | None = None
        self.pulled_blocks = 0
        self.sent_blocks = 0
        self._watching: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()

    @property
    def size_bytes(self) -> int:
        """Memory of the pages."""
        return self.files.pages * self.files.page_bytes

    def adopt(self, living: Mapping[int, str]) -> None:
        """Takes up what an earlier store left in the files."""
        recovery.adopt(self.pool, self.files.read(), living)

    def settle(self) -> tuple[Changes, list[CommittedFrame]]:
        """Writes the headers of what changed; returns the news and the frames to send."""
        changes = self.pool.take_changes()
        records = self.pool.table.records
        for index, whole in changes.touched.items():
            if whole:
                self.files.write(records[index])
            else:
                self.files.write_state(records[index])
        if self._debug_fill:
            nan = b"\xff" * self.files.page_bytes
            for index in changes.freed:
                self.files.page(index)[:] = nan
        for handoff_id in self.pool.take_stirred():
            if (watched := self._watching.pop(handoff_id, None)) is not None:
                watched.set()
        return changes, self.pool.take_frames()

    def stirring(self, handoff_id: str) -> asyncio.Event:
        """Set with the next change of a reservation: ask first, then look, then wait."""
        event = self._watching.get(handoff_id)
        if event is None:
            event = self._watching[handoff_id] = asyncio.Event()
        return event

    async def checksums(self, pages: Collection[Page]) -> dict[Page, int]:
        """xxh3-64 of each page's bytes."""
        if len(pages) * self.files.page_bytes <= INLINE_HASH_BYTES:
            return self._hash(pages)
        return await asyncio.to_thread(self._hash, pages)

    async def verify(self, block_ids: Sequence[bytes]) -> None:
        """Compares adopted pages of these blocks with their checksums; drops those that differ."""
        while suspects := self.pool.unverified(block_ids):
            expected = {r.handle: r.checksum for r in suspects}
            found = await self.checksums(expected)
            for page, checksum in expected.items():
                self.pool.judge(page, intact=found[page] == checksum)

    def _hash(self, pages: Iterable[Page]) -> dict[Page, int]:
        return {p: xxhash.xxh3_64_intdigest(self.files.page(p.index)) for p in pages}
