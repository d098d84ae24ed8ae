"""Every process is replaced under load, and nobody notices."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.harness import Mesh, events, running


class Load:
    """Clients that ask one request after another until told to stop; long answers that outlast a restart."""

    def __init__(self, mesh: Mesh, *, model: str, clients: int, long: int, long_s: float) -> None:
        self.mesh, self.model = mesh, model
        self.clients, self.long, self.long_s = clients, long, long_s
        self.failed: list[str] = []
        self.done = 0
        self.stop = asyncio.Event()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(self.clients):
                group.create_task(self._short(number))
            for number in range(self.long):
                group.create_task(self._long(number))

    async def _short(self, number: int) -> None:
        async with self.mesh.client() as client:
            turn = 0
            while not self.stop.is_set():
                turn += 1
                # Half of them on connections of their own: those are what a restart could refuse.
                if turn % 2:
                    await self._ask(client, f"short {number} {turn} " * 8, 5, stream=bool(turn % 3))
                else:
                    async with self.mesh.client() as fresh:
                        await self._ask(fresh, f"fresh {number} {turn} " * 8, 5, stream=bool(turn % 3))

    async def _long(self, number: int) -> None:
        words = 160
        async with self.mesh.client() as client:
            while not self.stop.is_set():
                delay_ms = round(self.long_s * 1000 / words)
                await self._ask(client, f"{number:08d}" * (words // 8), words, number % 2 == 0, delay_ms)

    async def _ask(
        self, client: httpx.AsyncClient, text: str, tokens: int, stream: bool, delay_ms: int = 0
    ) -> None:
        request: dict[str, Any] = {
            "model": self.model,
            "prompt": text,
            "temperature": 0,
            "max_tokens": tokens,
            "stream": stream,
            "metadata": {"script_delay_ms": str(delay_ms)},
        }
        try:
            answer = await client.post("/v1/completions", json=request)
            if answer.status_code != 200:
                raise AssertionError(f"{answer.status_code} {answer.text[:200]}")
            if stream:
                told = events(answer.text)
                if told[-1] != "[DONE]":
                    raise AssertionError(json.dumps(told[-1])[:200])
                said = "".join(e["choices"][0]["text"] for e in told[:-1] if e["choices"])
            else:
                said = answer.json()["choices"][0]["text"]
            if said != text[:tokens]:
                raise AssertionError(f"said {said!r} in place of {text[:tokens]!r}")
            self.done += 1
        except (httpx.HTTPError, AssertionError, json.JSONDecodeError) as error:
            self.failed.append(
                f"{time.strftime('%H:%M:%S')} {type(error).__name__} {error} {stream=} {delay_ms=}"
            )


async def rolled(mesh: Mesh, load: Load, *, settle_s: float = 1.0) -> None:
    before = mesh.pids()
    running_load = asyncio.create_task(load.run())
    await asyncio.sleep(settle_s)
    told = await asyncio.to_thread(mesh.cli, "restart", "all", timeout_s=600)
    after = mesh.pids()
    load.stop.set()
    await asyncio.wait_for(running_load, timeout=600)
    print(told, load.done, load.failed)
    assert not load.failed, "\n".join(load.failed)
    assert set(before) == set(after)
    assert not set(before.values()) & set(after.values())
    await mesh.settled(lambda: mesh.leased() == 0 and mesh.busy() == 0, within_s=15, what="nothing leased")


@pytest.mark.mesh
async def test_a_rolling_restart_of_everything_fails_no_request(tmp_path: Path) -> None:
    with running(tmp_path / "state", ["--model", "script=script:"]) as mesh:
        await rolled(mesh, Load(mesh, model="script", clients=4, long=4, long_s=16))


@pytest.mark.slow
async def test_a_rolling_restart_under_long_generations_and_with_pairs(tmp_path: Path) -> None:
    pairs = ["--prefill", "2", "--decode", "2", "--router", "2"]
    with running(tmp_path / "state", ["--model", "script=script:", *pairs]) as mesh:
        await rolled(mesh, Load(mesh, model="script", clients=6, long=16, long_s=60))


@pytest.mark.slow
async def test_a_rolling_restart_over_tcp_with_mutual_tls(tmp_path: Path) -> None:
    with running(tmp_path / "state", ["--model", "script=script:", "--listen", "tcp"]) as mesh:
        await rolled(mesh, Load(mesh, model="script", clients=4, long=4, long_s=16))


async def test_a_drained_worker_takes_nothing_until_it_is_restarted(mesh: Mesh) -> None:
    names = [p["name"] for p in mesh.processes("decode") if p["name"].startswith("decode-script")]
    load = Load(mesh, model="script", clients=2, long=2, long_s=8)
    running_load = asyncio.create_task(load.run())
    await asyncio.sleep(1.0)
    assert "is drained" in await asyncio.to_thread(mesh.cli, "drain", names[0], "--within", "1")
    states = {p["name"]: p["state"] for p in mesh.status()["processes"]}
    assert states[names[0]] == "drained"
    assert mesh.status()["ready"]
    # The other one is the last.
    await asyncio.to_thread(mesh.cli, "drain", names[1], check=False)
    assert {p["name"]: p["state"] for p in mesh.status()["processes"]}[names[1]] == "ready"
    await asyncio.sleep(1.0)
    await asyncio.to_thread(mesh.cli, "restart", names[0])
    load.stop.set()
    await asyncio.wait_for(running_load, timeout=120)
    assert not load.failed, "\n".join(load.failed)
    assert load.done > 4
    assert {p["name"]: p["state"] for p in mesh.status()["processes"]}[names[0]] == "ready"
