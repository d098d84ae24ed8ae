"""Over a real NATS server, with the permissions that services really have."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from kvmesh.v1 import iam_pb2

from deploy import nats as deploy_nats
from mesh.config import NatsConfig
from mesh.nats_permissions import permissions
from mesh.news import News
from tests.iam_authz.test_policy import Watch
from tests.iam_authz.test_usage_and_quota import listed, record
from tests.iam_authz.world import running_iam

USERS = {"iam-0": "iam", "iam-1": "iam", "router-0": "router"}


@asynccontextmanager
async def nats_server(folder: Path, port: int) -> AsyncIterator[None]:
    binary = deploy_nats.nats_binary()
    if binary is None:
        pytest.skip("nats-server is not installed")
    users = []
    for name, role in USERS.items():
        rules = permissions(role, name=name, node="local")
        users.append(deploy_nats.NatsUser(name, f"pw {name}", rules.publish, rules.subscribe))
    config = folder / "nats.conf"
    server = deploy_nats.NatsServer("test", "127.0.0.1", port, folder / "nats", users)
    deploy_nats.write_config(config, server)
    process = await asyncio.create_subprocess_exec(
        *deploy_nats.arguments(binary, config),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        async with asyncio.timeout(10):
            async for line in process.stderr:
                if b"Server is ready" in line:
                    break
        yield
    finally:
        process.kill()
        await process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def news(name: str, port: int, *, connected: bool = True) -> AsyncIterator[News]:
    link = News(NatsConfig(f"nats://127.0.0.1:{port}", name, f"pw {name}"), name=name)
    await link.start()
    try:
        if connected:
            async with asyncio.timeout(10):
                await link.wait_connected()
        yield link
    finally:
        await link.close()


async def eventually(true: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(500):
        if await true():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("not in 10 s")


async def test_hints_and_usage_pass_a_real_server(tmp_path: Path) -> None:
    port = free_port()
    async with (
        nats_server(tmp_path, port),
        news("iam-0", port) as first_news,
        news("iam-1", port) as second_news,
        news("router-0", port) as router,
        running_iam(tmp_path, name="iam-0", news=first_news) as first,
        running_iam(tmp_path, name="iam-1", news=second_news) as second,
    ):
        watch = Watch(second)
        await watch.next()
        # The watcher's own subscription must have reached the server.
        await second_news._link.flush()
        await first.organisation()
        pushed = await watch.until(lambda policy: bool(policy.grants))
        assert pushed.organisations[0].id == "acme"

        for number in (1, 2, 2):
            sent, message_id = record(f"r{number}").SerializeToString(), f"r{number}"
            # Until the stream is made a record is not accepted.
            await eventually(partial(router.publish_usage, sent, message_id))

        async def both_are_stored() -> bool:
            return len(await listed(first)) >= 2

        await eventually(both_are_stored)
        assert {r.request_id for r in await listed(second)} == {"r1", "r2"}


async def test_iam_works_while_nats_is_away_and_catches_up(tmp_path: Path) -> None:
    port = free_port()
    async with (
        news("iam-0", port, connected=False) as away,
        news("iam-1", port, connected=False) as away_too,
        running_iam(tmp_path, name="iam-0", news=away) as first,
        running_iam(tmp_path, name="iam-1", news=away_too) as second,
    ):
        await first.organisation()
        created = await first.key()
        assert (await first.check(f"Bearer {created.secret}")).status.code == 0
        watch = Watch(second)
        await watch.next()
        async with nats_server(tmp_path, port), asyncio.timeout(10):
            # The connect itself is the hint: what was missed is looked up.
            stream = watch.rest()
            async for policy in stream:
                if policy.organisations:
                    break
            assert policy.organisations[0].id == "acme"
        await first.admin.RevokeKey(iam_pb2.RevokeKeyRequest(id=created.key.id))
        assert (await first.check(f"Bearer {created.secret}")).status.code != 0
