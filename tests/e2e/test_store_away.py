"""The KV store dies or hangs in the middle of hand-overs of long prompts: the same tokens, nothing left."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import pytest
from kvmesh.v1 import common_pb2

from tests.e2e.harness import Mesh

TOKENS = 40


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
async def test_hand_overs_of_long_prompts_outlive_the_store(mesh: Mesh, how: signal.Signals) -> None:
    draw = random.Random(f"store {how}")
    prompts = [[draw.randrange(256) for _ in range(draw.choice((300, 600, 900)))] for _ in range(16)]
    samplings = [common_pb2.SamplingParams(temperature=t, seed=4) for t in (0.0, 1.0)]
    asks = [(p, samplings[i % 2]) for i, p in enumerate(prompts)]
    async with mesh.grpc() as stub:

        async def ask(tokens: list[int], sampling: common_pb2.SamplingParams, after_s: float) -> list[int]:
            await asyncio.sleep(after_s)
            ids, _ = await mesh.generate("tiny", tokens, tokens=TOKENS, stub=stub, sampling=sampling)
            return ids

        pid = mesh.pids()["kvstore-0"]
        # Half of them are on their way when the store goes, the others come while it is away.
        tasks = [asyncio.create_task(ask(*a, after_s=0.04 * i)) for i, a in enumerate(asks)]
        await asyncio.sleep(0.3)
        os.kill(pid, how)
        answers = await asyncio.wait_for(asyncio.gather(*tasks), 120)
        await mesh.settled(
            lambda: all(p["ready"] and p["pid"] != pid for p in mesh.processes("kvstore")),
            within_s=60,
            what="the store is back",
        )
        again = [await ask(*a, after_s=0.0) for a in asks]
    assert answers == again
    await mesh.settled(lambda: mesh.leased() == 0 and mesh.busy() == 0, within_s=10, what="nothing leased")
    assert not any(p["invariant_violations"] for p in mesh.processes("kvstore"))
