"""The disk tier of a store process that is killed at any moment, and of a disk that is full."""

from __future__ import annotations

import asyncio
import random
import shutil
import subprocess
from collections.abc import AsyncIterator

import pytest
from kvmesh.v1 import pages_pb2

from mesh.errors import MeshError, Unavailable
from mesh.kv.client import KvClient
from tests.kvstore.node import FINGERPRINT, MODEL, Node, holds, items, prompt, running_node, write


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with running_node(pages=12, disk_bytes=1 << 20, debug_fill=False) as node:
        yield node


async def ask(node: Node, kv: KvClient, seed: int, number: int) -> int:
    """One request as a worker makes it; how many blocks were there, each compared whole."""
    root, ids = prompt(5, seed=seed)
    handoff = f"r/{number}"
    capability = node.capability(handoff, ids)
    reserved = await kv.reserve(handoff, capability, ids, root, 0)
    try:
        for page, block_id in zip(reserved.have, ids, strict=False):
            assert holds(kv, page, block_id), "a wrong page"
        if reserved.missing:
            drawn = await kv.draw(handoff, 0, capability)
            for index, page in drawn.writable:
                write(kv, page, ids[index])
            await kv.commit(handoff, items(root, ids, drawn.writable))
        return len(reserved.have)
    finally:
        await kv.release(handoff)


async def held(node: Node, seed: int) -> int:
    _, ids = prompt(5, seed=seed)
    chain = pages_pb2.Chain(block_ids=ids)
    request = pages_pb2.LookupRequest(model=MODEL, content_fingerprint=FINGERPRINT, chains=[chain])
    answer = await node.stub("router").Lookup(request, wait_for_ready=True, timeout=10)
    return int(answer.prefix_blocks[0])


async def test_killed_while_it_writes(node: Node) -> None:
    """SIGKILL at arbitrary moments of a busy disk: what comes back is whole, and most comes back."""
    draw = random.Random(3)
    await node.spawn()
    kv = await node.worker("d0")
    number = hits = 0
    refusals: set[str] = set()

    async def load() -> None:
        nonlocal number, hits
        while True:
            number += 1
            try:
                hits += await ask(node, kv, draw.randrange(12), number)
            except Unavailable:
                await kv.wait_connected()
            except MeshError as error:
                refusals.add(str(error.code))

    for _ in range(3):
        busy = asyncio.create_task(load())
        await asyncio.sleep(0.3 + draw.random() * 0.2)
        assert not busy.done() or busy.result()
        await node.kill()
        await node.spawn()
        await asyncio.wait_for(kv.wait_connected(), 20)
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
    before = hits
    for seed in range(12):
        while True:
            number += 1
            try:
                hits += await ask(node, kv, seed, number)
                break
            except Unavailable:
                # The load's last call was cut off with an outcome that nobody knows: the session is renewed.
                await asyncio.wait_for(kv.wait_connected(), 20)
    assert hits > before
    assert refusals <= {"reservation_lost", "stale_epoch", "session_over"}
    stats = await node.stats()
    assert stats.disk.damaged_blocks == 0, "a file that was not whole was taken for a block"
    assert stats.disk.bytes <= stats.disk.limit_bytes


async def test_a_next_store_gives_back_what_the_killed_one_kept(node: Node) -> None:
    await node.spawn()
    kv = await node.worker("d0")
    for seed in range(6):
        await ask(node, kv, seed, seed)
    await kv.close()
    await node.kill()
    for path in (node.path / "kv-disk").glob("*/*"):
        # What a store leaves that is killed between two writes of one file.
        (path / f"{'0' * 32}-{'1' * 32}.page.new").write_bytes(b"half a pa")
        (path / "notes.txt").write_text("not ours")
    await node.spawn()
    kv = await node.worker("d1")
    assert await held(node, 0) == 5
    assert await ask(node, kv, 0, 100) == 5
    left = [p.name for p in (node.path / "kv-disk").rglob("*") if p.is_file()]
    assert left
    assert all(name.endswith(".page") for name in left)


async def test_forget_is_for_operators_and_empties_the_disk(node: Node) -> None:
    await node.spawn()
    kv = await node.worker("d0")
    for seed in range(6):
        await ask(node, kv, seed, seed)
    request = pages_pb2.ForgetRequest(organisation="acme")
    for role in ("router", "decode", "kvstore"):
        with pytest.raises(Exception, match="PERMISSION_DENIED"):
            await node.stub(role).Forget(request)
    assert (await node.stats()).disk.blocks > 0
    await node.stub("operator").Forget(request)
    assert (await node.stats()).disk.blocks == 0
    assert not [p for p in (node.path / "kv-disk").rglob("*") if p.is_file()]
    assert await held(node, 0) == 0


async def test_a_full_disk(node: Node) -> None:
    """A tmpfs of 64 KiB in a mount namespace of the store's own: serving goes on, health says why."""
    folder = node.path / "kv-disk"
    folder.mkdir(mode=0o700)
    small = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        f'mount -t tmpfs -o size=64k,mode=700 none {folder} && exec "$@"',
        "-",
    ]
    if shutil.which("unshare") is None or subprocess.run([*small, "true"], check=False).returncode:
        pytest.skip("needs the right to mount")
    await node.spawn(small)
    kv = await node.worker("d0")
    for seed in range(20):
        await ask(node, kv, seed, seed)
    stats = await node.stats()
    assert stats.disk.refused_blocks > 0
    assert "space" in stats.disk.trouble
    assert 0 < stats.disk.bytes <= 65536
    for seed in range(20):
        await ask(node, kv, seed, 100 + seed)
    assert not list(folder.iterdir()), "it was the small one"
