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


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize("role", ["kvstore-0", "kvstore-1", "prefill-tiny-0"])
async def test_a_death_or_hang_on_either_node_costs_nothing_but_time(
    apart: Mesh, role: str, how: signal.Signals
) -> None:
    draw = random.Random(f"{role} {how}")
    prompts = [[draw.randrange(256) for _ in range(320)] for _ in range(12)]
    async with apart.grpc() as stub:
        tasks = [asyncio.create_task(apart.generate("tiny", p, tokens=48, stub=stub)) for p in prompts]
        await asyncio.sleep(0.1)
        os.kill(apart.pids()[role], how)
        answers = [ids for ids, _ in await asyncio.gather(*tasks)]
        again = [(await apart.generate("tiny", p, tokens=48, stub=stub))[0] for p in prompts]
    assert answers == again
    for _ in range(200):
        if all(s["state"] == "ready" for s in apart.processes("kvstore")) and not apart.leased():
            break
        await asyncio.sleep(0.05)
    assert apart.leased() == 0


@pytest.mark.parametrize("hits", [0, 1, 2])
async def test_every_length_around_the_page_border(apart: Mesh, hits: int) -> None:
    """B61: 1 to 3P+1 tokens after local hits of 0, 1 and 2 pages; pages fit one to one, the rest is computed here."""
    import engine
    from engine.generate import generate
    from engine.sampling import SamplingParams

    page = 16
    executor = engine.load("tiny:seed=1", threads=1)
    draw = random.Random(61 + hits)
    async with apart.grpc() as stub:
        for length in range(hits * page + 1, 3 * page + 2):
            ids = [draw.randrange(256) for _ in range(length)]
            if hits:
                # Decode's own store has these: one more token and a whole page is the prompt's.
                await apart.generate("tiny", [*ids[: hits * page], 1], tokens=1, stub=stub)
            got, usage = await apart.generate("tiny", ids, tokens=4, stub=stub)
            assert got == generate(executor, ids, SamplingParams(temperature=0), 4), length
            assert usage.cached_tokens == hits * page, length


async def test_a_token_in_any_chunk_of_a_prompt_is_seen(apart: Mesh) -> None:
    """B59: prompts that differ in one token, in each fifth of 2,000, while other prompts are computed."""
    import engine
    from engine.generate import generate
    from engine.sampling import SamplingParams

    executor = engine.load("tiny:seed=1", threads=1)
    draw = random.Random(59)
    base = [draw.randrange(256) for _ in range(2000)]
    prompts = []
    for place in (0, 399, 400, 401, 799, 800, 1200, 1599, 1600, 1990):
        # Each begins anew: nothing of one is cached for another.
        changed = [draw.randrange(256), *base[1:]]
        changed[place] = (base[place] + 1) % 256
        prompts.append(changed)
    async with apart.grpc() as stub:
        answers = await asyncio.gather(*(apart.generate("tiny", p, tokens=8, stub=stub) for p in prompts))
    for prompt, (got, usage) in zip(prompts, answers, strict=True):
        assert got == generate(executor, prompt, SamplingParams(temperature=0), 8)
        assert usage.cached_tokens <= 32
