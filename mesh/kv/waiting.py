"""What the holder of a reservation waits for: its blocks, as they become committed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence

from mesh.errors import MeshError
from mesh.kv.page import Page

Blocks = list[tuple[int, Page]]


class Waiting:
    """One reservation's missing blocks. News may come before anybody asks, and before
    the answer that says how many there are."""

    def __init__(self, block_ids: Sequence[bytes]) -> None:
        self.block_ids = block_ids
        self._have: set[int] = set()
        self._known = False
        self._ended = False
        self._news: asyncio.Queue[Blocks | MeshError | None] = asyncio.Queue()

    @property
    def complete(self) -> bool:
        """Every block is leased."""
        return self._known and len(self._have) == len(self.block_ids)

    def reserved(self, have: int) -> None:
        """The reservation was made: the first `have` blocks are leased."""
        self._known = True
        self.got(range(have))

    def got(self, indices: Iterable[int]) -> None:
        """Blocks that are leased by other ways than news."""
        self._have.update(indices)
        if self.complete:
            self._news.put_nowait(None)

    def push(self, blocks: Blocks) -> None:
        """Blocks that somebody committed."""
        self._news.put_nowait(blocks)
        self.got(i for i, _ in blocks)

    def end(self, error: MeshError | None = None) -> None:
        """Nothing more will come."""
        self._ended = True
        self._news.put_nowait(error)

    async def __aiter__(self) -> AsyncIterator[Blocks]:
        while not ((self.complete or self._ended) and self._news.empty()):
            news = await self._news.get()
            if news is None:
                return
            if isinstance(news, MeshError):
                raise news
            yield news
