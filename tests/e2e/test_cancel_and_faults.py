"""Clients that leave, workers that die or hang, pools that are too small: nothing leaks, nothing hangs."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.harness import Mesh, events, running


def body(text: str, **extra: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": text, "temperature": 0, "ignore_eos": True, **extra}


async def test_two_hundred_requests_half_of_them_cancelled(mesh: Mesh) -> None:  # B12
    draw = random.Random(12)
    gate = asyncio.Semaphore(32)

    async def one(client: httpx.AsyncClient, number: int) -> None:
        text = "".join(chr(97 + draw.randrange(26)) for _ in range(draw.randrange(5, 300)))
        request = body(text, max_tokens=60, stream=draw.random() < 0.5)
        async with gate:
            ask = asyncio.ensure_future(client.post("/v1/completions", json=request))
            if number % 2:
                await asyncio.sleep(draw.random() * 0.5)
                ask.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await ask
            else:
                answer = await ask
                assert answer.status_code == 200, answer.text
                if request["stream"]:
                    assert events(answer.text)[-1] == "[DONE]"

    async with mesh.client() as client:
        results = await asyncio.gather(*[one(client, i) for i in range(200)], return_exceptions=True)
    # A cancel that came after the answer is an answer.
    failed = [r for r in results if isinstance(r, Exception) and "DID NOT RAISE" not in str(r)]
    assert not failed
    await mesh.settled(lambda: mesh.leased() == 0 and mesh.busy() == 0, within_s=10, what="nothing leased")


async def test_a_client_that_leaves_stops_the_work(mesh: Mesh) -> None:  # B12
    async with mesh.client() as client:
        for stream in (True, False):
            tasks = [
                asyncio.ensure_future(
                    client.post("/v1/completions", json=body(f"leave {i}", max_tokens=3000, stream=stream))
                )
                for i in range(20)
            ]
            await asyncio.sleep(1)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await mesh.settled(
                lambda: mesh.leased() == 0 and mesh.busy() == 0, within_s=10, what="nobody works"
            )


@pytest.mark.parametrize("role", ["prefill", "decode", "kvstore", "router", "iam", "nats"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
async def test_any_one_process_dies_or_hangs(mesh: Mesh, role: str, how: signal.Signals) -> None:
    victim = next(p for p in mesh.processes(role) if role not in ("prefill", "decode") or "tiny" in p["name"])

    async def ask(client: httpx.AsyncClient, number: int) -> str:
        request = body(f"{role} {how} {number} " * 6, max_tokens=40, stream=bool(number % 2))
        try:
            answer = await client.post("/v1/completions", json=request)
        except httpx.HTTPError:
            return "transport"
        if answer.status_code != 200:
            assert answer.json()["error"]["message"]
            return "error"
        if request["stream"]:
            last = events(answer.text)[-1]
            return "done" if last == "[DONE]" else "error" if "error" in last else "silent"
        return "done"

    async with mesh.client() as client:
        tasks = [asyncio.ensure_future(ask(client, i)) for i in range(12)]
        await asyncio.sleep(0.3)
        os.kill(victim["pid"], how)
        outcomes = await asyncio.wait_for(asyncio.gather(*tasks), timeout=120)
        assert "silent" not in outcomes

        def replaced() -> bool:
            return all(
                p["pid"] != victim["pid"] and p["ready"]
                for p in mesh.processes(role)
                if p["name"] == victim["name"]
            )

        await mesh.settled(replaced, within_s=60, what=f"{victim['name']} replaced")
        after = await asyncio.wait_for(asyncio.gather(*[ask(client, 100 + i) for i in range(4)]), timeout=120)
        assert after == ["done"] * 4
    await mesh.settled(lambda: mesh.leased() == 0 and mesh.busy() == 0, within_s=30, what="nothing leased")


async def test_a_pool_far_too_small_still_finishes_everything(tmp_path: Path) -> None:
    args = ["--model", "tiny=tiny:seed=1", "--page-pool", "40"]
    with running(tmp_path / "state", args) as mesh:
        async with mesh.client() as client:
            requests = [body(f"{i} " * 20, max_tokens=100, seed=i) for i in range(16)]
            answers = await asyncio.wait_for(
                asyncio.gather(*[client.post("/v1/completions", json=r) for r in requests]), timeout=240
            )
            assert [a.status_code for a in answers] == [200] * 16
            alone = [await client.post("/v1/completions", json=r) for r in requests]
            for crowded, single in zip(answers, alone, strict=True):
                assert crowded.json()["choices"][0]["text"] == single.json()["choices"][0]["text"]
            too_long = await client.post("/v1/completions", json=body("x" * 700, max_tokens=100))
            assert too_long.status_code == 400
        await mesh.settled(lambda: mesh.leased() == 0, within_s=10, what="nothing leased")


async def test_a_killed_supervisor_leaves_nothing(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with running(state, ["--model", "script=script:"]) as mesh:
        status = mesh.status()
        pids = [p["pid"] for p in status["processes"]]
        arenas = set(Path("/dev/shm").glob("kvmesh-*"))
        os.kill(status["supervisor"]["pid"], signal.SIGKILL)

        def gone() -> bool:
            return not any(Path(f"/proc/{pid}").exists() for pid in pids)

        for _ in range(100):
            if gone():
                break
            await asyncio.sleep(0.1)
        assert gone()
        assert arenas
