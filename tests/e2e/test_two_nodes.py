"""Prefill and decode on different nodes: the same tokens, and nothing stays behind on either."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator

import pytest
from kvmesh.v1 import common_pb2

from tests.e2e.harness import Mesh, running

NODES = ["--node", "a=prefill", "--node", "b=decode", "--kv-memory", "64M", "--model", "tiny=tiny:seed=1"]


@pytest.fixture(scope="module", params=["unix", "tcp"])
def apart(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    with running(tmp_path_factory.mktemp("apart") / "state", [*NODES, "--listen", request.param]) as m:
        yield m


async def test_tokens_are_those_of_one_node(apart: Mesh, mesh: Mesh) -> None:
    draw = random.Random(5)
    lengths = (15, 16, 17, 32, 33, 200, 200, 700)
    prompts = [[draw.randrange(256) for _ in range(n)] for n in lengths]
    prompts.append([*prompts[-1], *range(40)])
    sampling = [common_pb2.SamplingParams(temperature=t, seed=9) for t in (0.0, 1.0)]

    async def all_of(m: Mesh) -> list[list[int]]:
        async with m.grpc() as stub:
            answers = await asyncio.gather(
                *(m.generate("tiny", p, tokens=24, stub=stub, sampling=s) for p in prompts for s in sampling)
            )
            return [ids for ids, _ in answers]

    assert await all_of(apart) == await all_of(mesh)
    stores = {p["name"]: p for p in apart.processes("kvstore")}
    assert stores["kvstore-1"]["pulled_blocks"] > 40
    assert stores["kvstore-0"]["sent_blocks"] >= stores["kvstore-1"]["pulled_blocks"]


async def test_nothing_stays_behind(apart: Mesh) -> None:
    async with apart.grpc() as stub:
        draw = random.Random(6)
        tasks = [
            asyncio.create_task(
                apart.generate("tiny", [draw.randrange(256) for _ in range(300)], tokens=64, stub=stub)
            )
            for _ in range(16)
        ]
        await asyncio.sleep(0.15)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for _ in range(100):
        if not apart.leased():
            break
        await asyncio.sleep(0.05)
    assert apart.leased() == 0
    for store in apart.processes("kvstore"):
        assert not store["invariant_violations"]


@pytest.mark.parametrize("role", ["kvstore-0", "kvstore-1", "prefill-tiny-0"])
async def test_a_death_on_either_node_costs_nothing_but_time(apart: Mesh, role: str) -> None:
    draw = random.Random(role)
    prompts = [[draw.randrange(256) for _ in range(320)] for _ in range(12)]
    async with apart.grpc() as stub:
        tasks = [asyncio.create_task(apart.generate("tiny", p, tokens=48, stub=stub)) for p in prompts]
        await asyncio.sleep(0.1)
        os.kill(apart.pids()[role], signal.SIGKILL)
        answers = [ids for ids, _ in await asyncio.gather(*tasks)]
        again = [(await apart.generate("tiny", p, tokens=48, stub=stub))[0] for p in prompts]
    assert answers == again
    for _ in range(200):
        if all(s["state"] == "ready" for s in apart.processes("kvstore")) and not apart.leased():
            break
        await asyncio.sleep(0.05)
    assert apart.leased() == 0
