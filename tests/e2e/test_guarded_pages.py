"""A mesh in which a stray write kills its process, and a read of a freed page gives NaN."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Mesh, running

GUARDED = "[decode]\nprotect_pages = true\n[prefill]\nprotect_pages = true\n[kvstore]\ndebug_fill = true\n"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder: Path = tmp_path_factory.mktemp("guarded")
    (folder / "mesh.toml").write_text(GUARDED)
    # Few pages, so that they are evicted, preempted and written again all the time.
    args = ["--config", str(folder / "mesh.toml"), "--model", "tiny=tiny:seed=1", "--page-pool", "96"]
    # With them the pages of the tiny model are as large as the machine's, which can be guarded.
    args += ["--kv-dtype", "f32"]
    with running(folder / "state", args) as m:
        yield m


async def test_nobody_writes_what_is_not_his_and_nobody_reads_what_is_free(guarded: Mesh) -> None:
    import engine
    from engine.generate import generate
    from engine.sampling import SamplingParams

    draw = random.Random(8)
    prompts = [[draw.randrange(256) for _ in range(draw.choice((40, 170, 400)))] for _ in range(24)]
    before = guarded.pids("prefill", "decode")

    cancelled = 6
    async with guarded.grpc() as stub:
        tasks = [asyncio.create_task(guarded.generate("tiny", p, tokens=40, stub=stub)) for p in prompts]
        await asyncio.sleep(0.2)
        for task in tasks[:cancelled]:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
    executor = engine.load("tiny:seed=1", threads=1, kv_dtype="f32")
    greedy = SamplingParams(temperature=0)
    alone = [generate(executor, p, greedy, 40) for p in prompts[cancelled:]]
    assert [answer[0] for answer in done[cancelled:] if not isinstance(answer, BaseException)] == alone
    assert guarded.pids("prefill", "decode") == before
