"""The stream to a decode worker: when it counts as connected, and what its end sets free."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from kvmesh.v1 import decode_pb2, decode_pb2_grpc

from mesh.rpc import send_welcome
from router import wire
from router.core.choice import Row
from router.sessions import DecodeSession, Liveness

QUICK = Liveness(retry_first_s=0.01, retry_most_s=0.01, connect_s=1.0)


def dial(address: str, role: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


class Listener:
    def __init__(self, on_lost: Callable[[], None]) -> None:
        self._on_lost = on_lost

    def on_frame(
        self, frame: wire.Reserved | wire.Refused | wire.Ready | wire.SourcesFailed | wire.Done
    ) -> None: ...
    def on_rows(self, rows: Sequence[Row]) -> None: ...
    def on_lost(self, reason: str) -> None:
        self._on_lost()


class Worker(decode_pb2_grpc.DecodeServicer):
    """Refuses every stream, or takes it and ends it when told."""

    def __init__(self, *, refuses: bool) -> None:
        self.end = asyncio.Event()
        self._refuses = refuses

    async def Session(
        self, request_iterator: AsyncIterator[decode_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[decode_pb2.SessionResponse]:
        if self._refuses:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "no")
        await send_welcome(context)
        await self.end.wait()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "died")
        yield decode_pb2.SessionResponse()


async def served(worker: Worker, path: Path) -> grpc.aio.Server:
    server = grpc.aio.server()
    decode_pb2_grpc.add_DecodeServicer_to_server(worker, server)
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    return server


@pytest.mark.parametrize("worker", ["dead", "refusing"])
async def test_a_worker_that_takes_no_stream_is_never_connected(tmp_path: Path, worker: str) -> None:
    seen: list[bool] = []
    enough = asyncio.Event()

    def changed() -> None:
        seen.append(session.connected)
        if len(seen) == 5:
            enough.set()

    path = tmp_path / "s"
    server = await served(Worker(refuses=True), path) if worker == "refusing" else None
    session = DecodeSession(
        "decode-0", f"unix:{path}", dial, liveness=QUICK, on_change=changed, on_hung=lambda name, why: None
    )
    await asyncio.wait_for(enough.wait(), 20)
    await session.close()
    if server is not None:
        await server.stop(0)
    assert not any(seen)


async def test_a_broken_stream_is_told_before_its_requests_are_lost(tmp_path: Path) -> None:
    told: list[str] = []
    connected, lost = asyncio.Event(), asyncio.Event()

    def changed() -> None:
        told.append("connected" if session.connected else "broken")
        if session.connected:
            connected.set()

    def on_lost() -> None:
        told.append("lost")
        lost.set()

    worker = Worker(refuses=False)
    server = await served(worker, tmp_path / "s")
    session = DecodeSession(
        "decode-0",
        f"unix:{tmp_path / 's'}",
        dial,
        liveness=QUICK,
        on_change=changed,
        on_hung=lambda name, why: None,
    )
    await asyncio.wait_for(connected.wait(), 20)
    session._listeners["handoff"] = Listener(on_lost)
    worker.end.set()
    await asyncio.wait_for(lost.wait(), 20)
    await session.close()
    await server.stop(0)
    assert told[:3] == ["connected", "broken", "lost"]
