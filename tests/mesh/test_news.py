"""News over a real NATS server, which comes and goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from mesh.members import (
    FORGOTTEN_AFTER_S,
    STALE_AFTER_S,
    Announcement,
    Member,
    Roster,
    decode_announcement,
    encode_announcement,
)
from mesh.nats_permissions import TABLE, permissions
from mesh.news import Load, News

DECODE = Member("decode-tiny-0", "decode", "node0", "unix:/d", model="tiny", capacity=4, extra={"a": "b"})


class Picture:
    """What a watcher was last told; `until` waits for a state of it."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.calls = 0
        self._changed = asyncio.Condition()

    async def __call__(self, members: dict[str, Member]) -> None:
        async with self._changed:
            self.members = members
            self.calls += 1
            self._changed.notify_all()

    async def until(self, holds: Callable[[dict[str, Member]], bool]) -> None:
        async with asyncio.timeout(15), self._changed:
            await self._changed.wait_for(lambda: holds(self.members))


Open = Callable[[str], Awaitable[News]]


@pytest.fixture
async def opened(nats: Any) -> AsyncIterator[Open]:
    """Opens the news of a service; closes all at the end."""
    async with AsyncExitStack() as stack:

        async def start(name: str) -> News:
            news = News(nats.config(name), name=name)
            await news.start()
            stack.push_async_callback(news.close)
            return news

        yield start


async def received(news: News, subject: str) -> asyncio.Queue[tuple[str, bytes]]:
    queue: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
    await news.subscribe(subject, lambda subject, data: queue.put_nowait((subject, data)))
    return queue


async def test_members_appear_change_and_leave(nats: Any, opened: Open) -> None:
    nats.users = {"router-0": "router", "decode-tiny-0": "decode"}
    await nats.start()
    router, decode = await opened("router-0"), await opened("decode-tiny-0")
    picture = Picture()
    await router.watch_members(picture)
    await decode.announce(DECODE)
    await picture.until(lambda members: "decode-tiny-0" in members)
    seen = picture.members["decode-tiny-0"]
    assert seen == replace(DECODE, incarnation=seen.incarnation)
    assert seen.incarnation
    await decode.update(replace(DECODE, ready=True))
    await picture.until(lambda members: members["decode-tiny-0"].ready)
    await decode.close()
    await picture.until(lambda members: not members)


async def test_a_late_watcher_knows_everyone_at_once(nats: Any, opened: Open) -> None:
    nats.users = {"router-0": "router", "decode-tiny-0": "decode"}
    await nats.start()
    decode = await opened("decode-tiny-0")
    await decode.announce(DECODE)
    await decode.wait_connected()
    router = await opened("router-0")
    await router.wait_connected()
    picture, started = Picture(), time.monotonic()
    await router.watch_members(picture)
    await picture.until(lambda members: "decode-tiny-0" in members)
    assert time.monotonic() - started < 2


async def test_names_with_dots_work(nats: Any, opened: Open) -> None:
    name = "decode-qwen2.5-0"
    nats.users = {"router-0": "router", name: "decode"}
    await nats.start()
    router, decode = await opened("router-0"), await opened(name)
    picture = Picture()
    loads: asyncio.Queue[tuple[str, Load]] = asyncio.Queue()
    await router.watch_members(picture)
    await router.subscribe_load(lambda worker, load: loads.put_nowait((worker, load)))
    await router.wait_connected()
    await decode.announce(replace(DECODE, name=name))
    await picture.until(lambda members: name in members)
    await decode.publish_load(name, Load(queue=3, step_ms=1.5))
    assert await asyncio.wait_for(loads.get(), 10) == (name, Load(queue=3, step_ms=1.5))


async def test_a_silent_member_is_stale_until_it_speaks(
    nats: Any, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.members.STALE_AFTER_S", 0.2)
    monkeypatch.setattr("mesh.news.HEARTBEAT_S", 0.6)
    nats.users = {"router-0": "router", "decode-tiny-0": "decode"}
    await nats.start()
    router, decode = await opened("router-0"), await opened("decode-tiny-0")
    picture = Picture()
    await router.watch_members(picture)
    await decode.announce(DECODE)
    await picture.until(lambda members: "decode-tiny-0" in members and members["decode-tiny-0"].stale)
    await picture.until(lambda members: not members["decode-tiny-0"].stale)


async def test_a_killed_nats_changes_nothing_and_everything_comes_back(nats: Any, opened: Open) -> None:
    nats.users = {"router-0": "router", "decode-tiny-0": "decode", "decode-tiny-1": "decode"}
    await nats.start()
    router, decode = await opened("router-0"), await opened("decode-tiny-0")
    picture = Picture()
    await router.watch_members(picture)
    await decode.announce(DECODE)
    await picture.until(lambda members: "decode-tiny-0" in members)
    calls = picture.calls
    await nats.kill()
    assert not await router.publish("mesh.suspect.x", b"")
    # A service that starts without NATS is not held up.
    late = await opened("decode-tiny-1")
    await late.announce(replace(DECODE, name="decode-tiny-1"))
    await decode.announce(replace(DECODE, ready=True))
    assert not router.connected
    assert picture.calls == calls
    assert "decode-tiny-0" in picture.members
    await nats.start()
    await picture.until(lambda members: len(members) == 2 and members["decode-tiny-0"].ready)


async def test_a_user_may_only_speak_for_itself(nats: Any, opened: Open) -> None:
    nats.users = {"router-0": "router", "decode-tiny-0": "decode", "iam-0": "iam", "kvstore-0": "kvstore"}
    await nats.start()
    router = await opened("router-0")
    heard = [
        await received(router, subject)
        for subject in ("mesh.members.>", "mesh.load.>", "kv.events.>", "iam.policy")
    ]
    decode, iam, store = await opened("decode-tiny-0"), await opened("iam-0"), await opened("kvstore-0")
    for news in (router, decode, iam, store):
        await news.wait_connected()
    for news, subject in [
        (decode, "mesh.members.decode-tiny-1"),
        (decode, "mesh.load.decode-tiny-1"),
        (decode, "kv.events.node0"),
        (decode, "iam.policy"),
        (decode, "mesh.suspect.decode-tiny-1"),
        (decode, "usage.records"),
        (store, "iam.policy"),
        (store, "kv.events.node1"),
        (router, "iam.policy"),
        (router, "kv.events.node0"),
        (iam, "mesh.load.iam-0"),
    ]:
        await news.publish(subject, b"forged")
    # What is allowed, last: on one connection the order is kept.
    await decode.publish("mesh.load.decode-tiny-0", b"true")
    await store.publish("kv.events.node0", b"true")
    await iam.publish("iam.policy", b"true")
    await router.publish("mesh.members.router-0", b"true")
    for queue in heard:
        async with asyncio.timeout(10):
            assert (await queue.get())[1] == b"true"


async def test_a_worker_hears_nothing_of_others(nats: Any, opened: Open) -> None:
    nats.users = {"decode-tiny-0": "decode", "kvstore-0": "kvstore", "supervisor": "supervisor"}
    await nats.start()
    decode, store = await opened("decode-tiny-0"), await opened("kvstore-0")
    await decode.wait_connected()
    everything = [await received(decode, subject) for subject in (">", "kv.events.>", "_INBOX.>", "$JS.>")]
    allowed = await received(decode, "mesh.members_query")
    await store.wait_connected()
    await store.publish("kv.events.node0", b"secret")
    supervisor = await opened("supervisor")
    await supervisor.watch_members(Picture())
    await asyncio.wait_for(allowed.get(), 10)
    assert all(queue.empty() for queue in everything)


async def test_a_stranger_is_not_let_in(nats: Any, opened: Open) -> None:
    nats.users = {"router-0": "router"}
    await nats.start()
    stranger = await opened("decode-tiny-0")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stranger.wait_connected(), 0.5)


async def test_over_tls_a_certificate_of_the_mesh_is_needed_too(nats: Any, site: Any) -> None:
    nats.users = {"router-0": "router"}
    nats.tls = site.ca.issue(site.path / "id", role="nats", name="nats-0")
    await nats.start()
    identity = site.ca.issue(site.path / "id", role="router", name="router-0")
    router = News(nats.config("router-0"), name="router-0", identity=identity)
    bare = News(nats.config("router-0"), name="router-0")
    async with AsyncExitStack() as stack:
        for news in (router, bare):
            await news.start()
            stack.push_async_callback(news.close)
        await asyncio.wait_for(router.wait_connected(), 10)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(bare.wait_connected(), 0.5)


@asynccontextmanager
async def usage_consumer(opened: Open) -> AsyncIterator[asyncio.Queue[bytes]]:
    iam = await opened("iam-0")
    records: asyncio.Queue[bytes] = asyncio.Queue()
    await iam.consume_usage(records.put)
    yield records
    await iam.close()


async def acknowledged(router: News, record: bytes, msg_id: str) -> None:
    async with asyncio.timeout(20):
        while not await router.publish_usage(record, msg_id):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_usage_is_stored_once_and_waits_for_iam(nats: Any, opened: Open) -> None:
    nats.users = {"router-0": "router", "iam-0": "iam"}
    await nats.start()
    router = await opened("router-0")
    await router.wait_connected()
    assert not await router.publish_usage(b"too early", "r0")
    async with usage_consumer(opened) as records:
        await acknowledged(router, b"first", "r1")
        await acknowledged(router, b"first", "r1")
        await acknowledged(router, b"second", "r2")
        assert await asyncio.wait_for(records.get(), 10) == b"first"
        assert await asyncio.wait_for(records.get(), 10) == b"second"
    # IAM is away: the stream keeps it, also over a kill of NATS.
    await acknowledged(router, b"third", "r3")
    await nats.kill()
    assert not await router.publish_usage(b"lost?", "r4")
    await nats.start()
    async with usage_consumer(opened) as records:
        assert await asyncio.wait_for(records.get(), 20) == b"third"


async def test_a_record_that_iam_could_not_store_comes_again(
    nats: Any, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.news.RETRY_S", 0.05)
    nats.users = {"router-0": "router", "iam-0": "iam"}
    await nats.start()
    iam, router = await opened("iam-0"), await opened("router-0")
    tries: asyncio.Queue[bytes] = asyncio.Queue()

    async def fail_once(record: bytes) -> None:
        first = tries.empty() and not hasattr(tries, "seen")
        tries.seen = True  # type: ignore[attr-defined]
        tries.put_nowait(record)
        if first:
            raise OSError("disk full")

    await iam.consume_usage(fail_once)
    await acknowledged(router, b"record", "r1")
    async with asyncio.timeout(10):
        assert [await tries.get(), await tries.get()] == [b"record", b"record"]


# The roster, without a server


def heard(member: Member, *, left: bool = False) -> Announcement:
    return Announcement(member, left)


def test_silence_makes_stale_then_forgotten() -> None:
    roster = Roster()
    assert roster.hear(heard(DECODE), 0)
    assert not roster.hear(heard(DECODE), 5)
    assert not roster.age(5 + STALE_AFTER_S - 0.01)
    assert roster.next_age() == 5 + STALE_AFTER_S
    assert roster.age(5 + STALE_AFTER_S)
    assert roster.members()["decode-tiny-0"].stale
    assert roster.next_age() == 5 + FORGOTTEN_AFTER_S
    assert roster.hear(heard(DECODE), 25)
    assert not roster.members()["decode-tiny-0"].stale
    assert roster.age(25 + FORGOTTEN_AFTER_S)
    assert roster.members() == {}
    assert roster.next_age() is None


def test_silence_without_a_server_does_not_count() -> None:
    roster = Roster()
    roster.hear(heard(DECODE), 0)
    roster.excuse(1000)
    assert not roster.age(1000 + STALE_AFTER_S - 0.01)
    assert roster.age(1000 + STALE_AFTER_S)


def test_a_late_goodbye_does_not_remove_the_successor() -> None:
    roster = Roster()
    old, new = replace(DECODE, incarnation="1"), replace(DECODE, incarnation="2")
    roster.hear(heard(old), 0)
    roster.hear(heard(new), 1)
    assert not roster.hear(heard(old, left=True), 2)
    assert roster.hear(heard(new, left=True), 3)
    assert roster.members() == {}


@pytest.mark.parametrize(
    ("subject", "data"),
    [
        ("mesh.members.decode-tiny-0", b""),
        ("mesh.members.decode-tiny-0", b"{"),
        ("mesh.members.decode-tiny-0", b'{"member":{"name":"decode-tiny-0"}}'),
        ("mesh.members.decode-tiny-1", encode_announcement(DECODE)),
    ],
)
def test_a_malformed_or_forged_announcement_is_none(subject: str, data: bytes) -> None:
    assert decode_announcement(subject, data) is None


def test_every_role_has_rules_and_none_may_do_everything() -> None:
    for role in TABLE:
        rules = permissions(role, name="x-0", node="node0")
        subjects = (*rules.publish, *rules.subscribe)
        assert not {">", "*", "_INBOX.>", "$JS.>", "$JS.API.>", "$SYS.>"}.intersection(subjects)
        assert not any("{" in subject for subject in subjects)
    may_publish_policy = [role for role, rules in TABLE.items() if "iam.policy" in rules.publish]
    assert may_publish_policy == ["iam"]


async def test_closing_at_any_moment_of_connecting_ends(nats: Any) -> None:
    nats.users = {"router-0": "router"}
    await nats.start()
    for turns in range(80):
        news = News(nats.config("router-0"), name="router-0")
        await news.subscribe("iam.policy", lambda subject, data: None)
        await news.start()
        for _ in range(turns):
            await asyncio.sleep(0)
        await asyncio.wait_for(news.close(), 10)
        assert not news.connected


async def test_a_slow_listener_holds_up_nobody_else_and_loses_nothing(
    nats: Any, opened: Open
) -> None:  # B106
    nats.users = {"router-0": "router", "decode-tiny-0": "decode", "kvstore-0": "kvstore"}
    await nats.start()
    router, decode, store = await opened("router-0"), await opened("decode-tiny-0"), await opened("kvstore-0")
    await router.wait_connected()
    go_on = asyncio.Event()
    slow: list[bytes] = []
    quick: list[int] = []
    done = asyncio.Event()

    async def slowly(subject: str, data: bytes) -> None:
        await go_on.wait()
        slow.append(data)

    def quickly(worker: str, load: Load) -> None:
        quick.append(load.queue)
        if load.queue == 9_999:
            done.set()

    await router.subscribe("kv.events.>", slowly)
    await router.subscribe_load(quickly)
    await decode.wait_connected()
    await store.wait_connected()
    for number in range(200):
        assert await store.publish("kv.events.node0", b"%d" % number)
    for number in range(10_000):
        await decode.publish_load("decode-tiny-0", Load(queue=number))
    await asyncio.wait_for(done.wait(), 30)
    assert quick == list(range(10_000))
    assert slow == []
    go_on.set()
    async with asyncio.timeout(30):
        while len(slow) < 200:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert slow == [b"%d" % number for number in range(200)]
