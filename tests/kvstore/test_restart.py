"""A store that is killed and started again, under workers that live on."""

from __future__ import annotations

import asyncio
import logging
import signal

import pytest
from kvmesh.v1 import pages_pb2

from kvstore.invariants import violations
from mesh.errors import MeshError, NotFound, OutOfPages, Unavailable
from mesh.kv.client import KvClient
from mesh.kv.page import Page
from mesh.supervisor.sweep import remove_arenas
from tests.kvstore.node import (
    FINGERPRINT,
    MODEL,
    Node,
    complete,
    compute,
    eventually,
    holds,
    items,
    prompt,
    running_node,
)


async def crash(node: Node, *workers: KvClient) -> None:
    await node.stop(gracefully=False)
    for kv in workers:
        await eventually(lambda kv=kv: not kv.connected, "the client did not notice")  # type: ignore[misc]


def drain(kv: KvClient) -> list[Page]:
    """Everything that the client would hand out now."""
    return kv.take(kv.idle_pages) or []


async def back(node: Node, *workers: KvClient) -> None:
    await node.start()
    for kv in workers:
        async with asyncio.timeout(5):
            await kv.wait_connected()
    for arena in node.store.arenas.values():
        assert not violations(arena.pool)


async def test_leases_grants_and_the_cache_outlive_the_store(node: Node) -> None:
    kv = await node.worker("d0")
    root, ids = prompt(4)
    _, cached = prompt(2, seed=1)
    await kv.reserve("old", node.capability("old", cached), cached, root, 0)
    await compute(node, kv, "old", root, cached)
    await kv.release("old")
    reserved = await kv.reserve("r/0", node.capability("r/0", ids), ids, root, 3)
    await compute(node, kv, "r/0", root, ids)
    before = node.counts()
    await crash(node, kv)
    await back(node, kv)
    assert node.counts() == before == {"free": 23, "granted": 3, "leased": 4, "cached": 2}
    assert node.store.lookup(MODEL, FINGERPRINT, [cached, ids]) == [2, 4]

    growth = await kv.commit("r/0", items(root, [*ids, b"g" * 16], [(4, reserved.extra[0])]))
    assert growth == [reserved.extra[0]]
    await kv.release("r/0")
    kv.give(reserved.extra[1:])
    await kv.close()
    assert node.counts() == {"free": 25, "cached": 7}


async def test_a_dropped_connection_loses_nothing(node: Node) -> None:
    """The store lives on: reservations, draws and news that were missed are settled by the re-attach."""
    decode, prefill = await node.worker("d0"), await node.worker("p0", "prefill")
    root, ids = prompt(3)
    await decode.reserve("r/0", node.capability("r/0", ids), ids, root, 1)
    drawn = await prefill.draw("r/0", 0, node.capability("r/0", ids))
    session = decode._session
    session.renew(session.number)
    assert not decode.connected
    await prefill.commit("r/0", items(root, ids, drawn.writable))
    await decode.wait_connected()
    assert sorted(await complete(decode, "r/0")) == [0, 1, 2]
    assert node.counts() == {"free": 28, "granted": 1, "leased": 3}
    assert not violations(next(iter(node.store.arenas.values())).pool)


async def test_a_reservation_that_the_store_lost_is_told_so(node: Node) -> None:
    decode = await node.worker("d0")
    root, ids = prompt(3)
    await decode.reserve("r/0", node.capability("r/0", ids), ids, root, 0)
    await crash(node, decode)
    waiting = asyncio.create_task(complete(decode, "r/0"))
    await back(node, decode)
    with pytest.raises(NotFound) as lost:
        await waiting
    assert lost.value.code == "reservation_lost"
    await decode.reserve("r/0", node.capability("r/0", ids), ids, root, 0)
    assert len(await compute(node, decode, "r/0", root, ids)) == 3


async def test_while_the_store_is_away(node: Node) -> None:
    kv = await node.worker("d0")
    root, ids = prompt(2)
    assert await kv.grow(6)
    page, second = kv.take(2) or []
    await kv.commit("a", items(root, ids, [(0, page)]))
    await crash(node, kv)
    with pytest.raises(Unavailable):
        await kv.commit("a", items(root, ids, [(1, second)]))
    with pytest.raises(Unavailable):
        await kv.reserve("r/0", node.capability("r/0", ids), ids, root, 0)
    assert not await kv.grow(20)
    spare = kv.take(2)
    assert spare is not None, "granted pages go on"
    kv.give(spare)
    await kv.release("nothing")
    await back(node, kv)
    assert await kv.commit("a", items(root, ids, [(1, second)])) == [second]
    assert node.counts()["leased"] == 2

    await crash(node, kv)
    await kv.release("a")
    await back(node, kv)
    await eventually(lambda: node.counts().get("cached") == 2, "a release while the store was away is lost")


async def test_a_commit_whose_answer_never_came_is_not_forgotten(node: Node) -> None:
    kv = await node.worker("d0")
    root, ids = prompt(1)
    assert await kv.grow(1)
    (page,) = kv.take(1) or []
    real = node.store.commit

    async def commit_and_die(*args: object) -> object:
        await real(*args)  # type: ignore[arg-type]
        kv._session.renew(kv._session.number)
        await asyncio.sleep(10)
        return []

    node.store.commit = commit_and_die  # type: ignore[method-assign,assignment]
    with pytest.raises(Unavailable):
        await asyncio.wait_for(kv.commit("a", items(root, ids, [(0, page)])), 5)
    kv.give([page])
    assert page not in drain(kv), "nobody may write to a page that could be committed"
    await kv.wait_connected()
    assert page not in drain(kv)
    assert node.counts()["leased"] == 1
    node.store.commit = real  # type: ignore[method-assign]
    assert await kv.commit("a", items(root, ids, [(0, page)])) == [page]
    await kv.release("a")
    await kv.close()
    assert node.counts() == {"free": 31, "cached": 1}


async def test_a_page_that_changed_while_the_store_was_away_is_never_served(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    lost: list[str] = []
    kv = await node.worker("d0", on_lost=lambda lease_id, _: lost.append(lease_id))
    other = await node.worker("d1")
    root, ids = prompt(4)
    await kv.reserve("r/0", node.capability("r/0", ids), ids, root, 0)
    pages = await compute(node, kv, "r/0", root, ids)
    _, safe = prompt(1, seed=5)
    await kv.reserve("s/0", node.capability("s/0", safe), safe, root, 0)
    await compute(node, kv, "s/0", root, safe)
    await crash(node, kv, other)
    kv.arena[pages[2].index * kv.page_bytes + 77] ^= 1
    caplog.set_level(logging.CRITICAL, "mesh.kv.client")
    await back(node, kv, other)
    assert lost == ["r/0"]
    reserved = await other.reserve("x/0", node.capability("x/0", ids), ids, root, 0)
    assert reserved.have == pages[:2]
    assert reserved.missing == 2
    await kv.release("r/0")
    await compute(node, other, "x/0", root, ids)
    assert node.store.lookup(MODEL, FINGERPRINT, [ids]) == [4]
    assert not violations(next(iter(node.store.arenas.values())).pool)


async def test_corrupt_pages_in_the_cache_are_dropped_at_the_first_lease(node: Node) -> None:
    kv = await node.worker("d0")
    root, ids = prompt(3)
    await kv.reserve("r/0", node.capability("r/0", ids), ids, root, 0)
    pages = await compute(node, kv, "r/0", root, ids)
    await kv.release("r/0")
    await crash(node, kv)
    kv.arena[pages[1].index * kv.page_bytes] ^= 1
    await back(node, kv)
    reserved = await kv.reserve("r/1", node.capability("r/1", ids), ids, root, 0)
    assert (reserved.have, reserved.missing) == (pages[:1], 2)
    again = await compute(node, kv, "r/1", root, ids)
    assert len(again) == 1, "the block behind it was intact"
    assert sorted(await complete(kv, "r/1")) == [2]


async def test_what_a_living_worker_reads_is_not_evicted_before_it_is_back(node: Node) -> None:
    reader, other = await node.worker("d0"), await node.worker("d1")
    root, ids = prompt(30)
    await reader.reserve("r/0", node.capability("r/0", ids), ids, root, 0)
    pages = await compute(node, reader, "r/0", root, ids)
    await crash(node, other)
    # The reader is slow to come back.
    reader._session._closing = True
    await back(node, other)
    assert node.counts()["leased"] == 30
    asked_root, asked = prompt(10, seed=3)
    with pytest.raises(OutOfPages):
        await other.reserve("x", node.capability("x", asked), asked, asked_root, 0)
    assert all(holds(reader, page, ids[i]) for i, page in enumerate(pages))


async def test_real_processes_store_killed_and_started_again() -> None:
    async with running_node(pages=32) as node:
        await node.spawn()
        async with asyncio.timeout(20):
            kv = await node.worker("d0")
        root, ids = prompt(4)
        await kv.reserve("r/0", node.capability("r/0", ids), ids, root, 2)
        pages = await compute(node, kv, "r/0", root, ids)
        await node.kill(signal.SIGKILL)
        await eventually(lambda: not kv.connected, "the client did not notice")
        await node.spawn()
        async with asyncio.timeout(20):
            await kv.wait_connected()
        (arena,) = (await node.stats()).arenas
        assert (arena.leased, arena.granted, arena.free) == (4, 2, 26)
        first = node._process
        await node.spawn()
        second, node._process = node._process, first
        assert second is not None
        assert await second.wait() == 1, "a second store on one state directory is refused"
        again = await kv.reserve("r/1", node.capability("r/1", ids), ids, root, 0)
        assert again.have == pages
        await kv.close()
        (arena,) = (await node.stats()).arenas
        assert (arena.cached, arena.free) == (4, 28)
        assert await node.kill(signal.SIGTERM) == 0
        assert remove_arenas(node.path) == [], "nobody needs the pages: they went with the store"


async def test_a_worker_whose_epoch_is_over_is_told_so_for_good(node: Node) -> None:
    kv = await node.worker("d0")
    await crash(node, kv)
    node.store.locks.path(kv.epoch).unlink()
    await node.start()
    async with asyncio.timeout(5):
        error = await kv.failed
    assert isinstance(error, MeshError)
    assert error.code == "stale_epoch"
    with pytest.raises(Unavailable):
        await kv.commit("a", [])
    await node.stub("operator").Stats(pages_pb2.StatsRequest())
