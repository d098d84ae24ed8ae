"""The sending end of a transfer: pages of a hand-over, each as soon as it is committed.

Only what is reserved here under the handoff that the router's capability names can
leave. A page is leased while it is being sent, so it can be neither evicted nor
written meanwhile. It does not know how pages travel.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass

import xxhash

from kvstore.arena import Arena
from kvstore.files import ArenaKey
from kvstore.guests import guest
from kvstore.owners import Handoff
from kvstore.seals import seal
from kvstore.table import PageRecord
from mesh.errors import Conflict, InternalError, NotFound, PermissionDenied
from mesh.kv.layout import Layout
from mesh.kv.split import Cut, cut

# What is leased and on its way at once. A batch costs the sender one turn of the loop.
BATCH_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Wanted:
    """What another node asks for. `org` is that of the capability, which names `handoff_id`."""

    handoff_id: str
    org: str
    block_ids: Sequence[bytes]
    wait: bool


@dataclass(frozen=True, slots=True)
class Sending:
    """One page on its way; `data` is valid until the next batch is asked for. `index` counts
    the blocks that were asked for; `seal` binds the bytes to their block."""

    index: int
    data: memoryview
    seal: int
    parent_id: bytes


def matching(arenas: Iterable[Arena], key: ArenaKey, layout: Layout) -> tuple[Arena, Cut | None]:
    """The arena whose pages can be used by whoever asks, and how they are cut where it wants parts of them.

    Raises NotFound if there is none of that model, Conflict, naming both values, if
    there are only pages of another content or of a layout that has not what is wanted.
    """
    known = [a for a in arenas if a.key.model == key.model]
    for arena in known:
        if arena.key == key:
            return arena, None
    refused: Conflict | None = None
    for arena in known:
        if arena.key.fingerprint == key.fingerprint:
            try:
                if arena.layout is not None:
                    return arena, cut(arena.layout, layout)
                why = ""
            except Conflict as error:
                why = f": {error.message}"
            refused = Conflict(
                f"pages of {key.model} have another layout here ({arena.files.layout}) than there"
                f" ({layout}){why}",
                code="foreign_pages",
            )
    if refused is not None:
        raise refused
    if known:
        here = ", ".join(a.key.fingerprint.hex() for a in known)
        raise Conflict(
            f"pages of {key.model} have the content fingerprint {here} here and"
            f" {key.fingerprint.hex()} there: weights, KV dtype, page size, rope or executor differ",
            code="foreign_pages",
        )
    raise NotFound(f"this store has no pages of {key.model}", code="no_pages")


async def exported(
    arena: Arena, wanted: Wanted, settle: Callable[[Arena], None], parts: Cut | None = None
) -> AsyncIterator[list[Sending]]:
    """The wanted pages in batches, in the order in which they become committed, until all were given.

    With `wait` it waits for the reservation and for every block; else it raises
    NotFound for what is not there. Raises NotFound when the reservation ends.
    """
    pool = arena.pool
    left = {block_id: i for i, block_id in enumerate(wanted.block_ids)}
    seen = False
    with guest(arena, f"export of {wanted.handoff_id}", settle) as epoch:
        while left:
            stirring = arena.stirring(wanted.handoff_id)
            handoff = pool.handoffs.get(wanted.handoff_id)
            if handoff is None:
                if seen or not wanted.wait:
                    raise NotFound(f"there is no reservation {wanted.handoff_id}", code="reservation_lost")
                await stirring.wait()
                continue
            seen = True
            here = _committed(arena, handoff, wanted, left)
            if not here:
                if not wanted.wait:
                    raise NotFound(f"{len(left)} blocks are not committed here", code="not_committed")
                await stirring.wait()
                continue
            if not all(record.verified for record in here):
                await arena.verify([record.block_id for record in here])
                continue
            owner = pool.owner(epoch)
            batch = here[: max(1, BATCH_BYTES // arena.files.page_bytes)]
            pool.lease(owner, wanted.handoff_id, batch)
            settle(arena)
            # Counted now: after the last batch nobody asks again.
            arena.sent_blocks += len(batch)
            yield [_sending(arena, r, left.pop(r.block_id), parts) for r in batch]
            pool.end_lease(owner, wanted.handoff_id)
            settle(arena)


def _sending(arena: Arena, record: PageRecord, index: int, parts: Cut | None) -> Sending:
    page, checksum = arena.files.page(record.index), record.checksum
    if parts is not None:
        # A part has a seal of its own, which must not hide that the page is damaged.
        if xxhash.xxh3_64_intdigest(page) != checksum:
            raise InternalError("a page is damaged here", code="corrupt_page")
        page = memoryview(parts.take(page))
        checksum = xxhash.xxh3_64_intdigest(page)
    return Sending(index, page, seal(record.block_id, record.parent_id, checksum), record.parent_id)


def _committed(arena: Arena, handoff: Handoff, wanted: Wanted, left: dict[bytes, int]) -> list[PageRecord]:
    """Blocks of `left` that are committed, in the order of the chain."""
    if handoff.org != wanted.org:
        raise PermissionDenied(f"handoff {handoff.handoff_id} is of another organisation")
    chain = {slot.block_id for slot in handoff.slots}
    if not chain.issuperset(left):
        raise PermissionDenied("a block is not of this handoff", code="foreign_block")
    found = (arena.pool.table.find(slot.block_id) for slot in handoff.slots if slot.block_id in left)
    return [record for record in found if record is not None]
