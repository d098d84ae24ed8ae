"""Faults that other systems were reported for, asked of this store. Each test names its case."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import xxhash

from kvstore import recovery
from kvstore.imports import Arrival, Fetching, Import
from kvstore.invariants import violations
from kvstore.owners import Sealed
from kvstore.pool import PagePool
from kvstore.seals import seal
from kvstore.table import PageState
from mesh.blocks import chain, content_fingerprint, root_id
from mesh.errors import MeshError, OutOfPages
from tests.kvstore.node import (
    FINGERPRINT,
    LAYOUT,
    MODEL,
    SALT,
    Node,
    compute,
    eventually,
    holds,
    items,
    prompt,
    two_nodes,
    write,
)

DECODE, PREFILL, OTHER, STORE = 1, 2, 3, 4


class _LateWriter:
    """A way to the other store that is still writing into a page when nobody wants it any more."""

    def __init__(self, parent: bytes) -> None:
        self.writing, self.go_on = asyncio.Event(), asyncio.Event()
        self._parent = parent

    async def pull(self, handoff_id: str, places: dict[bytes, memoryview]) -> AsyncIterator[list[Arrival]]:
        place = next(iter(places.values()))
        try:
            self.writing.set()
            await asyncio.Event().wait()
            yield []
        finally:
            # As a thread does that cannot be stopped in the middle of a read.
            await asyncio.shield(self.go_on.wait())
            place[:] = b"late" * (len(place) // 4)


async def test_b53_a_page_is_not_given_away_while_a_transfer_writes_into_it() -> None:
    """B53: A leaves in the middle of its transfer; B gets A's pages only when the writer has ended."""
    root, ids = prompt(8)
    other_root, others = prompt(8, seed=1)
    async with two_nodes(pages=8) as (_, b):
        first, second = await b.worker("decode-0"), await b.worker("decode-1")
        (arena,) = b.store.arenas.values()
        await first.reserve("A", b.capability("A", ids), ids, root, 0)
        source = _LateWriter(root)
        transfer = asyncio.create_task(
            Import(arena, Fetching("A", "acme", 1, root), source, b.store.settle).run()
        )
        await asyncio.wait_for(source.writing.wait(), 5)
        await first.release("A")
        await asyncio.sleep(0.02)
        with pytest.raises(OutOfPages):
            await second.reserve("B", b.capability("B", others), others, other_root, 0)
        source.go_on.set()
        with pytest.raises(MeshError):
            await asyncio.wait_for(transfer, 5)
        await second.reserve("B", b.capability("B", others), others, other_root, 0)
        winners = await compute(b, second, "B", other_root, others)
        await asyncio.sleep(0.02)
        assert all(holds(second, page, block_id) for page, block_id in zip(winners, others, strict=True))
        assert not violations(arena.pool)


def _event(pool: PagePool, name: str, root: bytes, ids: list[bytes]) -> None:
    """What a process that knows nothing of the others tells the store. A refusal is an answer too."""
    match name:
        case "abort":
            pool.release(DECODE, ["h"], [])
        case "send done":
            pool.release(PREFILL, ["h"], [])
        case "received":
            drawn = pool.draw(STORE, "h", "org", 1)
            pool.commit(
                STORE, "h", [Sealed(p, ids[i], ids[i - 1] if i else root, 7) for i, p in drawn.writable], 1
            )
        case "computed":
            drawn = pool.draw(PREFILL, "h", "org", 1)
            pool.commit(
                PREFILL, "h", [Sealed(p, ids[i], ids[i - 1] if i else root, 7) for i, p in drawn.writable], 1
            )
        case "timeout":
            recovery.orphan(pool, DECODE)
        case "death":
            recovery.bury(pool, PREFILL)
        case "retry":
            pool.reserve(DECODE, "h", "org", ids, 1, 2)
            pool.draw(OTHER, "h", "org", 2)


EVENTS = ("abort", "send done", "received", "computed", "timeout", "death", "retry")


@pytest.mark.parametrize("twice", ["", *EVENTS])
def test_b55_every_order_of_notices_frees_every_page_once(twice: str) -> None:
    """B55: abort, received, sent, timeout, death and retry in every order, one of them twice."""
    root, ids = prompt(3)
    for order in itertools.permutations(EVENTS, 4 if twice else 5):
        for at in range(len(order) + 1) if twice else (0,):
            pool = PagePool(8)
            for epoch in (DECODE, PREFILL, OTHER, STORE):
                recovery.open_owner(pool, epoch, str(epoch))
            pool.reserve(DECODE, "h", "org", ids, 1)
            for name in (*order[:at], twice, *order[at:]) if twice else order:
                try:
                    _event(pool, name, root, ids)
                except MeshError:
                    pass
                assert not violations(pool), order
            for epoch in (OTHER, STORE, PREFILL, DECODE):
                recovery.bury(pool, epoch)
            assert not violations(pool), order
            counts = pool.counts()
            assert counts[PageState.FREE] + counts[PageState.CACHED] == 8, order


async def test_b59_a_block_that_is_written_but_not_committed_is_not_sent() -> None:
    """B59: five chunks; what the other node has at any moment is what was finished here by then."""
    root, ids = prompt(5)
    async with two_nodes() as (a, b):
        prefill, decode = await a.worker("prefill-0", "prefill"), await b.worker("decode-0")
        await decode.reserve("h", b.capability("h", ids), ids, root, 0)
        await prefill.reserve("h", a.capability("h", ids), ids, root, 0, attempt=1)
        drawn = await prefill.draw("h", 1, a.capability("h", ids))
        fetch = asyncio.create_task(decode.fetch("h", 1, b.capability("h", ids), root, a.address))
        (here,) = b.store.arenas.values()
        for done, (index, page) in enumerate(drawn.writable):
            # The pass over the last layers is late: only half of every later page is there.
            for _, later in drawn.writable[done:]:
                start = later.index * prefill.page_bytes
                prefill.arena[start : start + prefill.page_bytes // 2] = b"half" * (prefill.page_bytes // 8)
            await asyncio.sleep(0.02)
            assert here.pool.lookup(ids) == done
            write(prefill, page, ids[index])
            await prefill.commit("h", items(root, ids, [(index, page)]), 1)
            await eventually(lambda n=done + 1: here.pool.lookup(ids) == n, "it does not come")  # type: ignore[misc]
        assert await asyncio.wait_for(fetch, 5) == 5
        for block_id in ids:
            record = here.pool.table.find(block_id)
            assert record is not None
            assert holds(decode, record.handle, block_id)


FIELDS: dict[str, dict[str, Any]] = {
    "weights or revision": {"weights_digest": b"other weights"},
    "dtype of the cache": {"kv_dtype": "int8"},
    "page size": {"page_tokens": 32},
    "rope": {"rope": "linear:2"},
    "executor": {"numerics_id": "cpu-2"},
}


@pytest.mark.parametrize("field", [*FIELDS, "organisation", "adapter"])
async def test_b71_pages_of_another_configuration_are_missed(node: Node, field: str) -> None:
    """B71: a store that X filled is asked by X′, which differs in one thing."""
    base: dict[str, Any] = {
        "weights_digest": b"weights", "kv_dtype": "f16", "page_tokens": 16, "rope": "none", "numerics_id": "cpu-1",
    }  # fmt: skip
    ours = content_fingerprint(**base)
    theirs = content_fingerprint(**{**base, **FIELDS.get(field, {})})
    salt = b"another organisation" if field == "organisation" else SALT
    tokens = list(range(64))
    root, other_root = root_id(SALT, ours), root_id(salt, theirs)
    ids = chain(root, tokens)
    asked = chain(other_root, tokens, 16, [("adapter", b"gold")] if field == "adapter" else ())
    writer = await node.worker("d0", fingerprint=ours)
    await writer.reserve("w", node.capability("w", ids), ids, root, 0)
    await compute(node, writer, "w", root, ids)
    assert node.store.lookup(MODEL, ours, [ids]) == [4]
    assert node.store.lookup(MODEL, theirs, [asked]) == [0]
    reader = await node.worker("d1", fingerprint=theirs)
    reserved = await reader.reserve("r", node.capability("r", asked, org="beta"), asked, other_root, 0)
    assert reserved.have == []
    assert not set(ids) & set(asked)


async def test_b71_pages_of_another_layout_lie_in_another_arena(node: Node) -> None:
    """B71: the same content in another layout (number of layers, split) is another arena: no hit."""
    root, ids = prompt(3)
    writer = await node.worker("d0")
    await writer.reserve("w", node.capability("w", ids), ids, root, 0)
    await compute(node, writer, "w", root, ids)
    fewer = replace(LAYOUT, planes=(LAYOUT.planes[0], replace(LAYOUT.planes[1], layer=1)))
    reader = await node.worker("d1", layout=fewer, fingerprint=FINGERPRINT)
    reserved = await reader.reserve("r", node.capability("r", ids), ids, root, 0)
    assert reserved.have == []


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
async def test_b57_b65_whoever_leaves_between_the_legs_strands_nothing(
    node: Node, order: tuple[int, ...]
) -> None:
    """B57, B65: prefill is done; decode refuses, the client leaves or prefill dies, in any order."""
    root, ids = prompt(4)
    decode, prefill = await node.worker("d0"), await node.worker("p0", "prefill")
    await decode.reserve("h", node.capability("h", ids), ids, root, 2)
    await compute(node, prefill, "h", root, ids)
    assert node.counts()["leased"] == 4
    for step in order:
        match step:
            case 0:
                await decode.release("h")
            case 1:
                await prefill.release("h")
            case 2:
                await prefill.close()
    decode.give(decode.take(decode.idle_pages) or [])
    await eventually(lambda: "leased" not in node.counts(), "blocks wait for a timeout")
    (arena,) = node.store.arenas.values()
    assert not violations(arena.pool)
    assert arena.pool.lookup(ids) == 4, "they stay cached"


def test_a_seal_is_over_the_block_and_what_came_before_it() -> None:
    root, ids = prompt(2)
    checksum = xxhash.xxh3_64_intdigest(b"page")
    seals = {seal(ids[0], root, checksum), seal(ids[1], root, checksum), seal(ids[0], ids[1], checksum)}
    assert len(seals) == 3
