"""How long a request is still worked on after its client has left, told by the workers' own traces."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import time
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from kvmesh.v1 import common_pb2, inference_pb2

from tests.e2e.harness import Mesh

# Generous: what is measured is in docs/reliability.md.
LATEST_S = 3.0
AT_ONCE = 12


@dataclass
class Left:
    """A client that went: when, and the trace that its request was in."""

    phase: str
    trace_id: str
    at_ns: int


def traced() -> tuple[str, str]:
    trace_id = secrets.token_hex(16)
    return trace_id, f"00-{trace_id}-{secrets.token_hex(8)}-01"


def body(phase: str, number: int, dice: random.Random, **extra: Any) -> dict[str, Any]:
    prompt = f"{phase} {number} " + "".join(dice.choice("abcdefgh ") for _ in range(380))
    return {
        "model": "tiny",
        "prompt": prompt,
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": 600,
        **extra,
    }


async def leaves_early(mesh: Mesh, number: int, dice: random.Random, *, stream: bool) -> Left:
    """Queued, prefilling or just generating: nobody outside can tell."""
    phase = "early stream" if stream else "early plain"
    trace_id, parent = traced()
    async with mesh.client() as client:
        request = body(phase, number, dice, stream=stream)
        ask = asyncio.ensure_future(
            client.post("/v1/completions", json=request, headers={"traceparent": parent})
        )
        await asyncio.sleep(dice.random() * 0.4)
        at_ns = time.time_ns()
        ask.cancel()
        await asyncio.gather(ask, return_exceptions=True)
    return Left(phase, trace_id, at_ns)


async def leaves_streaming(mesh: Mesh, number: int, dice: random.Random) -> Left:
    trace_id, parent = traced()
    request = body("streaming", number, dice, stream=True)
    async with mesh.client() as client:
        try:
            async with client.stream(
                "POST", "/v1/completions", json=request, headers={"traceparent": parent}
            ) as answer:
                seen, wanted = 0, dice.randint(1, 8)
                async for line in answer.aiter_lines():
                    seen += line.startswith("data: ")
                    if seen == wanted:
                        break
                at_ns = time.time_ns()
        except httpx.HTTPError:
            raise AssertionError("the stream broke before its client left") from None
    return Left("streaming", trace_id, at_ns)


async def leaves_grpc(mesh: Mesh, number: int, dice: random.Random) -> Left:
    trace_id, parent = traced()
    ids = [dice.randrange(97, 122) for _ in range(300)]
    request = inference_pb2.GenerateRequest(
        model="tiny",
        prompt=common_pb2.Prompt(segments=[common_pb2.Segment(tokens=common_pb2.TokenRun(ids=ids))]),
        sampling=common_pb2.SamplingParams(temperature=0),
        stop=common_pb2.StopParams(max_tokens=600, ignore_eos=True),
    )
    metadata = (("authorization", f"Bearer {mesh.key}"), ("traceparent", parent))
    async with mesh.grpc() as stub:
        call = stub.Generate(request, metadata=metadata)
        if number % 2:
            await asyncio.sleep(dice.random() * 0.4)
        else:
            for _ in range(dice.randint(1, 5)):
                assert await call.read()
        at_ns = time.time_ns()
        call.cancel()
    return Left("gRPC", trace_id, at_ns)


def late_s(mesh: Mesh, left: list[Left]) -> dict[str, list[float]]:
    """By phase: how long after its client left the last step ended that a request was in."""
    last: dict[str, int] = {}
    for path in (mesh.state / "traces").glob("*.jsonl*"):
        for line in path.read_text().splitlines():
            span = json.loads(line)
            at = span["attributes"].get("last_step_unix_ns", 0)
            last[span["trace_id"]] = max(at, last.get(span["trace_id"], 0))
    found: dict[str, list[float]] = {}
    for one in left:
        found.setdefault(one.phase, []).append(max(0, last.get(one.trace_id, 0) - one.at_ns) / 1e9)
    return found


@pytest.mark.parametrize("rounds", [3, pytest.param(50, marks=pytest.mark.slow)])
async def test_nobody_works_for_a_client_that_has_left(mesh: Mesh, rounds: int) -> None:  # B12
    dice = random.Random(rounds)
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> Left:
        async with gate:
            match number % 4:
                case 0:
                    return await leaves_streaming(mesh, number, dice)
                case 1:
                    return await leaves_early(mesh, number, dice, stream=True)
                case 2:
                    return await leaves_early(mesh, number, dice, stream=False)
                case _:
                    return await leaves_grpc(mesh, number, dice)

    left = await asyncio.wait_for(asyncio.gather(*[one(n) for n in range(4 * rounds)]), timeout=300)
    await mesh.settled(lambda: mesh.leased() == 0 and mesh.busy() == 0, within_s=10, what="nobody works")
    await asyncio.sleep(0.5)
    by_phase = late_s(mesh, left)
    for phase, times in by_phase.items():
        times.sort()
        print(
            f"{phase}: {len(times)} left, worked on after: "
            f"p50 {times[len(times) // 2] * 1000:.0f} ms, p99 {times[int(len(times) * 0.99) - 1] * 1000:.0f} ms, "
            f"most {times[-1] * 1000:.0f} ms"
        )
    assert any(time_s > 0 for times in by_phase.values() for time_s in times), "no step was seen at all"
    assert max(max(times) for times in by_phase.values()) < LATEST_S
