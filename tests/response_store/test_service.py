"""Kept responses: whose they are, how long they stay, who works on them."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from kvmesh.v1 import responses_pb2 as pb

from mesh.config import ConfigError
from response_store.options import shelf_options
from tests.response_store.shop import Shop, shop

RUNNING = pb.RESPONSE_STATE_RUNNING


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvm") as name:
        yield Path(name)


@pytest.fixture
async def kept(path: Path) -> AsyncIterator[Shop]:
    async with shop(path) as made:
        yield made


async def status(call: object) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call  # type: ignore[misc]
    code: grpc.StatusCode = refused.value.code()
    return code


async def test_what_is_put_is_there_for_its_organisation_alone(kept: Shop) -> None:
    await kept.put("resp_1", response=b'{"a":1}', input_items=b"[2]", created_unix_s=4 * 10**9)
    record = await kept.get("resp_1")
    assert (record.response, record.input_items) == (b'{"a":1}', b"[2]")
    assert record.state == pb.RESPONSE_STATE_ENDED
    assert await status(kept.get("resp_1", "beta")) is grpc.StatusCode.NOT_FOUND
    request = pb.DeleteRequest(capability=kept.capability("beta"), id="resp_1")
    assert await status(kept.stub.Delete(request)) is grpc.StatusCode.NOT_FOUND
    assert await status(kept.put("resp_1", "beta")) is grpc.StatusCode.ABORTED
    request = pb.DeleteRequest(capability=kept.capability(), id="resp_1")
    await kept.stub.Delete(request)
    assert await status(kept.get("resp_1")) is grpc.StatusCode.NOT_FOUND
    assert await status(kept.stub.Delete(request)) is grpc.StatusCode.NOT_FOUND


async def test_only_routers_and_only_with_a_capability_for_this(path: Path, kept: Shop) -> None:
    for capability in ("", "x", kept.identity.mint({"org": "acme"}, audience="data", ttl_s=60)):
        answer = kept.stub.Get(pb.GetRequest(capability=capability, id="resp_1"))
        assert await status(answer) is grpc.StatusCode.UNAUTHENTICATED
    nobody = kept.identity.mint({}, audience="responses", ttl_s=60)
    assert await status(kept.stub.Get(pb.GetRequest(capability=nobody))) is grpc.StatusCode.PERMISSION_DENIED


async def test_other_roles_are_turned_away(path: Path) -> None:
    async with shop(path, role="decode") as other:
        assert await status(other.get("resp_1")) is grpc.StatusCode.PERMISSION_DENIED


async def test_a_conversation_is_read_back_to_its_beginning(kept: Shop) -> None:
    for number in range(5):
        await kept.put(f"resp_{number}", previous_id=f"resp_{number - 1}" if number else "")
    request = pb.ChainRequest(capability=kept.capability(), id="resp_4")
    found = [answer.record.id async for answer in kept.stub.Chain(request)]
    assert found == [f"resp_{number}" for number in (4, 3, 2, 1, 0)]
    await kept.stub.Delete(pb.DeleteRequest(capability=kept.capability(), id="resp_2"))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        [answer async for answer in kept.stub.Chain(request)]
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_responses_survive_the_process_and_age(path: Path) -> None:
    now = int(time.time())
    async with shop(path, ttl_s=1000) as kept:
        await kept.put("young", created_unix_s=now)
        await kept.put("old", created_unix_s=now - 1000)
        assert await status(kept.get("old")) is grpc.StatusCode.NOT_FOUND
        assert oct((path / "responses" / "responses.sqlite").stat().st_mode & 0o777) == "0o600"
    async with shop(path, ttl_s=1000) as kept:
        assert (await kept.get("young")).id == "young"
        assert await status(kept.get("old")) is grpc.StatusCode.NOT_FOUND


async def test_what_is_gone_is_erased_on_disk_without_being_asked_for(path: Path) -> None:
    def held() -> bool:
        files = (path / "responses").glob("responses.sqlite*")
        return any(b"a secret text" in file.read_bytes() for file in files)

    async with shop(path, ttl_s=2) as kept:
        await kept.put("resp_1", response=b"a secret text" * 1000)
        assert held()
        await kept.stub.Delete(pb.DeleteRequest(capability=kept.capability(), id="resp_1"))
        assert not held()
        await kept.put("resp_2", response=b"a secret text" * 1000, created_unix_s=int(time.time()))
        async with asyncio.timeout(20):
            while held():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
    assert not held()


async def test_an_organisation_loses_its_own_oldest_and_nobody_elses(path: Path) -> None:
    body = bytes(10_000)
    async with shop(path, organisation_bytes=35_000, total_bytes=60_000) as kept:
        await kept.put("other", "beta", response=body, created_unix_s=4 * 10**9)
        for number in range(4):
            await kept.put(f"resp_{number}", response=body, created_unix_s=4 * 10**9 + 1 + number)
        assert await status(kept.get("resp_0")) is grpc.StatusCode.NOT_FOUND
        for number in (1, 2, 3):
            await kept.get(f"resp_{number}")
        await kept.get("other", "beta")
        assert await status(kept.put("large", response=bytes(40_000))) is grpc.StatusCode.OUT_OF_RANGE
        await kept.put("third", "gamma", response=body)
        refused = kept.put("fourth", "delta", response=body)
        assert await status(refused) is grpc.StatusCode.UNAVAILABLE


async def test_a_running_response_ends_once(kept: Shop) -> None:
    await kept.put("resp_1", state=RUNNING, background=True)
    await kept.put("resp_1", background=True, response=b"{1}")
    assert (await kept.get("resp_1")).response == b"{1}"
    assert await status(kept.put("resp_1", background=True)) is grpc.StatusCode.ABORTED
    assert await status(kept.put("resp_1", state=RUNNING, background=True)) is grpc.StatusCode.ABORTED
    assert await status(kept.put("gone", background=True)) is grpc.StatusCode.ABORTED


async def test_cancelling_reaches_the_holder_and_lasts(kept: Shop) -> None:
    await kept.put("resp_1", state=RUNNING, background=True)
    hold = kept.stub.Hold(pb.HoldRequest(capability=kept.capability(), id="resp_1"))
    assert not (await hold.read()).cancelled
    second = kept.stub.Hold(pb.HoldRequest(capability=kept.capability(), id="resp_1"))
    assert await status(second.read()) is grpc.StatusCode.ABORTED
    request = pb.CancelRequest(capability=kept.capability(), id="resp_1")
    answer = await kept.stub.Cancel(request)
    assert answer.record.state == pb.RESPONSE_STATE_CANCELLED
    assert (await hold.read()).cancelled
    hold.cancel()
    assert await status(kept.put("resp_1", background=True)) is grpc.StatusCode.ABORTED
    assert (await kept.stub.Cancel(request)).record.state == pb.RESPONSE_STATE_CANCELLED
    await kept.put("resp_2")
    request = pb.CancelRequest(capability=kept.capability(), id="resp_2")
    assert await status(kept.stub.Cancel(request)) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_response_whose_worker_is_lost_is_lost(path: Path) -> None:
    async with shop(path) as kept:
        for name in ("resp_1", "resp_2"):
            await kept.put(name, state=RUNNING, background=True)
        hold = kept.stub.Hold(pb.HoldRequest(capability=kept.capability(), id="resp_1"))
        await hold.read()
        hold.cancel()
        async with asyncio.timeout(20):
            while (await kept.get("resp_1")).state != pb.RESPONSE_STATE_LOST:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await kept.get("resp_2")).state == RUNNING
    async with shop(path) as kept:
        assert (await kept.get("resp_2")).state == pb.RESPONSE_STATE_LOST


@pytest.mark.parametrize("options", [{"ttl_s": 0}, {"total_bytes": "1G"}, {"size": 5}])
def test_a_wrong_option_is_named(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        shelf_options(options)
