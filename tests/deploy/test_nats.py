"""What the real NATS server does with the file that `deploy.nats` makes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import nats.errors
import pytest
from nats.aio.client import Client

from deploy.nats import NatsServer, NatsUser, arguments, nats_binary, write_config
from tests.deploy.edge_lab import free_port

USERS = (
    NatsUser("alice", "secret-a", publish=("news.alice",), subscribe=("news.>",)),
    NatsUser("bob", "secret-b", publish=("news.bob",), subscribe=()),
)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    binary = nats_binary()
    assert binary is not None
    wanted = NatsServer("test", "127.0.0.1", free_port(), tmp_path / "store", USERS)
    config = tmp_path / "nats.conf"
    write_config(config, wanted)
    assert config.stat().st_mode & 0o777 == 0o600
    process = await asyncio.create_subprocess_exec(
        *arguments(binary, config), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(wanted.host, wanted.port)
            writer.close()
            break
        await asyncio.sleep(0.02)
    yield wanted
    process.kill()
    await process.wait()


async def connected(server: NatsServer, user: str, password: str, errors: asyncio.Queue[Exception]) -> Client:
    async def keep(error: Exception) -> None:
        errors.put_nowait(error)

    client = Client()
    try:
        await client.connect(
            f"nats://{server.host}:{server.port}",
            user=user,
            password=password,
            error_cb=keep,
            allow_reconnect=False,
            connect_timeout=5,
        )
    except BaseException:
        await client.close()
        raise
    return client


async def test_a_user_says_what_it_may_and_nothing_else(server: NatsServer) -> None:
    errors: asyncio.Queue[Exception] = asyncio.Queue()
    alice = await connected(server, "alice", "secret-a", errors)
    heard = await alice.subscribe("news.>")
    await alice.flush()
    bob = await connected(server, "bob", "secret-b", errors)
    await bob.publish("news.alice", b"forged")
    await bob.publish("news.bob", b"true")
    await bob.flush()
    assert (await heard.next_msg(timeout=5)).data == b"true"
    await bob.subscribe("news.>")
    await bob.flush()
    for what in ("publish", "subscription"):
        error = str(await asyncio.wait_for(errors.get(), 5)).lower()
        assert f"permissions violation for {what}" in error
    await alice.close()
    await bob.close()


@pytest.mark.parametrize(("user", "password"), [("alice", "wrong"), ("nobody", "secret-a"), ("", "")])
async def test_nobody_else_comes_in(server: NatsServer, user: str, password: str) -> None:
    with pytest.raises((nats.errors.Error, OSError)):
        await connected(server, user, password, asyncio.Queue())
