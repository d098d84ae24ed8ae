"""The page pool: the rules of who may hold what. Pure and synchronous.

An operation either happens whole or raises and changes nothing that anybody can
see (pages evicted on the way excepted). The pool does no input or output and
knows neither protobuf nor files; the frames that owners must be sent and the
pages that changed are collected for the caller to take.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstore.holdings import Holdings
from kvstore.owners import Handoff, Sealed, Slot
from kvstore.table import COMMITTED, PageRecord, PageState
from mesh.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    OutOfPages,
    PermissionDenied,
    StaleAttempt,
    StaleHandle,
)
from mesh.kv.page import Drawn, Page, Reservation


class PagePool(Holdings):
    """All pages of one arena, and the operations of the store on them."""

    def __init__(self, pages: int, *, org_share: float = 1.0) -> None:
        """`org_share`: at most this part of all pages may hold one organisation's blocks."""
        super().__init__(pages)
        self._most_of_one = pages if org_share >= 1 else max(1, int(pages * org_share))
        self._unshared = self._most_of_one >= pages
        self.hit_blocks = 0
        self.missed_blocks = 0

    def reserve(
        self,
        epoch: int,
        handoff_id: str,
        org: str,
        block_ids: Sequence[bytes],
        extra_pages: int,
        attempt: int = 0,
    ) -> Reservation:
        """All or nothing: leases the cached prefix, sets the missing pages aside, grants extras.

        Blocks that are committed beyond the first gap follow in a frame. A repeated
        reserve of the same owner replaces its earlier one, and a higher attempt that
        of another owner, which may hang: what that one draws and leases stays its own.
        """
        self.table.tick()
        owner = self.owner(epoch)
        if len(set(block_ids)) != len(block_ids):
            raise InvalidRequest("a block id occurs twice in one chain", param="block_ids")
        known = self.handoffs.get(handoff_id)
        overtakes = known is not None and attempt > (known.attempt or 0)
        if known is not None and (known.org != org or (known.owner != epoch and not overtakes)):
            raise Conflict(f"handoff {handoff_id} is reserved already")
        self.end_lease(owner, handoff_id)
        have = self.table.prefix(block_ids)
        slots = [Slot(block_id) for block_id in block_ids]
        beyond = [i for i in range(len(have), len(slots)) if slots[i].block_id in self.table.index]
        missing = [i for i in range(len(have), len(slots)) if slots[i].block_id not in self.table.index]
        readable = [*have, *(self.table.records[self.table.index[slots[i].block_id]] for i in beyond)]
        for record in readable:
            self.table.attribute(record, org)
        self.lease(owner, handoff_id, readable)
        try:
            self._keep_share(org, len(missing) + extra_pages, len(slots) + extra_pages)
            fresh = self.table.allocate(len(missing) + extra_pages, epoch)
        except (OutOfPages, InvalidRequest):
            self.end_lease(owner, handoff_id)
            raise
        if known is not None and known.owner != epoch:
            self.end_handoff(known)
        for i, record in zip([*range(len(have)), *beyond], readable, strict=True):
            slots[i].committed = record.index
        for i, record in zip(missing, fresh, strict=False):
            slots[i].aside = record.index
            self.wanted.setdefault(slots[i].block_id, {})[handoff_id] = i
        extra = fresh[len(missing) :]
        owner.granted.update(r.index for r in extra)
        self.handoffs[handoff_id] = Handoff(handoff_id, epoch, org, slots, attempt or None)
        self.stirred.add(handoff_id)
        if beyond:
            self.tell(epoch, handoff_id, [(i, readable[len(have) + k].handle) for k, i in enumerate(beyond)])
        self.hit_blocks += len(readable)
        self.missed_blocks += len(missing)
        return Reservation([r.handle for r in have], len(slots) - len(have), [r.handle for r in extra])

    def _keep_share(self, org: str, more: int, whole: int) -> None:
        """Makes room for an organisation among its own blocks.

        Raises OutOfPages if all are in use, InvalidRequest for what is larger than its share.
        """
        if self._unshared:
            return
        if whole > self._most_of_one:
            raise InvalidRequest(
                f"the request needs {whole} KV pages and one organisation may have {self._most_of_one}",
                code="pool_too_small",
                param="prompt",
            )
        for _ in range(self.over_share(org, more)):
            if not self.table.evict_of(org):
                raise OutOfPages(
                    f"{more} pages are needed, and one organisation may have {self._most_of_one}"
                    f" of {len(self.table.records)}",
                    code="org_share",
                )

    def over_share(self, org: str, more: int) -> int:
        """How many of its blocks an organisation must lose to have `more` pages; below 1 for none."""
        if self._unshared:
            return 0
        aside = sum(
            slot.aside is not None for h in self.handoffs.values() if h.org == org for slot in h.slots
        )
        return self.table.committed_of.get(org, 0) + aside + more - self._most_of_one

    def admit(self, epoch: int, org: str, pages: int) -> list[Page]:
        """Pages for blocks of an organisation that come from another tier: as many as there are."""
        self.table.tick()
        self._keep_share(org, pages, pages)
        return self.grant(epoch, pages, partial=True)

    def draw(self, epoch: int, handoff_id: str, org: str, attempt: int) -> Drawn:
        """Takes the missing pages of a reservation for writing.

        Repeatable. A higher attempt takes them from an earlier drawer: its pages are
        quarantined, since it may still write, and replaced by fresh ones.
        """
        self.table.tick()
        owner = self.owner(epoch)
        handoff = self.handoffs.get(handoff_id)
        if handoff is None:
            raise NotFound(f"there is no reservation {handoff_id}", code="reservation_lost")
        if handoff.org != org:
            raise PermissionDenied(f"handoff {handoff_id} is of another organisation")
        if handoff.attempt is not None and attempt < handoff.attempt:
            raise StaleAttempt(f"attempt {attempt} of {handoff_id} was replaced by attempt {handoff.attempt}")
        taken = [s for s in handoff.slots if s.aside is not None and s.drawer not in (0, epoch)]
        if taken and attempt == handoff.attempt:
            raise StaleAttempt(f"attempt {attempt} of {handoff_id} is drawn by another worker")
        fresh = self.table.allocate(len(taken), epoch)
        for slot, record in zip(taken, fresh, strict=True):
            assert slot.aside is not None
            self.fence(handoff_id, slot)
            slot.aside, slot.drawer = record.index, 0
        if attempt != handoff.attempt:
            handoff.attempt = attempt
            self.stirred.add(handoff_id)

        committed: list[tuple[int, Page]] = []
        writable: list[tuple[int, Page]] = []
        drawn = owner.drawn.setdefault(handoff_id, {})
        for i, slot in enumerate(handoff.slots):
            if slot.committed is not None:
                committed.append((i, self.table.records[slot.committed].handle))
                continue
            if slot.aside is None:
                continue
            record = self.table.records[slot.aside]
            slot.drawer = epoch
            drawn[record.index] = i
            self.table.assign(record, epoch)
            writable.append((i, record.handle))
        if not drawn:
            del owner.drawn[handoff_id]
        self.lease(owner, handoff_id, (self.table.records[p.index] for _, p in committed))
        return Drawn(committed, writable)

    def _check_commit(self, epoch: int, lease_id: str, blocks: Sequence[Sealed], attempt: int) -> None:
        owner = self.owner(epoch)
        handoff = self.handoffs.get(lease_id)
        if handoff is not None and handoff.attempt is not None and attempt < handoff.attempt:
            own_growth = handoff.owner == epoch and attempt == 0
            if not own_growth:
                raise StaleAttempt(f"attempt {attempt} of {lease_id} was replaced by {handoff.attempt}")
        if len({b.page.index for b in blocks}) != len(blocks):
            raise InvalidRequest("a page occurs twice in one commit", param="blocks")
        for block in blocks:
            record = self.current(block.page)
            if record is None:
                raise StaleHandle(f"generation {block.page.generation} of page {block.page.index} has passed")
            if record.state in COMMITTED:
                if record.block_id != block.block_id or record.condemned:
                    raise StaleHandle(f"page {record.index} holds another block")
            elif record.index in owner.fenced.get(lease_id, ()):
                raise StaleAttempt(f"page {record.index} was taken by a later attempt of {lease_id}")
            elif record.index not in owner.granted and record.index not in owner.drawn.get(lease_id, ()):
                raise StaleHandle(f"page {record.index} is not granted to this worker under {lease_id}")
            if block.block_id == block.parent_id:
                raise InvalidRequest("a block cannot continue itself", param="blocks")

    def commit(
        self, epoch: int, lease_id: str, blocks: Sequence[Sealed], attempt: int = 0, org: str = ""
    ) -> list[Page]:
        """Gives pages their ids for ever and leases them; returns the page that now has each id.

        `org` is whose they are where neither a reservation nor a block before them says so.

        The first committer wins. A later one is handed the first page and keeps its
        own as granted. Whoever waits for a block is leased it and told.
        """
        self._check_commit(epoch, lease_id, blocks, attempt)
        self.table.tick()
        owner = self.owner(epoch)
        handoff = self.handoffs.get(lease_id)
        if handoff is not None:
            org = handoff.org
        winners: list[PageRecord] = []
        for block in blocks:
            record = self.table.records[block.page.index]
            winner = self.table.find(block.block_id)
            if record.state not in COMMITTED:
                self.take_over(owner, lease_id, record, grant=winner is not None)
            if winner is None:
                winner = record
                before = self.table.find(block.parent_id)
                whose = org or ("" if before is None else before.org)
                self.table.commit(record, block.block_id, block.parent_id, block.checksum, whose)
            if winner.block_id in self.wanted:
                self.deliver(winner, epoch, lease_id)
            winners.append(winner)
        self.lease(owner, lease_id, winners)
        return [r.handle for r in winners]

    def release(self, epoch: int, lease_ids: Iterable[str], granted: Iterable[Page]) -> None:
        """Ends leases (and the owner's reservations so named), takes granted pages back. Idempotent."""
        self.table.tick()
        owner = self.owner(epoch)
        for lease_id in lease_ids:
            self.end_lease(owner, lease_id)
        for page in granted:
            if page.index in owner.granted and self.current(page) is not None:
                owner.granted.discard(page.index)
                self.table.free(self.table.records[page.index])

    def grant(self, epoch: int, pages: int, *, partial: bool = False) -> list[Page]:
        """Pages to write to; with `partial` as many as there are."""
        self.table.tick()
        owner = self.owner(epoch)
        fresh = self.table.allocate(pages, epoch, partial=partial)
        owner.granted.update(r.index for r in fresh)
        return [r.handle for r in fresh]

    def forget(self, org: str) -> None:
        """No block of an organisation is found any more; what is leased goes with its lease."""
        self.table.tick()
        for record in self.table.of_organisation(org):
            self.table.drop(record)

    # -- questions ----------------------------------------------------------

    def lookup(self, block_ids: Sequence[bytes]) -> int:
        """How many leading blocks are committed."""
        index = self.table.index
        for n, block_id in enumerate(block_ids):
            if block_id not in index:
                return n
        return len(block_ids)

    def unverified(self, block_ids: Iterable[bytes]) -> list[PageRecord]:
        """Those of the blocks that were adopted and not yet compared with their checksums."""
        found = (self.table.find(b) for b in block_ids)
        return [r for r in found if r is not None and not r.verified]

    def judge(self, page: Page, *, intact: bool) -> None:
        """The verdict on an adopted page; one that is not intact is never served."""
        record = self.current(page)
        if record is None or record.verified or record.condemned:
            return
        record.verified = True
        if not intact:
            self.table.drop(record)

    def counts(self) -> dict[PageState, int]:
        """Pages by state."""
        return {state: self.table.counts[state] for state in PageState}

    def leases(self) -> int:
        """How many leases there are."""
        return sum(len(o.leases) for o in self.owners.values())
