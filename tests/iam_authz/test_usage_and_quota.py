"""Metering and quota leases."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvmesh.v1 import iam_pb2

from iam_authz.quota import LEASE_S, SETTLE_S, Quotas
from mesh.errors import InvalidRequest, MeshError, NotFound, PermissionDenied, StaleHandle, from_rpc_error
from tests.iam_authz.test_policy import Bus
from tests.iam_authz.world import World, running_iam


def record(request_id: str = "r1", **changes: Any) -> iam_pb2.UsageRecord:
    fields: dict[str, Any] = {
        "request_id": request_id,
        "organisation": "acme",
        "credential": "k1",
        "model_asked": "m",
        "model_served": "m",
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "cached_tokens": 8,
        "outcome": "stop",
        "finished_unix_ms": 1_700_000_000_500,
    }
    return iam_pb2.UsageRecord(**fields | changes)


async def listed(world: World, **fields: Any) -> list[iam_pb2.UsageRecord]:
    return list((await world.admin.ListUsage(iam_pb2.ListUsageRequest(**fields))).records)


async def test_usage_is_stored_once_per_request_and_organisation(tmp_path: Path) -> None:
    bus = Bus()
    async with running_iam(tmp_path, news=bus) as world:
        assert bus.usage is not None
        store = bus.usage
        await store(record().SerializeToString())
        await store(record(completion_tokens=99).SerializeToString())
        await store(record(organisation="other").SerializeToString())
        await asyncio.gather(
            *(store(record(f"many-{number % 50}").SerializeToString()) for number in range(200))
        )
        found = await listed(world, organisation="acme")
        assert len(found) == 51
        assert [r for r in found if r.request_id == "r1"] == [record()]
        assert len(await listed(world)) == 52


async def test_what_cannot_be_usage_is_dropped_and_not_redelivered(tmp_path: Path) -> None:
    bus = Bus()
    async with running_iam(tmp_path, news=bus) as world:
        assert bus.usage is not None
        for bad in (
            b"",
            b"\xff\xff\xff",
            b"{}",
            record(request_id="").SerializeToString(),
            record(organisation="").SerializeToString(),
            record(request_id="x" * 300).SerializeToString(),
        ):
            await bus.usage(bad)
        assert await listed(world) == []


async def test_a_record_that_is_not_safe_is_not_acknowledged(tmp_path: Path) -> None:
    bus = Bus()
    async with running_iam(tmp_path, news=bus):
        pass
    assert bus.usage is not None
    with pytest.raises(MeshError):
        await bus.usage(record().SerializeToString())


async def test_usage_is_listed_from_a_time_on_in_order(tmp_path: Path) -> None:
    bus = Bus()
    async with running_iam(tmp_path, news=bus) as world:
        assert bus.usage is not None
        for second in (30, 10, 20):
            await bus.usage(record(f"r{second}", finished_unix_ms=second * 1_000).SerializeToString())
        assert [r.request_id for r in await listed(world)] == ["r10", "r20", "r30"]
        assert [r.request_id for r in await listed(world, since=20)] == ["r20", "r30"]
        assert await listed(world, since=31) == []


async def test_iam_runs_without_news(world: World) -> None:
    await world.organisation()
    assert await listed(world) == []


async def error_of(call: Awaitable[Any]) -> MeshError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return from_rpc_error(failed.value)


async def test_leases_are_real_and_unlimited(world: World) -> None:
    await world.organisation()

    def lease(**fields: Any) -> Awaitable[iam_pb2.QuotaLeaseResponse]:
        asked: dict[str, Any] = {"organisation": "acme", "model": "m", "tokens": 10**12} | fields
        return world.quota.Lease(iam_pb2.QuotaLeaseRequest(**asked))

    one, two = await lease(), await lease()
    assert one.lease_id != two.lease_id
    assert (one.tokens, one.expires_in_s) == (10**12, 60.0)
    settle = iam_pb2.SettleRequest(lease_id=one.lease_id, request_id="r", tokens=7)
    await world.quota.Settle(settle)
    await world.quota.Settle(settle)
    assert isinstance(await error_of(lease(organisation="no")), NotFound)
    assert isinstance(await error_of(lease(tokens=0)), InvalidRequest)
    assert isinstance(await error_of(lease(model="")), InvalidRequest)
    unknown = iam_pb2.SettleRequest(lease_id="x", request_id="r", tokens=7)
    assert isinstance(await error_of(world.quota.Settle(unknown)), StaleHandle)
    await world.admin.PutOrganisation(iam_pb2.PutOrganisationRequest(id="acme", suspended=True))
    assert isinstance(await error_of(lease()), PermissionDenied)


async def test_leases_end(world: World) -> None:
    await world.organisation()
    now = 0.0
    quotas = Quotas(world.iam.directory, clock=lambda: now)
    lease = quotas.lease("acme", "m", 10)
    now = LEASE_S + SETTLE_S - 1
    quotas.settle(lease.id, "late", 5)
    now = LEASE_S + SETTLE_S
    with pytest.raises(StaleHandle):
        quotas.settle(lease.id, "too late", 5)
