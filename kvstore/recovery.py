"""Broken sessions, deaths, re-attaches, and a store that starts on an earlier one's pages.

A broken session proves nothing: what its owner may write is quarantined, what it
reads stays leased, until the same epoch attaches again or is proven dead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvstore.holdings import LIMBO, Holdings
from kvstore.owners import Owner, Reattached
from kvstore.table import COMMITTED, PageRecord, PageState
from mesh.errors import Conflict
from mesh.kv.page import Held, Page

ADOPTED = "adopted"


def open_owner(books: Holdings, epoch: int, worker: str) -> None:
    """A new worker process, which holds nothing."""
    if epoch in books.owners or epoch == LIMBO:
        raise Conflict(f"epoch {epoch} exists")
    books.owners[epoch] = Owner(epoch, worker)


def orphan(books: Holdings, epoch: int) -> None:
    """The session of a possibly living owner broke: what it may write is quarantined."""
    owner = books.owner(epoch)
    owner.attached = False
    for index in owner.writable():
        books.table.assign(books.table.records[index], epoch, PageState.QUARANTINED)


def bury(books: Holdings, epoch: int) -> None:
    """The owner is dead or said goodbye: everything that it held comes back. Idempotent."""
    owner = books.owners.get(epoch)
    if owner is None:
        return
    books.table.tick()
    for lease_id in {*owner.leases, *owner.drawn, *owner.fenced}:
        books.end_lease(owner, lease_id)
    for handoff in [h for h in books.handoffs.values() if h.owner == epoch]:
        books.end_handoff(handoff)
    for index in owner.granted:
        books.table.free(books.table.records[index])
    del books.owners[epoch]
    _heard_of(books, epoch)


def reattach(books: Holdings, epoch: int, leases: Sequence[Held], granted: Sequence[Page]) -> Reattached:
    """The same process is back: it keeps exactly what it lists and what its reservations hold.

    A lease with a page that does not hold the named block any more is reported;
    its other pages stay leased until the worker, which may be reading them,
    releases it. Blocks of a reservation that the worker does not list were
    committed while it was away: it is told of them again.
    """
    books.table.tick()
    owner = books.owner(epoch)
    owner.attached = True
    _reconcile_granted(books, owner, {p.index for p in granted if books.current(p) is not None})
    mine = set(owner.writable()).union(*owner.fenced.values())

    rejected: list[str] = []
    unreserved: list[str] = []
    told: dict[str, dict[int, None]] = {}
    for held in leases:
        told[held.lease_id], intact = _held_pages(books, held, mine)
        if not intact:
            rejected.append(held.lease_id)
        handoff = books.handoffs.get(held.lease_id)
        if handoff is None or handoff.owner != epoch:
            unreserved.append(held.lease_id)
    # Everything listed is pinned before anything else is let go.
    for lease_id, pages in told.items():
        books.lease(owner, lease_id, (books.table.records[i] for i in pages))
    for lease_id in {*owner.leases, *owner.drawn, *owner.fenced} - told.keys():
        books.end_lease(owner, lease_id)
    for handoff in [h for h in books.handoffs.values() if h.owner == epoch and h.handoff_id not in told]:
        books.end_handoff(handoff)
    for lease_id, pages in told.items():
        _trim_lease(books, owner, lease_id, pages)
    _heard_of(books, epoch)

    mine = set(owner.writable()).union(*owner.fenced.values())
    gone = [p for p in granted if p.index not in mine or books.current(p) is None]
    return Reattached(rejected, gone, unreserved)


def adopt(books: Holdings, records: Iterable[PageRecord], living: Mapping[int, str]) -> None:
    """Takes up what an earlier store left; `living` maps epochs that may still run to their workers.

    Committed pages are cached, and kept from eviction for the living where they were
    leased; pages that a living owner may write are quarantined; the rest is free.
    """
    for epoch, worker in living.items():
        books.owners[epoch] = Owner(epoch, worker, attached=False)
    kept: list[PageRecord] = []
    leased: list[PageRecord] = []
    for record in records:
        if record.state in COMMITTED:
            if record.state is PageState.LEASED:
                leased.append(record)
            record.state, record.verified = PageState.CACHED, False
        elif record.state is not PageState.FREE and record.owner in living:
            record.state = PageState.QUARANTINED
            books.owners[record.owner].granted.add(record.index)
        else:
            record.state = PageState.FREE
        kept.append(record)
    books.table.adopt(kept)
    leased = [r for r in leased if r.state is PageState.CACHED]
    if living:
        books.awaited = set(living)
        limbo = books.owners[LIMBO] = Owner(LIMBO, "", attached=False)
        books.lease(limbo, ADOPTED, leased)


def _reconcile_granted(books: Holdings, owner: Owner, listed: set[int]) -> None:
    """Takes back what the worker does not know of; the rest is its to write again."""
    records = books.table.records
    for index in owner.granted - listed:
        owner.granted.discard(index)
        books.table.free(records[index])
    for handoff_id, drawn in list(owner.drawn.items()):
        for index, slot_index in [(i, s) for i, s in drawn.items() if i not in listed]:
            del drawn[index]
            books.undraw(handoff_id, index, slot_index)
        if not drawn:
            del owner.drawn[handoff_id]
    for index in owner.writable():
        books.table.assign(records[index], owner.epoch, PageState.GRANTED)


def _held_pages(books: Holdings, held: Held, writable: set[int]) -> tuple[dict[int, None], bool]:
    """The pages of a lease that hold what the worker says, and whether all do.

    A page that the worker may still write is one whose commit never arrived.
    """
    pages: dict[int, None] = {}
    intact = True
    for page, block_id in zip(held.pages, held.block_ids, strict=True):
        record = books.current(page)
        if record is None:
            intact = False
        elif record.state in COMMITTED and record.block_id == block_id and not record.condemned:
            pages[record.index] = None
        elif record.index not in writable:
            intact = False
    return pages, intact


def _trim_lease(books: Holdings, owner: Owner, lease_id: str, told: dict[int, None]) -> None:
    """Drops what a re-attached lease holds beyond what its holder listed and reserved."""
    reserved: dict[int, int] = {}
    handoff = books.handoffs.get(lease_id)
    if handoff is not None and handoff.owner == owner.epoch:
        reserved = {s.committed: i for i, s in enumerate(handoff.slots) if s.committed is not None}
        news = [(i, books.table.records[p].handle) for p, i in reserved.items() if p not in told]
        books.frames.pop((owner.epoch, lease_id), None)
        if news:
            books.tell(owner.epoch, lease_id, news)
    held = owner.leases.get(lease_id, {})
    for index in [i for i in held if i not in told and i not in reserved]:
        del held[index]
        books.table.unpin(books.table.records[index])
    if not held:
        owner.leases.pop(lease_id, None)


def _heard_of(books: Holdings, epoch: int) -> None:
    """When the last worker of an earlier store has been heard of, nothing is kept for them."""
    books.awaited.discard(epoch)
    if not books.awaited and LIMBO in books.owners:
        books.end_lease(books.owners[LIMBO], ADOPTED)
        del books.owners[LIMBO]
