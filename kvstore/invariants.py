"""What must hold of a page pool at every moment. Reads every page: for tests and `Stats`."""

from __future__ import annotations

from collections import Counter

from kvstore.holdings import Holdings
from kvstore.table import COMMITTED, PageState


def violations(books: Holdings) -> list[str]:
    """Every broken rule in words; empty when all is well."""
    return [*_states(books), *_one_owner(books), *_leases(books), *_index(books), *_reservations(books)]


def _states(books: Holdings) -> list[str]:
    table = books.table
    found = Counter(r.state for r in table.records)
    bad = [
        f"{table.counts[state]} pages are counted {state.name.lower()}, {found[state]} are"
        for state in PageState
        if table.counts[state] != found[state]
    ]
    if sum(table.counts) != len(table.records):
        bad.append(f"the states add up to {sum(table.counts)} of {len(table.records)} pages")
    free = table.free_pages()
    if len(set(free)) != len(free) or set(free) != {
        r.index for r in table.records if r.state is PageState.FREE
    }:
        bad.append("the free list and the free pages differ")
    return bad


def _one_owner(books: Holdings) -> list[str]:
    """Every uncommitted page that is not free has exactly one place where it belongs."""
    places: dict[int, list[str]] = {}
    for owner in books.owners.values():
        for index in owner.granted:
            places.setdefault(index, []).append(f"granted to {owner.epoch}")
        for handoff_id, drawn in owner.drawn.items():
            for index in drawn:
                places.setdefault(index, []).append(f"drawn by {owner.epoch} for {handoff_id}")
        for handoff_id, fenced in owner.fenced.items():
            for index in fenced:
                places.setdefault(index, []).append(f"fenced from {owner.epoch} for {handoff_id}")
    for handoff in books.handoffs.values():
        for slot in handoff.slots:
            if slot.aside is not None and slot.drawer == 0:
                places.setdefault(slot.aside, []).append(f"set aside for {handoff.handoff_id}")
    bad: list[str] = []
    for record in books.table.records:
        where = places.get(record.index, [])
        uncommitted = record.state in (PageState.GRANTED, PageState.QUARANTINED)
        if len(where) != (1 if uncommitted else 0):
            bad.append(f"page {record.index} is {record.state.name.lower()} and {where or 'nobody has it'}")
        if uncommitted and record.owner not in books.owners:
            bad.append(f"page {record.index} may be written by {record.owner}, who is gone")
    return bad


def _leases(books: Holdings) -> list[str]:
    refs: Counter[int] = Counter()
    for owner in books.owners.values():
        for pages in owner.leases.values():
            refs.update(pages.keys())
    bad: list[str] = []
    for record in books.table.records:
        if record.refs != refs[record.index]:
            bad.append(f"page {record.index} counts {record.refs} leases, {refs[record.index]} exist")
        if (record.state is PageState.LEASED) != (record.refs > 0):
            bad.append(f"page {record.index} is {record.state.name.lower()} with {record.refs} leases")
    return bad


def _index(books: Holdings) -> list[str]:
    table = books.table
    committed = [r for r in table.records if r.state in COMMITTED and not r.condemned]
    bad = [
        f"page {r.index} is committed and not in the index"
        for r in committed
        if table.index.get(r.block_id) != r.index
    ]
    if len(table.index) != len(committed):
        bad.append(f"the index has {len(table.index)} blocks, {len(committed)} pages are committed")
    children = Counter(r.parent_id for r in committed)
    if children != table.children_of():
        bad.append("the counts of children are wrong")
    return bad


def _reservations(books: Holdings) -> list[str]:
    bad: list[str] = []
    waiting = 0
    for handoff in books.handoffs.values():
        owner = books.owners.get(handoff.owner)
        if owner is None:
            bad.append(f"reservation {handoff.handoff_id} is of {handoff.owner}, who is gone")
            continue
        held = owner.leases.get(handoff.handoff_id, {})
        for i, slot in enumerate(handoff.slots):
            if slot.committed is not None:
                if slot.committed not in held or slot.aside is not None:
                    bad.append(f"block {i} of {handoff.handoff_id} is committed and not leased once")
                continue
            waiting += 1
            if books.wanted.get(slot.block_id, {}).get(handoff.handoff_id) != i:
                bad.append(f"block {i} of {handoff.handoff_id} is missing and not waited for")
            if slot.block_id in books.table.index:
                bad.append(f"block {i} of {handoff.handoff_id} is committed and was not delivered")
            if slot.aside is None:
                bad.append(f"block {i} of {handoff.handoff_id} has no page set aside")
            elif slot.drawer and slot.aside not in books.owners[slot.drawer].drawn.get(
                handoff.handoff_id, {}
            ):
                bad.append(f"block {i} of {handoff.handoff_id} is drawn by nobody")
    if waiting != sum(len(w) for w in books.wanted.values()):
        bad.append("more blocks are waited for than reservations miss")
    return bad
