"""What names a page and what asks for it: plain data, shared by the store and its clients."""

from __future__ import annotations

from dataclasses import dataclass, field

BLOCK_ID_BYTES = 16


@dataclass(frozen=True, slots=True, order=True)
class Page:
    """A page of the arena in one generation of its life.

    `index` counts pages from the start of the arena. A handle whose generation
    has passed is an error, never data.
    """

    index: int
    generation: int


@dataclass(frozen=True, slots=True)
class CommitItem:
    """One full block that a worker gives its id, for ever. Ids have 16 bytes."""

    page: Page
    block_id: bytes
    parent_id: bytes


@dataclass(frozen=True, slots=True)
class Held:
    """A lease as its holder knows it, told to the store on a re-attach."""

    lease_id: str
    pages: tuple[Page, ...]
    block_ids: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Reservation:
    """The answer to a reserve: blocks 0 .. len(have) are leased, `missing` are not."""

    have: list[Page]
    missing: int
    extra: list[Page] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Drawn:
    """The blocks of a reservation as (index, page): readable ones and ones to write."""

    committed: list[tuple[int, Page]]
    writable: list[tuple[int, Page]]
