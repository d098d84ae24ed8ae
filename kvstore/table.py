"""The page table: the state of every page, the block index, and eviction.

Pages are `free`, `granted` (somebody may write), `cached` (committed, unleased),
`leased` (committed, in use) or `quarantined` (somebody who may not write any more
still could). Every operation costs time in the blocks it touches, never in the
pages there are. The table does not know who holds a page or why: that is
`pool.py`; it does no input or output: what changed is collected in `changes`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from mesh.errors import OutOfPages
from mesh.kv.page import Page


class PageState(IntEnum):
    """The five states; their counts always add up to the number of pages."""

    FREE = 0
    GRANTED = 1
    CACHED = 2
    LEASED = 3
    QUARANTINED = 4


COMMITTED = frozenset({PageState.CACHED, PageState.LEASED})


@dataclass(slots=True)
class PageRecord:
    """What is known of one page. `owner` is the epoch that may write to it, 0 if none."""

    index: int
    state: PageState = PageState.FREE
    generation: int = 1
    owner: int = 0
    block_id: bytes = b""
    parent_id: bytes = b""
    checksum: int = 0
    # False: adopted from an earlier store and not yet compared with its checksum.
    verified: bool = True
    # True: found corrupt while leased. Not in the index; freed with its last lease.
    condemned: bool = False
    refs: int = 0
    last_use: int = 0
    # Whose prompt it was, as far as this store has seen; decides nothing but shares.
    org: str = ""

    @property
    def handle(self) -> Page:
        """The page in its present generation."""
        return Page(self.index, self.generation)


@dataclass(slots=True)
class Changes:
    """What operations did to pages, for whoever keeps headers, news and bytes.

    `touched` maps a page to whether more than its state changed; `stored` and
    `removed` are block ids in order; `freed` are pages whose bytes mean nothing now.
    """

    touched: dict[int, bool] = field(default_factory=dict)
    stored: list[bytes] = field(default_factory=list)
    removed: list[bytes] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)


_Leaf = tuple[int, int, int]


class PageTable:
    """Pages 0 .. n-1 and the index from block id to page."""

    def __init__(self, pages: int) -> None:
        self.records = [PageRecord(i) for i in range(pages)]
        self.index: dict[bytes, int] = {}
        self.counts = [pages, 0, 0, 0, 0]
        self.evicted = 0
        self.changes = Changes()
        self._free = list(range(pages - 1, -1, -1))
        # Committed pages per parent id: a block with children is not evicted.
        self._children: dict[bytes, int] = {}
        # Candidates as (last_use, page, generation). Entries go stale and are
        # skipped when popped: an exact order without a search.
        self._leaves: list[_Leaf] = []
        # The same by organisation, and its committed pages: kept for shares only.
        self._leaves_of: dict[str, list[_Leaf]] = {}
        self.committed_of: dict[str, int] = {}
        self._clock = 0

    # -- free and granted ---------------------------------------------------

    def tick(self) -> None:
        """Begins an operation: pages that it touches together age together."""
        self._clock += 1

    def room(self) -> int:
        """Pages that could be granted now, unless a leased block pins its ancestors."""
        return self.counts[PageState.FREE] + self.counts[PageState.CACHED]

    @property
    def free_count(self) -> int:
        """Pages that are free."""
        return self.counts[PageState.FREE]

    def allocate(self, n: int, owner: int, *, partial: bool = False) -> list[PageRecord]:
        """All of `n` pages granted to `owner`, evicting what must go; OutOfPages otherwise.

        With `partial` as many of them as there are.
        """
        if n > self.room() and not partial:
            raise OutOfPages(f"{n} pages are needed, {self.room()} of {len(self.records)} can be had")
        while len(self._free) < n and self._evict(self._leaves):
            pass
        if len(self._free) < n and not partial:
            raise OutOfPages(f"{n} pages are needed, {len(self._free)} of {len(self.records)} can be had")
        n = min(n, len(self._free))
        taken = [self.records[self._free.pop()] for _ in range(n)]
        for record in taken:
            record.owner = owner
            self._become(record, PageState.GRANTED, whole=True)
        return taken

    def free(self, record: PageRecord) -> None:
        """Ends the page's life; handles to it are stale from here on."""
        record.generation += 1
        record.owner = 0
        record.block_id = record.parent_id = b""
        record.checksum = record.refs = 0
        record.verified, record.condemned = True, False
        record.org = ""
        self._become(record, PageState.FREE, whole=True)
        self._free.append(record.index)
        self.changes.freed.append(record.index)

    def assign(self, record: PageRecord, owner: int, state: PageState = PageState.GRANTED) -> None:
        """Changes who may write to an uncommitted page, or whether anybody may."""
        whole = record.owner != owner
        record.owner = owner
        self._become(record, state, whole=whole)

    # -- committed ----------------------------------------------------------

    def find(self, block_id: bytes) -> PageRecord | None:
        """The committed page of a block."""
        index = self.index.get(block_id)
        return None if index is None else self.records[index]

    def commit(
        self, record: PageRecord, block_id: bytes, parent_id: bytes, checksum: int, org: str = ""
    ) -> None:
        """Gives a granted page its block id. The caller pins it: a commit is always a lease."""
        record.owner = 0
        record.org = org
        self._counted(record, 1)
        record.block_id, record.parent_id, record.checksum = block_id, parent_id, checksum
        record.last_use = self._clock
        self.index[block_id] = record.index
        self._children[parent_id] = self._children.get(parent_id, 0) + 1
        self._become(record, PageState.CACHED, whole=True)
        self.changes.stored.append(block_id)

    def pin(self, record: PageRecord) -> None:
        """One more lease on a committed page."""
        record.refs += 1
        record.last_use = self._clock
        if record.refs == 1:
            self._become(record, PageState.LEASED)

    def unpin(self, record: PageRecord) -> None:
        """One lease less; a page without leases is cached, a condemned one is freed."""
        record.refs -= 1
        if record.refs > 0:
            return
        if record.condemned:
            self.free(record)
            return
        record.last_use = self._clock
        self._become(record, PageState.CACHED)
        self._offer(record)

    def drop(self, record: PageRecord) -> None:
        """Takes a committed page out of the index: its bytes are not what they should be."""
        self._unindex(record)
        if record.refs:
            record.condemned = True
            self._become(record, record.state, whole=True)
        else:
            self.free(record)

    def attribute(self, record: PageRecord, org: str) -> None:
        """Says whose a committed block is that was adopted without a name: only its own
        organisation can ask for it, since the salt of the organisation is in its id."""
        if record.org or not org:
            return
        self._counted(record, -1)
        record.org = org
        self._counted(record, 1)

    def of_organisation(self, org: str) -> list[PageRecord]:
        """The committed blocks of an organisation, and those of nobody known."""
        return [self.records[i] for i in self.index.values() if self.records[i].org in (org, "")]

    def has_children(self, record: PageRecord) -> bool:
        """Whether a committed block continues this one."""
        return record.block_id in self._children

    def prefix(self, block_ids: Iterable[bytes]) -> list[PageRecord]:
        """The committed pages of the longest leading run of `block_ids`."""
        found: list[PageRecord] = []
        for block_id in block_ids:
            index = self.index.get(block_id)
            if index is None:
                break
            found.append(self.records[index])
        return found

    def adopt(self, records: Iterable[PageRecord]) -> None:
        """Takes up pages as an earlier store left them: free, quarantined, or cached."""
        for record in records:
            known = record.block_id in self.index
            self.records[record.index] = record
            state, record.state = record.state, PageState.FREE
            if state is PageState.FREE or (state is PageState.CACHED and known):
                record.generation += 1
                record.owner = 0
                record.block_id = record.parent_id = b""
                state = PageState.FREE
            elif state is PageState.CACHED:
                record.owner = 0
                self.index[record.block_id] = record.index
                self._children[record.parent_id] = self._children.get(record.parent_id, 0) + 1
                self._counted(record, 1)
            self._become(record, state, whole=True)
        self._free = [r.index for r in reversed(self.records) if r.state is PageState.FREE]
        for record in self.records:
            if record.state is PageState.CACHED:
                self._offer(record)

    def take_changes(self) -> Changes:
        """What happened since the last call."""
        changes, self.changes = self.changes, Changes()
        return changes

    def free_pages(self) -> list[int]:
        """The free pages."""
        return list(self._free)

    def children_of(self) -> dict[bytes, int]:
        """How many committed blocks continue each block that has any."""
        return dict(self._children)

    # -- inside -------------------------------------------------------------

    def _become(self, record: PageRecord, state: PageState, *, whole: bool = False) -> None:
        self.counts[record.state] -= 1
        self.counts[state] += 1
        record.state = state
        touched = self.changes.touched
        touched[record.index] = whole or touched.get(record.index, False)

    def _offer(self, record: PageRecord) -> None:
        """Makes a cached page without children a candidate for eviction."""
        if self.has_children(record):
            return
        leaf = (record.last_use, record.index, record.generation)
        self._leaves = self._with(self._leaves, leaf)
        if record.org:
            self._leaves_of[record.org] = self._with(self._leaves_of.get(record.org, []), leaf)

    def _with(self, leaves: list[_Leaf], leaf: _Leaf) -> list[_Leaf]:
        heapq.heappush(leaves, leaf)
        if len(leaves) > 2 * len(self.records) + 64:
            leaves = list({entry for entry in leaves if self._is_leaf(*entry)})
            heapq.heapify(leaves)
        return leaves

    def _is_leaf(self, last_use: int, index: int, generation: int) -> bool:
        record = self.records[index]
        return (
            record.generation == generation
            and record.state is PageState.CACHED
            and record.last_use == last_use
            and not self.has_children(record)
        )

    def next_to_go(self, n: int, org: str = "") -> list[PageRecord]:
        """At most `n` blocks that eviction would take next, of one organisation if one is named."""
        leaves = self._leaves_of.get(org, []) if org else self._leaves
        found: dict[_Leaf, PageRecord] = {}
        while leaves and len(found) < n:
            leaf = heapq.heappop(leaves)
            if self._is_leaf(*leaf):
                found[leaf] = self.records[leaf[1]]
        for leaf in found:
            heapq.heappush(leaves, leaf)
        return list(found.values())

    def evict(self, record: PageRecord, last_use: int, generation: int) -> bool:
        """Frees a block that could go when its last use and generation were these, if it still can."""
        if not self._is_leaf(last_use, record.index, generation):
            return False
        self._unindex(record)
        self.free(record)
        self.evicted += 1
        return True

    def evict_of(self, org: str) -> bool:
        """Frees the longest unused block of one organisation; False if all of them are in use."""
        return self._evict(self._leaves_of.get(org, []))

    def _evict(self, leaves: list[_Leaf]) -> bool:
        """Frees the longest unused block that no committed block continues."""
        while leaves:
            last_use, index, generation = heapq.heappop(leaves)
            if self.evict(self.records[index], last_use, generation):
                return True
        return False

    def _counted(self, record: PageRecord, more: int) -> None:
        left = self.committed_of[record.org] = self.committed_of.get(record.org, 0) + more
        if not left:
            del self.committed_of[record.org]
            self._leaves_of.pop(record.org, None)

    def _unindex(self, record: PageRecord) -> None:
        del self.index[record.block_id]
        self._counted(record, -1)
        self.changes.removed.append(record.block_id)
        left = self._children[record.parent_id] - 1
        if left:
            self._children[record.parent_id] = left
            return
        del self._children[record.parent_id]
        parent = self.find(record.parent_id)
        if parent is not None and parent.state is PageState.CACHED:
            self._offer(parent)
