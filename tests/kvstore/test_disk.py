"""Blocks that memory has no room for: kept on disk, given back, never wrong.

Pages hold their block's id over and over, so whatever is read back is compared whole.
"""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvstore import disk
from kvstore.disk_files import HEAD, DiskFiles
from kvstore.invariants import violations
from mesh.kv.client import KvClient
from mesh.kv.page import Page
from tests.kvstore.node import FINGERPRINT, MODEL, Node, compute, eventually, holds, prompt, running_node

FILE_BYTES = 2048 + HEAD.size
ROOMY = 1 << 20


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with running_node(pages=8, disk_bytes=ROOMY) as node:
        await node.start()
        yield node


async def ask(node: Node, kv: KvClient, ids: list[bytes], root: bytes, org: str = "acme") -> list[Page]:
    """One request: reserves, computes what is missing; the pages that were there."""
    capability = node.capability("r", ids, org=org)
    reserved = await kv.reserve("r", capability, ids, root, 0)
    for page, block_id in zip(reserved.have, ids, strict=False):
        assert holds(kv, page, block_id)
    if reserved.missing:
        drawn = await kv.draw("r", 0, capability)
        assert len(drawn.writable) == reserved.missing
        await compute_as(node, kv, ids, root, org)
    (arena,) = node.store.arenas.values()
    assert not violations(arena.pool)
    await kv.release("r")
    return reserved.have


async def compute_as(node: Node, kv: KvClient, ids: list[bytes], root: bytes, org: str) -> None:
    node_capability = node.capability
    node.capability = lambda *a, **k: node_capability(*a, **{**k, "org": org})  # type: ignore[method-assign]
    try:
        await compute(node, kv, "r", root, ids)
    finally:
        node.capability = node_capability  # type: ignore[method-assign]


def files(node: Node) -> list[Path]:
    return sorted((node.path / "kv-disk").rglob("*.page"))


def prompts(n: int, blocks: int = 6) -> Iterator[tuple[bytes, list[bytes]]]:
    for seed in range(n):
        yield prompt(blocks, seed=seed)


async def test_what_was_evicted_comes_back(node: Node) -> None:
    kv = await node.worker("d0")
    asked = list(prompts(5))
    for root, ids in asked:
        assert await ask(node, kv, ids, root) == []
    assert node.store.lookup(MODEL, FINGERPRINT, [ids for _, ids in asked]) == [6] * 5
    for root, ids in asked:
        assert len(await ask(node, kv, ids, root)) == 6
    tier = node.store.tiers.disk
    assert tier is not None
    assert tier.loaded >= 20
    assert tier.damaged == 0
    sequence, listed = node.store.blocks(MODEL, FINGERPRINT)
    assert sequence
    assert set(listed) == {b for _, ids in asked for b in ids}
    assert len(listed) == 30


async def test_files_are_for_their_owner_only_and_of_no_organisation_by_name(node: Node) -> None:
    kv = await node.worker("d0")
    for root, ids in prompts(3):
        await ask(node, kv, ids, root)
    for path in files(node):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        for folder in (path.parent, path.parent.parent, path.parent.parent.parent):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert "acme" not in str(folder)


async def test_only_a_part_of_a_chain_is_on_disk(node: Node) -> None:
    """Its first blocks are in memory, for another prompt shares them."""
    kv = await node.worker("d0")
    root, ids = prompt(6)
    await ask(node, kv, ids, root)
    await kv.reserve("sharer", node.capability("sharer", ids[:3]), ids[:3], root, 0)
    other, others = prompt(5, seed=9)
    await ask(node, kv, others, other)
    (arena,) = node.store.arenas.values()
    assert arena.pool.lookup(ids) < 6
    assert len(await ask(node, kv, ids, root)) == 6
    await kv.release("sharer")


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "foreign", "gone", "grown", "head"])
async def test_a_damaged_file_is_a_miss(node: Node, damage: str) -> None:
    kv = await node.worker("d0")
    asked = list(prompts(3))
    for root, ids in asked:
        await ask(node, kv, ids, root)
    root, ids = asked[0]
    victim = next(p for p in files(node) if p.name.startswith(ids[2].hex()))
    data = victim.read_bytes()
    match damage:
        case "flip":
            victim.write_bytes(data[:900] + bytes([data[900] ^ 1]) + data[901:])
        case "cut":
            os.truncate(victim, 700)
        case "empty":
            os.truncate(victim, 0)
        case "foreign":
            victim.write_bytes(next(p for p in files(node) if p.name.startswith(ids[3].hex())).read_bytes())
        case "gone":
            victim.unlink()
        case "grown":
            victim.write_bytes(data + b"x")
        case "head":
            victim.write_bytes(data[:50] + bytes([data[50] ^ 4]) + data[51:])
    have = await ask(node, kv, ids, root)
    assert len(have) == 2, "the blocks before it, and nothing that lies behind it"
    tier = node.store.tiers.disk
    assert tier is not None
    assert tier.damaged == 1
    assert len(await ask(node, kv, ids, root)) == 6, "it was computed anew"


@pytest.mark.parametrize("faults", [120, pytest.param(1000, marks=pytest.mark.slow)])
async def test_damaged_files_are_never_served(faults: int) -> None:
    """Flipped bytes, cut and exchanged files, at random: what is leased is always what was computed."""
    async with running_node(pages=8, disk_bytes=ROOMY, debug_fill=False) as node:
        await node.start()
        kv = await node.worker("d0")
        asked = list(prompts(6, 3))
        damaged = served = 0
        seed = 1
        while damaged < faults:
            for root, ids in asked:
                served += len(await ask(node, kv, ids, root))
            for path in files(node):
                seed = (seed * 1103515245 + 12345) % 2**31
                data = bytearray(path.read_bytes())
                if seed % 3 == 0:
                    os.truncate(path, seed % len(data))
                elif seed % 3 == 1:
                    data[seed // 3 % len(data)] ^= 1 << (seed % 8)
                    path.write_bytes(data)
                else:
                    path.write_bytes(files(node)[seed % len(files(node))].read_bytes()[:-1] + b"!")
                damaged += 1
        tier = node.store.tiers.disk
        assert tier is not None
        assert tier.damaged > faults // 12
        assert served > faults // 20


async def test_it_takes_no_more_than_it_may() -> None:
    async with running_node(pages=8, disk_bytes=10 * FILE_BYTES + 5) as node:
        await node.start()
        kv = await node.worker("d0")
        for root, ids in prompts(8):
            await ask(node, kv, ids, root)
            tier = node.store.tiers.disk
            assert tier is not None
            assert tier.books.bytes <= tier.books.limit_bytes
            await asyncio.get_running_loop().run_in_executor(tier._writer, lambda: None)
            assert sum(p.stat().st_size for p in files(node)) <= tier.books.limit_bytes
        # Prefix-closed: whatever is there can be reached from its beginning.
        sizes = node.store.lookup(MODEL, FINGERPRINT, [ids for _, ids in prompts(8)])
        assert sum(sizes) == len(node.store.blocks(MODEL, FINGERPRINT)[1])


async def test_one_organisation_has_its_share_of_the_disk() -> None:
    async with running_node(pages=16, disk_bytes=20 * FILE_BYTES, org_share=0.5) as node:
        await node.start()
        kv = await node.worker("d0")
        root, mine = prompt(6, seed=1)
        await ask(node, kv, mine, root, org="zeta")
        for root, ids in prompts(9):
            await ask(node, kv, [bytes([7]) + b[1:] for b in ids], root, org="acme")
        tier = node.store.tiers.disk
        assert tier is not None
        assert max(tier.books._bytes_of.values()) <= 10 * FILE_BYTES
        assert node.store.lookup(MODEL, FINGERPRINT, [mine]) == [6]


async def test_a_removed_organisation_leaves_nothing(node: Node) -> None:
    kv = await node.worker("d0")
    theirs = [[bytes([9]) + b[1:] for b in ids] for _, ids in prompts(2)]
    for (root, _), ids in zip(prompts(2), theirs, strict=True):
        await ask(node, kv, ids, root, org="leaver")
    for root, ids in prompts(3):
        await ask(node, kv, ids, root)
    assert node.store.lookup(MODEL, FINGERPRINT, theirs) == [6, 6]
    await node.store.forget("leaver")
    assert node.store.lookup(MODEL, FINGERPRINT, theirs) == [0, 0]
    assert node.store.lookup(MODEL, FINGERPRINT, [ids for _, ids in prompts(3)]) == [6, 6, 6]
    on_disk = {p.name[:32] for p in files(node)}
    assert on_disk
    assert not on_disk & {b.hex() for ids in theirs for b in ids}
    assert b"leaver" not in b"".join(p.read_bytes() for p in files(node))
    (arena,) = node.store.arenas.values()
    assert not violations(arena.pool)


async def test_blocks_of_nobody_known_are_not_kept(node: Node) -> None:
    """They could not be removed with their organisation."""
    kv = await node.worker("d0")
    root, ids = prompt(4)
    await ask(node, kv, ids, root)
    await node.stop(gracefully=False)
    await eventually(lambda: not kv.connected, "the client did not notice")
    await node.start()
    await asyncio.wait_for(kv.wait_connected(), 5)
    assert await kv.grow(8)
    assert not files(node)
    assert node.store.lookup(MODEL, FINGERPRINT, [ids]) == [0]


async def test_an_organisation_that_asks_again_is_known_again(node: Node) -> None:
    kv = await node.worker("d0")
    root, ids = prompt(4)
    await ask(node, kv, ids, root)
    await node.stop(gracefully=False)
    await eventually(lambda: not kv.connected, "the client did not notice")
    await node.start()
    await asyncio.wait_for(kv.wait_connected(), 5)
    assert len(await ask(node, kv, ids, root)) == 4
    assert await kv.grow(8)
    assert len(files(node)) == 4
    assert node.store.lookup(MODEL, FINGERPRINT, [ids]) == [4]


async def test_without_a_disk_nothing_is_written_and_the_old_goes() -> None:
    async with running_node(pages=8, disk_bytes=ROOMY) as node:
        await node.start()
        kv = await node.worker("d0")
        for root, ids in prompts(3):
            await ask(node, kv, ids, root)
        assert files(node)
        await kv.close()
        await node.stop()
        node.disk_bytes = 0
        await node.start()
        assert not (node.path / "kv-disk").exists()
        kv = await node.worker("d0")
        for root, ids in prompts(3):
            await ask(node, kv, ids, root)
        assert not (node.path / "kv-disk").exists()


async def test_a_disk_that_fails_is_left_alone_and_then_asked_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = await node.worker("d0")
    tier = node.store.tiers.disk
    assert tier is not None
    now = 100.0
    monkeypatch.setattr(tier, "_clock", lambda: now)
    tried = 0
    write = DiskFiles.write

    def full(*_: object) -> bool:
        nonlocal tried
        tried += 1
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DiskFiles, "write", full)
    for root, ids in prompts(4):
        assert await ask(node, kv, ids, root) == []
    assert (tried, tier.refused, tier.trouble) == (1, 1, "No space left on device")
    monkeypatch.setattr(DiskFiles, "write", write)
    now += disk.REST_S + 1
    for root, ids in prompts(4):
        await ask(node, kv, ids, root)
    assert tier.trouble == ""
    assert tier.written > 0


async def test_a_disk_that_hangs_holds_nobody_up(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = await node.worker("d0")
    monkeypatch.setattr(disk, "PATIENCE_S", 0.05)
    let_go = threading.Event()
    monkeypatch.setattr(DiskFiles, "write", lambda *_: let_go.wait(20) and False)
    async with asyncio.timeout(10):
        for root, ids in prompts(6):
            await ask(node, kv, ids, root)
    tier = node.store.tiers.disk
    assert tier is not None
    assert "takes longer" in tier.trouble
    let_go.set()


async def test_a_page_that_is_written_again_meanwhile_is_not_kept(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page is evicted and given away while the disk thread reads it."""
    kv = await node.worker("d0")
    root, ids = prompt(4)
    await ask(node, kv, ids, root)
    (arena,) = node.store.arenas.values()
    tier = node.store.tiers.disk
    assert tier is not None
    loop = asyncio.get_running_loop()
    write = DiskFiles.write

    def meanwhile(self: DiskFiles, *args: object) -> bool:
        async def evict() -> None:
            arena.pool.grant(kv.epoch, 8)

        asyncio.run_coroutine_threadsafe(evict(), loop).result()
        return write(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(DiskFiles, "write", meanwhile)
    await tier.keep(arena, [arena.pool.table.find(ids[3]) or pytest.fail("it is not there")])
    assert tier.written == 0
    assert not files(node)
    assert not list((node.path / "kv-disk").rglob("*.new"))


async def test_a_caller_that_gives_up_leaves_no_page_behind(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages stay taken until the thread that fills them is done."""
    kv = await node.worker("d0")
    for root, ids in prompts(2):
        await ask(node, kv, ids, root)
    reading, go_on = threading.Event(), threading.Event()
    read = DiskFiles.read

    def slow(self: DiskFiles, *args: object) -> int | None:
        reading.set()
        go_on.wait(20)
        return read(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(DiskFiles, "read", slow)
    root, ids = prompt(6)
    request = asyncio.create_task(kv.reserve("r", node.capability("r", ids), ids, root, 0))
    await asyncio.to_thread(reading.wait, 10)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    assert node.counts().get("granted", 0) > 0
    go_on.set()
    await eventually(lambda: not node.counts().get("granted"), "pages are taken for ever")
    (arena,) = node.store.arenas.values()
    assert not violations(arena.pool)
    assert not node.store.tiers._loads
