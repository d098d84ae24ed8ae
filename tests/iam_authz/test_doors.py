"""Every rpc of every service is shut to whoever has no business there, new ones included."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc
from kvmesh.extern import ext_authz_pb2
from kvmesh.v1 import iam_pb2

from iam_authz.iam import ALLOWED, SERVICES
from tests.iam_authz.world import World

ROLES = ("router", "edge", "operator", "prefill", "decode", "kvstore", "iam", "supervisor")


def methods() -> Iterator[tuple[str, bool]]:
    for file in (iam_pb2.DESCRIPTOR, ext_authz_pb2.DESCRIPTOR):
        for service in file.services_by_name.values():
            assert service.full_name in SERVICES
            for method in service.methods:
                yield f"/{service.full_name}/{method.name}", method.server_streaming
    yield "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", True
    yield "/kvmesh.v1.Admin/NoSuchMethod", False


async def answer(channel: grpc.aio.Channel, method: str, streams: bool) -> grpc.StatusCode:
    async def call() -> None:
        if method.startswith("/grpc.reflection"):
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            async for _ in stub.ServerReflectionInfo(iter(())):
                pass
        elif streams:
            async for _ in channel.unary_stream(method, None, None)(b""):
                return
        else:
            await channel.unary_unary(method, None, None)(b"")

    try:
        await call()
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_every_service_has_a_rule() -> None:
    assert set(ALLOWED) == {f"/{name}/" for name in SERVICES}


async def test_only_its_own_roles_may_call(world: World) -> None:
    async with grpc.aio.insecure_channel(world.address) as anonymous:
        for method, streams in methods():
            allowed = ALLOWED.get(method[: method.rfind("/") + 1], ("operator",))
            assert await answer(anonymous, method, streams) is grpc.StatusCode.UNAUTHENTICATED, method
            for role in ROLES:
                code = await answer(world.channel(role), method, streams)
                denied = code is grpc.StatusCode.PERMISSION_DENIED
                assert denied == (role not in allowed), (method, role, code)
