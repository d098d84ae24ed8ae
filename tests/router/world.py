"""A whole router between fakes: the real server with its real sockets, and tokens to reach it with."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
from kvmesh.v1 import (
    decode_pb2_grpc,
    encode_pb2_grpc,
    iam_pb2,
    iam_pb2_grpc,
    prefill_pb2_grpc,
    responses_pb2_grpc,
)

from encode.batches import Batches
from encode.bert import Bert
from encode.service import EncodeService
from mesh.ca import CertificateAuthority
from mesh.config import MetricsConfig, ServiceConfig
from mesh.identity import ServiceIdentity, TokenVerifier, service_audience
from mesh.members import Member
from mesh.rpc import RpcServer
from mesh.service import ServiceRuntime
from response_store.options import ShelfOptions
from response_store.service import ResponsesService
from response_store.shelf import Shelf
from router.server import Router
from tests.router.fakes import FakeDecode, FakeIam, FakePrefill

ORG = "acme"
FINGERPRINT = bytes(range(16))
SALT = b"s" * 32


@dataclass
class DecodeWorker:
    fake: FakeDecode
    member: Member
    server: RpcServer


def policy(version: int = 1, *, source: str = "script:", **changes: Any) -> iam_pb2.WatchResponse:
    """Organisation acme may use every model but `secret`; beta may use nothing."""
    response = iam_pb2.WatchResponse(
        version=version,
        organisations=[
            iam_pb2.Organisation(id=ORG, cache_salt=SALT),
            iam_pb2.Organisation(id="beta", cache_salt=b"t" * 32),
            iam_pb2.Organisation(id="gone", suspended=True, cache_salt=b"u" * 32),
        ],
        models=[
            iam_pb2.CatalogueModel(name=name, source=source, created=1_700_000_000)
            for name in ("tiny", "org/other", "secret")
        ],
        grants=[
            iam_pb2.Grant(organisation=ORG, model="*", effect=iam_pb2.GRANT_EFFECT_ALLOW),
            iam_pb2.Grant(organisation=ORG, model="secret", effect=iam_pb2.GRANT_EFFECT_DENY),
        ],
    )
    response.revoked_credentials.extend(changes.get("revoked", ()))
    return response


@dataclass
class World:
    """`client` speaks as the edge for organisation acme."""

    path: Path
    ca: CertificateAuthority
    iam: FakeIam
    decode: list[DecodeWorker]
    prefill: list[FakePrefill]
    members: dict[str, Member]
    router: Router
    runtime: ServiceRuntime
    client: httpx.AsyncClient
    servers: dict[str, RpcServer] = field(default_factory=dict)
    iam_identity: Any = None
    edge_identity: Any = None
    suspects: list[str] = field(default_factory=list)

    @property
    def worker(self) -> FakeDecode:
        return self.decode[0].fake

    def headers(self, request_id: str | None = None, **claims: Any) -> dict[str, str]:
        request_id = request_id or str(uuid.uuid4())
        identity = {
            "org": ORG,
            "project": "default",
            "principal": "key:k1",
            "credential": "k1",
            "request_id": request_id,
            "models": None,
            **claims,
        }
        return {
            "x-request-id": request_id,
            "x-mesh-identity": self.iam_identity.mint(identity, audience="router", ttl_s=60),
            "x-mesh-service": self.edge_identity.mint({}, audience=service_audience("router"), ttl_s=60),
        }

    async def post(self, path: str, body: Any, **claims: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.client.post(path, content=content, headers=self.headers(**claims))

    async def chat(self, text: str = "hello", **extra: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", chat_body(text, **extra))

    async def complete(self, prompt: Any = "hello", **extra: Any) -> httpx.Response:
        return await self.post("/v1/completions", {"model": "tiny", "prompt": prompt, **extra})

    def tell_members(self) -> None:
        self.router._members_changed(dict(self.members))

    async def ready(self) -> None:
        """Every announced decode worker is connected, and the policy is here."""
        placement = self.router.fleet.placement
        announced = [w.member.name for w in self.decode if w.member.name in self.members]

        def connected() -> bool:
            workers = [placement.get(name) for name in announced]
            texts = all(self.router.texts.loaded(model.name) for model in self.iam.policy.models)
            return self.router.policy.usable and texts and all(w is not None and w.usable for w in workers)

        await until(connected)


async def until(what: Callable[[], object], timeout_s: float = 5) -> None:
    """Waits for a state of the router that nothing tells of."""
    async with asyncio.timeout(timeout_s):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def chat_body(text: str, **extra: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **extra}


def events(text: str) -> list[Any]:
    """The data of each event; comments are skipped."""
    found: list[Any] = []
    for block in text.split("\n\n"):
        if block.startswith("data: "):
            data = block[len("data: ") :]
            found.append(data if data == "[DONE]" else json.loads(data))
    return found


@asynccontextmanager
async def world(
    *,
    decode: int = 1,
    prefill: int = 1,
    source: str = "script:",
    kept: ShelfOptions | None = None,
    encode: Path | None = None,
    **options: Any,
) -> AsyncIterator[World]:
    """A router with its workers, ready. `source`: where it reads the text side of its models. `kept`: with a service that keeps responses.
    `encode`: with an encode worker on the model of this directory."""
    path = Path(tempfile.mkdtemp(prefix="kvmesh-router-", dir="/tmp"))
    ca = CertificateAuthority.open_or_create(path / "ca")
    async with AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, path, ignore_errors=True)

        def identity(role: str, name: str) -> ServiceIdentity:
            return ServiceIdentity.load(ca.issue(path / "id", role=role, name=name))

        def config(role: str, name: str, **fields: Any) -> ServiceConfig:
            token_file = path / "metrics-token"
            token_file.write_text("t\n")
            return ServiceConfig(
                name=name,
                role=role,
                node="node0",
                state_dir=path,
                run_dir=path,
                listen=f"unix:{path}/{name}.sock",
                advertise=f"unix:{path}/{name}.sock",
                tls=False,
                identity=ca.issue(path / "id", role=role, name=name),
                metrics=MetricsConfig("127.0.0.1", 0, token_file),
                **fields,
            )

        async def serve(role: str, name: str, service: str, add: Any, servicer: Any) -> RpcServer:
            allowed = {f"/kvmesh.v1.{service}/": {"router"}}
            server = RpcServer(config(role, name), identity(role, name), allowed=allowed)
            add(servicer, server.server)
            await server.start()
            await server.set_serving(True)
            stack.push_async_callback(server.stop, 0)
            return server

        verifier = TokenVerifier(ca.cert_file)
        iam = FakeIam(policy(source=source))
        servers = {
            "iam-0": await serve("iam", "iam-0", "Policy", iam_pb2_grpc.add_PolicyServicer_to_server, iam)
        }
        members: dict[str, Member] = {}
        decoders: list[DecodeWorker] = []
        prefillers: list[FakePrefill] = []
        for n in range(decode):
            name = f"decode-tiny-{n}"
            fake = FakeDecode(verifier)
            server = await serve("decode", name, "Decode", decode_pb2_grpc.add_DecodeServicer_to_server, fake)
            members[name] = member(name, "decode", server.address)
            decoders.append(DecodeWorker(fake, members[name], server))
        for n in range(prefill):
            name = f"prefill-tiny-{n}"
            worker = FakePrefill([decoder.fake for decoder in decoders])
            server = await serve(
                "prefill", name, "Prefill", prefill_pb2_grpc.add_PrefillServicer_to_server, worker
            )
            members[name] = member(name, "prefill", server.address)
            prefillers.append(worker)
            servers[name] = server
        if encode is not None:
            model = Bert(encode)
            batches = Batches(model.embed, step_tokens=256, waiting_tokens=1 << 20)
            encoding = asyncio.create_task(batches.run())
            stack.callback(batches.close)
            stack.callback(encoding.cancel)
            encoder = EncodeService(batches, model, verifier, "tiny")
            name = "encode-tiny-0"
            servers[name] = await serve(
                "encode", name, "Encode", encode_pb2_grpc.add_EncodeServicer_to_server, encoder
            )
            members[name] = member(name, "encode", servers[name].address)
        if kept is not None:
            shelf = await Shelf.open(path / "responses" / "responses.sqlite", kept)
            stack.push_async_callback(shelf.close)
            keeper = ResponsesService(shelf, verifier)
            add = responses_pb2_grpc.add_ResponsesServicer_to_server
            servers["responses-0"] = await serve("responses", "responses-0", "Responses", add, keeper)
            options["responses"] = servers["responses-0"].address
        openai_socket = path / "openai.sock"
        runtime = ServiceRuntime(
            config(
                "router",
                "router-0",
                iam=(f"unix:{path}/iam-0.sock",),
                options={"openai_socket": str(openai_socket), **options},
            )
        )
        await runtime.open()
        stack.push_async_callback(runtime.close)
        router = Router(runtime)
        suspects: list[str] = []
        # Nobody listens for accounts here; closing would wait for a while that somebody does.
        router.outbox._publish = _acknowledged
        router.fleet._suspect = lambda name, reason: suspects.append(name)
        await router.start()
        stack.push_async_callback(router.stop)
        client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(openai_socket)), base_url="http://router", timeout=20
        )
        await stack.enter_async_context(client)
        made = World(
            path,
            ca,
            iam,
            decoders,
            prefillers,
            members,
            router,
            runtime,
            client,
            servers,
            identity("iam", "iam-0"),
            identity("edge", "envoy"),
            suspects,
        )
        made.tell_members()
        await made.ready()
        yield made


async def _acknowledged(record: bytes, msg_id: str) -> bool:
    return True


def member(name: str, role: str, address: str, **fields: Any) -> Member:
    given = {
        "node": "node0",
        "model": "tiny",
        "fingerprint": FINGERPRINT.hex(),
        "capacity": 64,
        "ready": True,
        "incarnation": uuid.uuid4().hex,
    }
    return Member(name=name, role=role, address=address, **{**given, **fields})


def grpc_channel(made: World) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"unix:{made.path}/router-0.sock")
