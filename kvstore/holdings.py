"""Who holds which page: the primitives that every operation of the pool is made of.

Each keeps the books of owners, reservations and the page table in step. What an
operation is allowed to do is decided in `pool.py` and `recovery.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.owners import CommittedFrame, Handoff, Owner, Slot
from kvstore.table import Changes, PageRecord, PageState, PageTable
from mesh.errors import StaleHandle
from mesh.kv.page import Page

# The owner of what an earlier store had leased, until every worker that may
# still read it has attached again or died.
LIMBO = 0


class Holdings:
    """The page table, and the books of who holds what in it."""

    def __init__(self, pages: int) -> None:
        self.table = PageTable(pages)
        self.owners: dict[int, Owner] = {}
        self.handoffs: dict[str, Handoff] = {}
        # Block id → handoff → block index, for every block that a reservation misses.
        self.wanted: dict[bytes, dict[str, int]] = {}
        # Epochs of an earlier store that have not been heard of yet.
        self.awaited: set[int] = set()
        self.frames: dict[tuple[int, str], list[tuple[int, Page]]] = {}
        # Reservations that began, ended, or changed their attempt or what is committed of them.
        self.stirred: set[str] = set()

    def take_frames(self) -> list[CommittedFrame]:
        """What owners must be told since the last call."""
        frames = [CommittedFrame(e, h, blocks) for (e, h), blocks in self.frames.items()]
        self.frames = {}
        return frames

    def take_stirred(self) -> set[str]:
        """Reservations that changed since the last call."""
        stirred, self.stirred = self.stirred, set()
        return stirred

    def take_changes(self) -> Changes:
        """What happened to pages since the last call."""
        return self.table.take_changes()

    def owner(self, epoch: int) -> Owner:
        owner = self.owners.get(epoch)
        if owner is None or epoch == LIMBO:
            raise StaleHandle(f"epoch {epoch} is over", code="stale_epoch")
        return owner

    def current(self, page: Page) -> PageRecord | None:
        """The record of a handle, unless its generation has passed."""
        if not 0 <= page.index < len(self.table.records):
            return None
        record = self.table.records[page.index]
        return record if record.generation == page.generation else None

    def lease(self, owner: Owner, lease_id: str, records: Iterable[PageRecord]) -> None:
        held = owner.leases.setdefault(lease_id, {})
        for record in records:
            if record.index not in held:
                held[record.index] = None
                self.table.pin(record)
        if not held:
            del owner.leases[lease_id]

    def tell(self, epoch: int, handoff_id: str, blocks: list[tuple[int, Page]]) -> None:
        self.frames.setdefault((epoch, handoff_id), []).extend(blocks)

    def deliver(self, record: PageRecord, epoch: int, lease_id: str) -> None:
        """Leases a committed block to every reservation that misses it."""
        for handoff_id, i in self.wanted.pop(record.block_id).items():
            handoff = self.handoffs[handoff_id]
            slot = handoff.slots[i]
            slot.committed = record.index
            self.stirred.add(handoff_id)
            if slot.aside is not None and slot.drawer == 0:
                self.table.free(self.table.records[slot.aside])
            slot.aside, slot.drawer = None, 0
            self.lease(self.owners[handoff.owner], handoff_id, (record,))
            if (handoff.owner, handoff_id) != (epoch, lease_id):
                self.tell(handoff.owner, handoff_id, [(i, record.handle)])

    def take_over(self, owner: Owner, lease_id: str, record: PageRecord, *, grant: bool) -> None:
        """Takes a page that is being committed out of what its owner may write.

        With `grant` it stays granted, but no longer belongs to a reservation.
        """
        slot_index = owner.drawn.get(lease_id, {}).pop(record.index, None)
        if slot_index is not None:
            if not owner.drawn[lease_id]:
                del owner.drawn[lease_id]
            slot = self.slot_of(lease_id, record.index, slot_index)
            if slot is not None:
                slot.aside, slot.drawer = None, 0
        owner.granted.discard(record.index)
        if grant:
            owner.granted.add(record.index)

    def fence(self, handoff_id: str, slot: Slot) -> None:
        """Quarantines the page of a slot that an earlier drawer may still write."""
        assert slot.aside is not None
        index, drawer = slot.aside, self.owners[slot.drawer]
        drawn = drawer.drawn[handoff_id]
        del drawn[index]
        if not drawn:
            del drawer.drawn[handoff_id]
        drawer.fenced.setdefault(handoff_id, set()).add(index)
        self.table.assign(self.table.records[index], drawer.epoch, PageState.QUARANTINED)

    def undraw(self, handoff_id: str, index: int, slot_index: int) -> None:
        """A drawn page that its drawer no longer writes: back to the reservation, or free."""
        slot = self.slot_of(handoff_id, index, slot_index)
        if slot is not None:
            slot.drawer = 0
            self.table.assign(self.table.records[index], self.handoffs[handoff_id].owner)
        else:
            self.table.free(self.table.records[index])

    def slot_of(self, handoff_id: str, index: int, slot_index: int) -> Slot | None:
        """The slot that a drawn page was set aside for, if its reservation is still that one."""
        handoff = self.handoffs.get(handoff_id)
        if handoff is None or slot_index >= len(handoff.slots):
            return None
        slot = handoff.slots[slot_index]
        return slot if slot.aside == index else None

    def end_lease(self, owner: Owner, lease_id: str) -> None:
        handoff = self.handoffs.get(lease_id)
        if handoff is not None and handoff.owner == owner.epoch:
            self.end_handoff(handoff)
        for index, slot_index in owner.drawn.pop(lease_id, {}).items():
            self.undraw(lease_id, index, slot_index)
        for index in owner.fenced.pop(lease_id, ()):
            self.table.free(self.table.records[index])
        for index in owner.leases.pop(lease_id, {}):
            self.table.unpin(self.table.records[index])

    def end_handoff(self, handoff: Handoff) -> None:
        """Forgets a reservation; what a drawer still writes stays with the drawer."""
        del self.handoffs[handoff.handoff_id]
        self.stirred.add(handoff.handoff_id)
        for slot in handoff.slots:
            waiting = self.wanted.get(slot.block_id)
            if waiting is not None:
                waiting.pop(handoff.handoff_id, None)
                if not waiting:
                    del self.wanted[slot.block_id]
            if slot.aside is not None and slot.drawer == 0:
                self.table.free(self.table.records[slot.aside])
        self.frames.pop((handoff.owner, handoff.handoff_id), None)
