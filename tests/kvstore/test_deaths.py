"""Real worker processes that are killed, stopped, or say goodbye."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from typing import Any

from kvstore.invariants import violations
from tests.kvstore.node import Node, eventually, prompt

HELD = {"free": 25, "granted": 5, "leased": 2}


async def start_worker(node: Node, name: str = "d0") -> tuple[asyncio.subprocess.Process, dict[str, Any]]:
    files = node.ca.issue(node.path / "id", role="decode", name=name)
    _, ids = prompt(4)
    arguments = [
        f"unix:{node.path}/kvstore.sock", str(files.key), str(files.cert), str(files.ca),
        name, node.capability("r/0", ids),
    ]  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.kvstore.worker_process", *arguments, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(20):
        return process, json.loads(await process.stdout.readline())


async def test_a_killed_worker_holds_nothing_and_a_stopped_one_everything(node: Node) -> None:
    process, said = await start_worker(node)
    try:
        assert node.counts() == HELD
        process.send_signal(signal.SIGSTOP)
        (arena,) = node.store.arenas.values()
        # The session of a stopped process stays open; break it as a lost network would.
        node.store.leave(node.store._sessions[said["epoch"]], clean=False)
        await asyncio.sleep(0.05)
        assert node.counts() == {"free": 25, "quarantined": 5, "leased": 2}
        assert not violations(arena.pool)
        process.send_signal(signal.SIGKILL)
        await process.wait()
        await eventually(lambda: node.counts() == {"free": 30, "cached": 2}, "the dead hold pages")
        assert not violations(arena.pool)
        assert not node.store.locks.path(said["epoch"]).exists()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_kill_frees_at_once(node: Node) -> None:
    process, _ = await start_worker(node)
    loop = asyncio.get_running_loop()
    began = loop.time()
    process.kill()
    await process.wait()
    await eventually(lambda: node.counts() == {"free": 30, "cached": 2}, "the dead hold pages")
    assert loop.time() - began < 1.0


async def test_a_store_that_was_killed_too_learns_of_a_death(node: Node) -> None:
    """The worker dies while no store runs: its lock is free when the next one starts."""
    process, _ = await start_worker(node)
    await node.stop(gracefully=False)
    process.kill()
    await process.wait()
    await node.start()
    assert node.counts() == {"free": 30, "cached": 2}


async def test_a_goodbye_frees_everything(node: Node) -> None:
    kv = await node.worker("d0")
    root, ids = prompt(4)
    await kv.reserve("r/0", node.capability("r/0", ids), ids, root, 3)
    assert node.counts() == {"free": 25, "granted": 7}
    await kv.close()
    assert node.counts() == {"free": 32}
