"""The worker's client against a real store: the local pool, cancellation, and what it maps."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource

import pytest

from kvstore.invariants import violations
from mesh.errors import MeshError, NotFound, Unavailable
from mesh.kv import grants
from tests.kvstore.node import LAYOUT, Node, compute, eventually, items, prompt, write


async def test_the_arena_is_one_memory_for_all(node: Node) -> None:
    one, two = await node.worker("d0"), await node.worker("d1")
    assert (one.pages, one.page_bytes) == (256, LAYOUT.page_bytes)
    assert len(one.arena) == 256 * LAYOUT.page_bytes
    assert one.epoch != two.epoch
    assert await one.grow(1)
    (page,) = one.take(1) or []
    write(one, page, b"0123456789abcdef")
    start = page.index * two.page_bytes
    assert bytes(two.arena[start : start + 16]) == b"0123456789abcdef"
    header = two.header(page.index)
    assert (header.generation, header.owner, header.torn) == (page.generation, one.epoch, False)
    files = next(iter(node.store.arenas.values())).files
    assert os.stat(files.pages_path).st_mode & 0o777 == 0o600
    assert os.stat(files.headers_path).st_mode & 0o777 == 0o600


async def test_the_pool_is_filled_ahead_and_a_surplus_goes_back(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grants, "TRIM_AFTER_S", 0.01)
    kv = await node.worker("d0")
    assert kv.take(1) is None, "nothing is granted before it is asked for"
    await eventually(lambda: kv.idle_pages == 4, "not refilled")
    first = kv.take(3)
    assert first is not None
    await eventually(lambda: kv.idle_pages == 4, "not refilled ahead")
    assert await kv.grow(40)
    many = kv.take(40)
    assert many is not None
    kv.give([*first, *many])
    await eventually(lambda: node.counts() == {"free": 252, "granted": 4}, "the surplus stays")
    kv.give(many)
    assert kv.idle_pages == 4, "a page is given back once"


async def test_a_cancelled_reserve_leaves_nothing_behind(node: Node) -> None:
    kv = await node.worker("d0")
    root, ids = prompt(8)
    for turns in range(12):
        handoff = f"r/{turns}"
        asking = asyncio.create_task(kv.reserve(handoff, node.capability(handoff, ids), ids, root, 1))
        for _ in range(turns):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})
    await eventually(lambda: node.counts().get("granted", 0) <= 8, "a cancelled reservation stays")
    await kv.close()
    # What was asked for in the last moment goes when the store knows that its owner has gone.
    await eventually(lambda: node.counts() == {"free": 256}, "a cancelled reservation stays")


async def test_what_is_not_reserved_cannot_be_waited_for(node: Node) -> None:
    kv = await node.worker("d0")
    with pytest.raises(NotFound):
        kv.committed("nobody")
    root, ids = prompt(2)
    await kv.reserve("r/0", node.capability("r/0", ids), ids, root, 0)
    waiting = asyncio.create_task(anext(kv.committed("r/0"), None))
    await asyncio.sleep(0)
    await kv.release("r/0")
    assert await waiting is None, "a release ends the wait"


async def test_drawn_pages_go_with_their_lease_and_not_into_the_pool(node: Node) -> None:
    decode, prefill = await node.worker("d0"), await node.worker("p0", "prefill")
    root, ids = prompt(3)
    capability = node.capability("r/0", ids)
    await decode.reserve("r/0", capability, ids, root, 0)
    drawn = await prefill.draw("r/0", 0, capability)
    prefill.give([page for _, page in drawn.writable])
    assert prefill.idle_pages == 0
    await prefill.release("r/0")
    again = await prefill.draw("r/0", 1, capability)
    assert [p.index for _, p in again.writable] == [p.index for _, p in drawn.writable]


async def test_a_storm_of_broken_sessions_and_requests_ends_with_nothing_held(node: Node) -> None:
    workers = [await node.worker(f"d{i}") for i in range(3)]
    capabilities = [node.capability(f"r{n}", prompt(6, seed=n % 4)[1]) for n in range(24)]

    async def request(n: int, handoff: str) -> None:
        kv, seed = workers[n % 3], n % 4
        root, ids = prompt(6, seed=seed)
        try:
            async with asyncio.timeout(0.002 * n if n % 2 else 5.0):
                reserved = await kv.reserve(handoff, capabilities[n], ids, root, 2)
                try:
                    await compute(node, kv, handoff, root, ids)
                    await kv.commit(handoff, items(root, [*ids, bytes([n]) * 16], [(6, reserved.extra[0])]))
                finally:
                    kv.give(reserved.extra)
        finally:
            await kv.release(handoff)

    async def tries(n: int) -> None:
        for _ in range(8):
            with contextlib.suppress(MeshError, TimeoutError):
                await request(n, f"r{n}")
            await asyncio.sleep(0.005)

    async def breaks() -> None:
        for i in range(12):
            await asyncio.sleep(0.01)
            session = workers[i % 3]._session
            session.renew(session.number)

    await asyncio.gather(breaks(), *(tries(n) for n in range(24)))
    (arena,) = node.store.arenas.values()
    for kv in workers:
        async with asyncio.timeout(5):
            await kv.wait_connected()
    await eventually(lambda: arena.pool.leases() == 0, "a lease outlived its request")
    assert violations(arena.pool) == []
    for kv in workers:
        await kv.close()
    counts = node.counts()
    assert set(counts) == {"free", "cached"}
    assert counts["cached"] >= 6, "nothing got through"


async def test_an_idle_client_and_store_use_no_processor_time(node: Node) -> None:
    kv = await node.worker("d0")
    await kv.grow(2)
    gc.collect()
    await asyncio.sleep(0.2)
    before = resource.getrusage(resource.RUSAGE_SELF)
    await asyncio.sleep(1.0)
    after = resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used < 0.02, f"{used:.3f} s of processor time in an idle second"


async def test_a_store_that_hangs_is_waited_for_within_bounds(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = await node.worker("d0")
    root, ids = prompt(4)

    async def never(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("mesh.kv.calls.CALL_S", 0.2)
    monkeypatch.setattr(node.store, "reserve", never)
    async with asyncio.timeout(30):
        with pytest.raises(Unavailable):
            await kv.reserve("h/1", node.capability("h/1", ids), ids, root, 1)
        monkeypatch.undo()
        # Nobody knows what came of it: the session was renewed, and the same reservation can be made.
        await kv.wait_connected()
        reserved = await kv.reserve("h/1", node.capability("h/1", ids), ids, root, 1)
    assert reserved.missing == 4
    await kv.release("h/1")
    await kv.close()
    assert node.counts() == {"free": 256}
