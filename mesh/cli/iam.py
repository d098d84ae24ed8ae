"""A line to IAM, and to the KV stores, as the operator.

Whoever can read the state directory is the operator: the CLI makes itself an
identity with that role from the state directory's own CA.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio
from kvmesh.v1 import iam_pb2_grpc, pages_pb2_grpc

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
        status, identity = await _operator(root)
        channel = open_channel(
            status["iam"], identity, callee_role="iam", tls=status["tls"], callee_name="iam-0"
        )
        async with channel:
            return await work(iam_pb2_grpc.AdminStub(channel))

    return _run(talk())


def at_every_store(
    root: Path, work: Callable[[pages_pb2_grpc.PagesAsyncStub], Awaitable[object]]
) -> list[str]:
    """Runs `work` with a connection to each KV store of the running mesh; their names."""

    async def talk() -> list[str]:
        status, identity = await _operator(root)
        stores = [process for process in status["processes"] if process["role"] == "kvstore"]
        for store in stores:
            channel = open_channel(
                store["address"],
                identity,
                callee_role="kvstore",
                tls=status["tls"],
                callee_name=store["name"],
            )
            async with channel:
                await work(pages_pb2_grpc.PagesStub(channel))
        return [store["name"] for store in stores]

    return _run(talk())


def _run(talk: Coroutine[Any, Any, _Answer]) -> _Answer:
    # The status is asked for before gRPC runs in this process.
    try:
        return asyncio.run(talk)
    except grpc.aio.AioRpcError as error:
        raise Failure(str(from_rpc_error(error))) from None


async def _operator(root: Path) -> tuple[Mapping[str, Any], ServiceIdentity]:
    """What runs, and an identity to talk to it."""
    state = running_state(root)
    status = await asyncio.to_thread(status_of, state)
    try:
        authority = CertificateAuthority.open_or_create(state.ca)
        files = authority.issue(state.identities, role=OPERATOR, name=OPERATOR, days=1)
        return status, ServiceIdentity.load(files)
    except (CaError, OSError) as error:
        raise Failure(f"no operator's identity can be made: {error}") from None
