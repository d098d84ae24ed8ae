"""All parts of one IAM process, put together."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
from kvmesh.extern import ext_authz_pb2_grpc
from kvmesh.v1 import iam_pb2_grpc
from prometheus_client import CollectorRegistry

from iam_authz import tables
from iam_authz.authenticate import Authenticator
from iam_authz.bearer import BearerVerifier
from iam_authz.bootstrap import bootstrap
from iam_authz.database import Database
from iam_authz.directory import Directory
from iam_authz.hints import News, PolicyHints, consume_usage
from iam_authz.identity import IdentityMint
from iam_authz.jwks import Jwks
from iam_authz.last_used import LastUsed
from iam_authz.metrics import IamMetrics
from iam_authz.options import IamOptions
from iam_authz.pepper import Pepper
from iam_authz.quota import Quotas
from iam_authz.registry import Registry
from iam_authz.service.admin import AdminServicer
from iam_authz.service.check import CheckServicer
from iam_authz.service.identity import IdentityServicer
from iam_authz.service.policy import PolicyServicer
from iam_authz.service.quota import QuotaServicer
from iam_authz.usage import UsageLedger
from mesh.identity import ServiceIdentity

# Who may call what; everything else is refused by the server.
ALLOWED: Mapping[str, Collection[str]] = {
    "/envoy.service.auth.v3.Authorization/": ("edge",),
    "/kvmesh.v1.Identity/": ("router",),
    "/kvmesh.v1.Policy/": ("router",),
    "/kvmesh.v1.Quota/": ("router",),
    "/kvmesh.v1.Admin/": ("operator",),
}
SERVICES = (
    "envoy.service.auth.v3.Authorization",
    "kvmesh.v1.Identity",
    "kvmesh.v1.Policy",
    "kvmesh.v1.Quota",
    "kvmesh.v1.Admin",
)


@dataclass(frozen=True, slots=True)
class Iam:
    """Made by `open_iam`."""

    directory: Directory
    registry: Registry
    authenticator: Authenticator
    mint: IdentityMint
    usage: UsageLedger
    quotas: Quotas
    last_used: LastUsed
    metrics: IamMetrics

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds every servicer."""
        check = CheckServicer(self.authenticator, self.mint, self.metrics)
        ext_authz_pb2_grpc.add_AuthorizationServicer_to_server(check, server)
        identity = IdentityServicer(self.authenticator, self.mint, self.metrics)
        iam_pb2_grpc.add_IdentityServicer_to_server(identity, server)
        iam_pb2_grpc.add_PolicyServicer_to_server(PolicyServicer(self.directory, self.metrics), server)
        iam_pb2_grpc.add_QuotaServicer_to_server(QuotaServicer(self.quotas), server)
        iam_pb2_grpc.add_AdminServicer_to_server(AdminServicer(self.registry, self.usage), server)


@asynccontextmanager
async def open_iam(
    state_dir: Path,
    options: IamOptions,
    identity: ServiceIdentity,
    *,
    metrics: CollectorRegistry | None = None,
    news: News | None = None,
) -> AsyncIterator[Iam]:
    """Everything in `<state_dir>/iam/`. Stop the gRPC server before leaving the context.

    Raises SchemaError, PepperError, MeshError or OSError when it cannot start.
    """
    folder = state_dir / "iam"
    counted = IamMetrics(metrics or CollectorRegistry())
    database = await Database.open(folder / "iam.db")
    keys = {issuer.issuer: (issuer, Jwks(issuer, on_fetch=counted.fetched)) for issuer in options.issuers}
    last_used = LastUsed(database)
    try:
        pepper = await asyncio.to_thread(_pepper, folder, await database.read(_is_bound))
        directory = Directory(database)
        counted.policy_version.set_function(lambda: directory.snapshot.version)
        hints = PolicyHints(news)
        registry = Registry(database, directory, pepper, announce=hints.announce)
        await registry.open()
        if options.bootstrap is not None:
            await bootstrap(options.bootstrap, registry, directory, pepper, folder / "bootstrap.lock")
        usage = UsageLedger(database)
        await hints.listen(directory)
        if news is not None:
            await consume_usage(news, usage, counted)
        yield Iam(
            directory=directory,
            registry=registry,
            authenticator=Authenticator(directory, pepper, BearerVerifier(keys), last_used),
            mint=IdentityMint(identity),
            usage=usage,
            quotas=Quotas(directory),
            last_used=last_used,
            metrics=counted,
        )
    finally:
        for _, jwks in keys.values():
            await jwks.close()
        await last_used.flush()
        await database.close()


def _is_bound(connection: sqlite3.Connection) -> bool:
    return tables.pepper_fingerprint(connection) is not None


def _pepper(folder: Path, bound: bool) -> Pepper:
    # A database that was used with a pepper never gets a new one silently.
    return Pepper.load(folder / "pepper", create=not bound)
