"""A service as a process: its start, its status, its end, and what it must never do."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvmesh.v1 import inference_pb2, inference_pb2_grpc

from mesh.config import write_config
from mesh.news import News
from mesh.rpc import open_channel
from mesh.service import FORKED_EXIT_STATUS
from mesh.telemetry import read_trace

ROOT = Path(__file__).resolve().parents[2]
TRACEPARENT = f"00-{'1' * 32}-{'2' * 16}-01"


@dataclass
class Running:
    process: asyncio.subprocess.Process
    site: Any
    lines: list[dict[str, Any]]
    _reader: asyncio.Task[None]

    async def line(self, message: str) -> dict[str, Any]:
        """The first log line with that message, as soon as it is there."""
        async with asyncio.timeout(20):
            while True:
                for line in self.lines:
                    if line["message"] == message:
                        return line
                await asyncio.sleep(0.01)

    @property
    def status(self) -> dict[str, Any]:
        return dict(json.loads((self.site.path / "decode-0.json").read_text()))

    async def until_ready(self) -> None:
        """Health tells, as the supervisor would ask."""
        async with grpc.aio.insecure_channel(f"unix:{self.site.path}/decode-0.sock") as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=20
            )
            async for answer in watch:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    break
            watch.cancel()

    async def ask(self, text: str, **metadata: str) -> int:
        identity = self.site.identity("router", "router-0")
        address = f"unix:{self.site.path}/decode-0.sock"
        async with open_channel(address, identity, callee_role="decode", tls=False) as channel:
            answer = await inference_pb2_grpc.InferenceStub(channel).Tokenize(
                inference_pb2.TokenizeRequest(text=text), metadata=tuple(metadata.items()), timeout=20
            )
        return int(answer.token_ids[0])

    async def ended(self) -> int:
        code = await asyncio.wait_for(self.process.wait(), 20)
        await self._reader
        return code


Start = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.fixture
def started(site: Any) -> Start:
    @asynccontextmanager
    async def start(*, tls: bool = False, **options: Any) -> AsyncIterator[Running]:
        nats = options.pop("nats", None)
        write_config(site.path / "c.json", site.config("decode", "decode-0", nats=nats, options=options))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("small_service.py")),
            "--config",
            str(site.path / "c.json"),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'protos'}"},
        )
        lines: list[dict[str, Any]] = []

        async def read() -> None:
            assert process.stdout is not None
            async for line in process.stdout:
                lines.append(json.loads(line))  # noqa: PERF401 - seen while it grows

        running = Running(process, site, lines, asyncio.create_task(read()))
        try:
            yield running
        finally:
            if process.returncode is None:
                process.kill()
            await running.ended()

    return start


async def test_the_life_of_a_service(started: Start, site: Any) -> None:
    async with started() as service:
        await service.until_ready()
        status = service.status
        pid = await service.ask("pid", traceparent=TRACEPARENT)
        assert pid == status["pid"] == service.process.pid
        assert status["ready"] is True
        assert (status["name"], status["role"]) == ("decode-0", "decode")
        assert status["address"] == f"unix:{site.path}/decode-0.sock"
        async with httpx.AsyncClient() as client:
            assert (await client.get(status["metrics_url"])).status_code == 401
            header = {"authorization": "Bearer metrics-token"}
            answer = await client.get(status["metrics_url"], headers=header)
            assert "kvmesh_ready 1.0" in answer.text
        asked = await service.line("asked")
        assert asked["trace_id"] == "1" * 32
        service.process.send_signal(signal.SIGTERM)
        assert await service.ended() == 0
        assert [line["message"] for line in service.lines] == ["started", "asked", "stopped"]
    assert not (site.path / "decode-0.json").exists()
    assert [span.name for span in read_trace(site.path, "1" * 32)] == ["kvmesh.v1.Inference/Tokenize"]


async def test_a_second_signal_ends_it_at_once(started: Start) -> None:
    async with started(linger=True) as service:
        await service.until_ready()
        service.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        assert service.process.returncode is None
        service.process.send_signal(signal.SIGINT)
        assert await service.ended() == 128 + signal.SIGINT


async def test_a_failure_at_start_is_told_and_counted(started: Start) -> None:
    async with started(fail=True) as service:
        assert await service.ended() == 1
        assert service.lines[-1]["message"] == "decode-0 cannot run: ConfigError: told to fail"


async def test_a_bad_configuration_has_a_status_of_its_own(started: Start, site: Any) -> None:
    (site.path / "bad.json").write_text("{}")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("small_service.py")),
        "--config",
        str(site.path / "bad.json"),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'protos'}"},
    )
    _, told = await process.communicate()
    assert process.returncode == 2
    assert b"bad.json: name: missing" in told or b"missing" in told


async def test_a_forked_child_never_lives_with_the_parents_connections(started: Start) -> None:
    """B104: a child ends at once, a program is started as usual, and the service goes on."""
    async with started() as service:
        await service.until_ready()
        # By our hook, or by a crash in a library's own fork handler, which comes before Python's.
        ended = {FORKED_EXIT_STATUS, 128 + signal.SIGSEGV}
        assert await service.ask("fork") in ended
        assert await service.ask("multiprocessing") in ended
        assert await service.ask("program") == 5
        assert await service.ask("pid") == service.process.pid


async def test_a_member_is_announced_and_leaves(started: Start, site: Any, nats: Any) -> None:
    nats.users = {"decode-0": "decode", "router-0": "router"}
    await nats.start()
    router = News(nats.config("router-0"), name="router-0")
    await router.start()
    pictures: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    await router.watch_members(pictures.put_nowait)
    async with started(nats=nats.config("decode-0")) as service, asyncio.timeout(20):
        while not (members := await pictures.get()) or not members["decode-0"].ready:
            pass
        member = members["decode-0"]
        assert (member.role, member.capacity, member.address) == (
            "decode",
            3,
            f"unix:{site.path}/decode-0.sock",
        )
        assert member.metrics_url == service.status["metrics_url"]
        service.process.send_signal(signal.SIGTERM)
        while await pictures.get():
            pass
    await router.close()


async def test_a_service_is_ready_without_nats(started: Start, nats: Any) -> None:
    async with started(nats=nats.config("decode-0")) as service:
        await service.until_ready()
        assert await service.ask("pid") == service.process.pid


@pytest.mark.slow
async def test_an_idle_service_costs_next_to_nothing(started: Start, nats: Any) -> None:
    nats.users = {"decode-0": "decode"}
    await nats.start()
    async with started(nats=nats.config("decode-0")) as service:
        await service.until_ready()
        await service.ask("pid")
        await asyncio.sleep(2)
        process = psutil.Process(service.process.pid)
        before, switches, began = process.cpu_times(), process.num_ctx_switches(), time.monotonic()
        await asyncio.sleep(20)
        after, lasted_s = process.cpu_times(), time.monotonic() - began
        used_s = after.user + after.system - before.user - before.system
        woken = process.num_ctx_switches().voluntary - switches.voluntary
        assert used_s / lasted_s < 0.001
        assert woken / lasted_s < 5
