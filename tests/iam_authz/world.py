"""A real IAM behind real mesh plumbing on a Unix socket, in the test's own loop."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
from kvmesh.extern import ext_authz_pb2 as authz
from kvmesh.extern import ext_authz_pb2_grpc
from kvmesh.v1 import iam_pb2, iam_pb2_grpc

from iam_authz.hints import News
from iam_authz.iam import ALLOWED, SERVICES, Iam, open_iam
from iam_authz.options import parse_options
from mesh.ca import CertificateAuthority
from mesh.config import MetricsConfig, ServiceConfig
from mesh.identity import ServiceIdentity, TokenVerifier, VerifiedToken
from mesh.rpc import RpcServer, open_channel


@dataclass
class World:
    """One IAM process, and channels to it as any role."""

    state: Path
    address: str
    iam: Iam
    ca: CertificateAuthority
    channels: dict[str, grpc.aio.Channel] = field(default_factory=dict)

    def channel(self, role: str) -> grpc.aio.Channel:
        if role not in self.channels:
            name = f"{role}-0"
            identity = ServiceIdentity.load(self.ca.issue(self.state / "id" / name, role=role, name=name))
            self.channels[role] = open_channel(self.address, identity, callee_role="iam", tls=False)
        return self.channels[role]

    @property
    def admin(self) -> iam_pb2_grpc.AdminAsyncStub:
        return iam_pb2_grpc.AdminStub(self.channel("operator"))

    @property
    def policy(self) -> iam_pb2_grpc.PolicyAsyncStub:
        return iam_pb2_grpc.PolicyStub(self.channel("router"))

    @property
    def identity(self) -> iam_pb2_grpc.IdentityAsyncStub:
        return iam_pb2_grpc.IdentityStub(self.channel("router"))

    @property
    def quota(self) -> iam_pb2_grpc.QuotaAsyncStub:
        return iam_pb2_grpc.QuotaStub(self.channel("router"))

    async def check(
        self, authorization: str | None, *, path: str = "/v1/models", **headers: str
    ) -> authz.CheckResponse:
        """Envoy's question about a request with these headers (`_` stands for `-`)."""
        sent = {":path": path, "x-request-id": "req-1"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        if authorization is not None:
            sent["authorization"] = authorization
        http = authz.AttributeContext.HttpRequest(method="POST", path=path, headers=sent)
        request = authz.CheckRequest(
            attributes=authz.AttributeContext(request=authz.AttributeContext.Request(http=http))
        )
        stub: Any = ext_authz_pb2_grpc.AuthorizationStub(self.channel("edge"))
        response: authz.CheckResponse = await stub.Check(request)
        return response

    def identity_of(self, response: authz.CheckResponse) -> VerifiedToken:
        """The identity token in an allowing answer, verified as a router does."""
        (header,) = response.ok_response.headers
        assert header.header.key == "x-mesh-identity"
        verifier = TokenVerifier(self.ca.cert_file)
        return verifier.verify(header.header.value, audience="router", roles=("iam",))

    async def organisation(self, name: str = "acme", allow: str | None = "*") -> None:
        await self.admin.PutOrganisation(iam_pb2.PutOrganisationRequest(id=name))
        if allow is not None:
            grant = iam_pb2.Grant(organisation=name, model=allow, effect=iam_pb2.GRANT_EFFECT_ALLOW)
            await self.admin.PutGrant(iam_pb2.PutGrantRequest(grant=grant))

    async def key(self, organisation: str = "acme", **fields: Any) -> iam_pb2.CreateKeyResponse:
        request = iam_pb2.CreateKeyRequest(**{"organisation": organisation, "name": "test"} | fields)
        return await self.admin.CreateKey(request)

    async def model(self, name: str) -> None:
        model = iam_pb2.CatalogueModel(name=name, source="tiny:seed=1")
        await self.admin.PutModel(iam_pb2.PutModelRequest(model=model))


@asynccontextmanager
async def running_iam(
    state: Path, *, options: dict[str, Any] | None = None, news: News | None = None, name: str = "iam-0"
) -> AsyncIterator[World]:
    """Starts an IAM on `state`; several may share it under different names."""
    ca = CertificateAuthority.open_or_create(state / "ca")
    async with AsyncExitStack() as stack:
        # Socket paths are short by law; pytest's folders are not.
        run = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="iam")))
        config = ServiceConfig(
            name=name,
            role="iam",
            node="local",
            state_dir=state,
            run_dir=run,
            listen=f"unix:{run}/{name}.sock",
            advertise=f"unix:{run}/{name}.sock",
            tls=False,
            identity=ca.issue(state / "id" / name, role="iam", name=name),
            metrics=MetricsConfig("127.0.0.1", 0, state / "metrics-token"),
        )
        identity = ServiceIdentity.load(config.identity)
        iam = await stack.enter_async_context(
            open_iam(state, parse_options(options or {}), identity, news=news)
        )
        server = RpcServer(config, identity, allowed=ALLOWED)
        iam.add_to(server.server)
        await server.start(SERVICES)
        await server.set_serving(True)
        world = World(state, server.address, iam, ca)
        try:
            yield world
        finally:
            for channel in world.channels.values():
                await channel.close(None)
            iam.directory.close()
            await server.stop(1.0)
