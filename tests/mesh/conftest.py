"""A small mesh of one test: a CA, identities, configurations, a gRPC service, NATS."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Protocol

import pytest
from kvmesh.v1 import inference_pb2, inference_pb2_grpc, prefill_pb2, prefill_pb2_grpc

from mesh.ca import CertificateAuthority
from mesh.config import IdentityFiles, MetricsConfig, NatsConfig, ServiceConfig
from mesh.identity import ServiceIdentity, TokenVerifier
from mesh.nats_permissions import permissions
from mesh.rpc import RpcServer


@dataclass(frozen=True, slots=True)
class Site:
    """A directory with a certificate authority."""

    path: Path
    ca: CertificateAuthority

    def identity(self, role: str, name: str) -> ServiceIdentity:
        return ServiceIdentity.load(self.ca.issue(self.path / "id", role=role, name=name))

    def verifier(self) -> TokenVerifier:
        return TokenVerifier(self.ca.cert_file)

    def config(self, role: str, name: str, *, tls: bool = False, **options: Any) -> ServiceConfig:
        listen = "127.0.0.1:0" if tls else f"unix:{self.path}/{name}.sock"
        token_file = self.path / "metrics-token"
        token_file.write_text("metrics-token\n")
        return ServiceConfig(
            name=name,
            role=role,
            node="node0",
            state_dir=self.path,
            run_dir=self.path,
            listen=listen,
            advertise=listen,
            tls=tls,
            identity=self.ca.issue(self.path / "id", role=role, name=name),
            metrics=MetricsConfig("127.0.0.1", 0, token_file),
            **options,
        )


@pytest.fixture
def site() -> Iterator[Site]:
    # Not tmp_path: a Unix socket's path has to be short.
    path = Path(mkdtemp(prefix="km"))
    yield Site(path, CertificateAuthority.open_or_create(path / "ca"))
    shutil.rmtree(path)


Behaviour = Callable[[Any, Any], Awaitable[Any]]


@dataclass
class Worker(prefill_pb2_grpc.PrefillServicer):
    """A service whose handlers the test sets. Counts what got through."""

    handled: int = 0
    run: Callable[[Any, Any], AsyncIterator[Any]] | None = None
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def Run(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.handled += 1
        try:
            if self.run is not None:
                async for response in self.run(request, context):
                    yield response
            else:
                yield prefill_pb2.RunResponse(computed_tokens=1)
        finally:
            self.closed.set()


@dataclass
class Tokenizer(inference_pb2_grpc.InferenceServicer):
    """Unary calls: a test's function answers, or the request's size; ListModels answers `answer_bytes`."""

    handled: int = 0
    answer_bytes: int = 0
    tokenize: Behaviour | None = None

    async def Tokenize(self, request: Any, context: Any) -> Any:
        self.handled += 1
        if self.tokenize is not None:
            return await self.tokenize(request, context)
        return inference_pb2.TokenizeResponse(context_length=len(request.text))

    async def ListModels(self, request: Any, context: Any) -> Any:
        card = inference_pb2.ModelCard(id="x" * self.answer_bytes)
        return inference_pb2.ListModelsResponse(models=[card])

    # As the generated class leaves it: nobody wrote this one.
    Generate = inference_pb2_grpc.InferenceServicer.Generate


class Serving(Protocol):
    def __call__(
        self, *, tls: bool = False, role: str = "prefill", name: str = "prefill-0"
    ) -> AbstractAsyncContextManager[tuple[RpcServer, Worker, Tokenizer]]: ...


@pytest.fixture
def serving(site: Site) -> Serving:
    """`async with serving(tls=…) as (rpc, worker, tokenizer)`; routers may call both services."""

    @asynccontextmanager
    async def start(
        *, tls: bool = False, role: str = "prefill", name: str = "prefill-0"
    ) -> AsyncIterator[tuple[RpcServer, Worker, Tokenizer]]:
        config = site.config(role, name, tls=tls)
        allowed = {"/kvmesh.v1.Prefill/": {"router"}, "/kvmesh.v1.Inference/Tokenize": {"router", "edge"}}
        allowed["/kvmesh.v1.Inference/ListModels"] = {"router"}
        rpc = RpcServer(config, ServiceIdentity.load(config.identity), allowed=allowed)
        worker, tokenizer = Worker(), Tokenizer()  # type: ignore[abstract]
        prefill_pb2_grpc.add_PrefillServicer_to_server(worker, rpc.server)
        inference_pb2_grpc.add_InferenceServicer_to_server(tokenizer, rpc.server)
        await rpc.start(["kvmesh.v1.Prefill"])
        await rpc.set_serving(True)
        try:
            yield rpc, worker, tokenizer
        finally:
            await rpc.stop(None)

    return start


@dataclass
class Nats:
    """A real server with one user per service; `kill` and `start` as often as wanted."""

    path: Path
    port: int
    users: dict[str, str] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None
    tls: IdentityFiles | None = None

    def config(self, name: str) -> NatsConfig:
        scheme, ca = ("nats", None) if self.tls is None else ("tls", self.tls.ca)
        return NatsConfig(f"{scheme}://127.0.0.1:{self.port}", name, f"password of {name}", ca)

    async def start(self) -> None:
        users = []
        for name, role in self.users.items():
            rules = permissions(role, name=name, node="node0")
            users.append(
                {
                    "user": name,
                    "password": self.config(name).password,
                    "permissions": {
                        "publish": list(rules.publish),
                        "subscribe": list(rules.subscribe),
                    },
                }
            )
        document: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": self.port,
            "jetstream": {"store_dir": str(self.path / "nats")},
            "authorization": {"users": users},
        }
        if self.tls is not None:
            document["tls"] = {
                "cert_file": str(self.tls.cert),
                "key_file": str(self.tls.key),
                "ca_file": str(self.tls.ca),
                "verify": True,
            }
        file = self.path / "nats.conf"
        file.write_text(json.dumps(document))
        binary = Path(sys.executable).with_name("nats-server")
        self.process = await asyncio.create_subprocess_exec(
            str(binary), "--config", str(file), stderr=asyncio.subprocess.PIPE
        )
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            if b"Server is ready" in line:
                return
        raise AssertionError("NATS did not start")

    async def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


@pytest.fixture
async def nats(site: Site) -> AsyncIterator[Nats]:
    """Not started yet: the test names the users first."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = Nats(site.path, port)
    yield server
    await server.kill()
