"""The real service on a real socket, and routers that call it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmesh.v1 import responses_pb2 as pb
from kvmesh.v1 import responses_pb2_grpc

from mesh.ca import CertificateAuthority
from mesh.config import MetricsConfig, ServiceConfig
from mesh.identity import ServiceIdentity
from mesh.rpc import open_channel
from mesh.service import ServiceRuntime
from response_store.server import serve

NAME = "responses-0"


@dataclass
class Shop:
    """`stub` speaks as a router."""

    path: Path
    identity: ServiceIdentity
    stub: Any

    def capability(self, organisation: str = "acme", **claims: Any) -> str:
        return self.identity.mint({"org": organisation, **claims}, audience="responses", ttl_s=60)

    async def put(self, response_id: str, organisation: str = "acme", **fields: Any) -> None:
        given = {"id": response_id, "created_unix_s": 10**9 * 4, "response": b"{}", "input_items": b"[]"}
        record = pb.StoredResponse(**{**given, **fields})
        record.state = record.state or pb.RESPONSE_STATE_ENDED
        await self.stub.Put(pb.PutRequest(capability=self.capability(organisation), record=record))

    async def get(self, response_id: str, organisation: str = "acme") -> pb.StoredResponse:
        request = pb.GetRequest(capability=self.capability(organisation), id=response_id)
        record: pb.StoredResponse = (await self.stub.Get(request)).record
        return record


@asynccontextmanager
async def shop(path: Path, *, role: str = "router", **options: Any) -> AsyncIterator[Shop]:
    ca = CertificateAuthority.open_or_create(path / "ca")
    token = path / "metrics-token"
    token.write_text("t")
    address = f"unix:{path}/{NAME}.sock"
    config = ServiceConfig(
        name=NAME,
        role="responses",
        node="node0",
        state_dir=path,
        run_dir=path,
        listen=address,
        advertise=address,
        tls=False,
        identity=ca.issue(path / "ids", role="responses", name=NAME),
        metrics=MetricsConfig("127.0.0.1", 0, token),
        options=options,
    )
    runtime = ServiceRuntime(config)
    running = asyncio.create_task(serve(runtime))
    try:
        async with asyncio.timeout(20):
            while not (path / f"{NAME}.sock").exists():
                assert not running.done(), running.exception()
                await asyncio.sleep(0.01)
        identity = ServiceIdentity.load(ca.issue(path / "ids", role=role, name=f"{role}-0"))
        async with open_channel(address, identity, callee_role="responses", tls=False) as channel:
            yield Shop(path, identity, responses_pb2_grpc.ResponsesStub(channel))
    finally:
        runtime.stopping.set()
        await asyncio.wait({running}, timeout=20)
        await runtime.close()
    running.result()
