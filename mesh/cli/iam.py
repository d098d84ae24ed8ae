"""A line to IAM as the operator.

Whoever can read the state directory is the operator: the CLI makes itself an
identity with that role from the state directory's own CA.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import grpc.aio
from kvmesh.v1 import iam_pb2_grpc

from mesh.ca import CaError, CertificateAuthority
from mesh.cli.failure import Failure
from mesh.cli.running import running_state, status_of
from mesh.errors import from_rpc_error
from mesh.identity import ServiceIdentity
from mesh.rpc import open_channel

OPERATOR = "operator"
CALL_TIMEOUT_S = 10.0
_Answer = TypeVar("_Answer")


def as_operator(root: Path, work: Callable[[iam_pb2_grpc.AdminAsyncStub], Awaitable[_Answer]]) -> _Answer:
    """Runs `work` with a connection to the running mesh's IAM; Failure with IAM's own reason."""

    async def talk() -> _Answer:
        async with _admin(root) as admin:
            return await work(admin)

    # The status is asked for before gRPC runs in this process.
    try:
        return asyncio.run(talk())
    except grpc.aio.AioRpcError as error:
        raise Failure(str(from_rpc_error(error))) from None


@contextlib.asynccontextmanager
async def _admin(root: Path) -> AsyncIterator[iam_pb2_grpc.AdminAsyncStub]:
    state = running_state(root)
    status = await asyncio.to_thread(status_of, state)
    try:
        authority = CertificateAuthority.open_or_create(state.ca)
        identity = ServiceIdentity.load(
            authority.issue(state.identities, role=OPERATOR, name=OPERATOR, days=1)
        )
    except (CaError, OSError) as error:
        raise Failure(f"no operator's identity can be made: {error}") from None
    channel = open_channel(status["iam"], identity, callee_role="iam", tls=status["tls"], callee_name="iam-0")
    async with channel:
        yield iam_pb2_grpc.AdminStub(channel)
