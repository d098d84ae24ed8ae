"""The test mode in which a stray write into a page ends the process."""

from __future__ import annotations

import asyncio
import signal
import sys

import pytest

from mesh.kv.layout import Dtype, Layout, Plane, PlaneKind
from tests.kvstore.node import compute, items, prompt, running_node, write

WIDE = Layout(16, 4096, (Plane(0, 0, PlaneKind.K, 1, 64, Dtype.F32, 0),))

STRAY = """
import mmap, sys
from mesh.kv.page import Page
from mesh.kv.protection import Owned, Protection
arena = mmap.mmap(-1, 4 * 4096)
owned = Owned()
guard = Protection(arena, 4096)
owned.came, owned.went = guard.allow, guard.forbid
owned[1] = Page(1, 1)
arena[4096:8192] = b"x" * 4096
if sys.argv[1] == "after":
    del owned[1]
arena[4096 if sys.argv[1] == "after" else 8192] = 1
"""


@pytest.mark.parametrize("when", ["after", "beside"])
async def test_a_write_beside_what_is_owned_ends_the_process(when: str) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", STRAY, when)
    assert await asyncio.wait_for(process.wait(), 30) == -signal.SIGSEGV


async def test_a_worker_can_do_its_work_under_protection() -> None:
    root, ids = prompt(4)
    async with running_node() as node:
        await node.start()
        kv = await node.worker("decode-0", layout=WIDE, protect=True)
        await kv.reserve("h", node.capability("h", ids), ids, root, 1)
        await compute(node, kv, "h", root, ids, 1)
        while (pages := kv.take(2)) is None:
            assert await kv.grow(2)
        write(kv, pages[0], ids[0])
        _, others = prompt(1, seed=4)
        await kv.commit("h", items(root, others, [(0, pages[0])]))
        kv.give(pages[1:])
        await kv.release("h")
        await kv.close()
