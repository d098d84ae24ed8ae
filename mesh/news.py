"""What services tell each other without being asked: members, load, events, usage.

NATS carries news and never the only copy of anything that an answer needs. A
missing NATS never stops a service: announcements are repeated when it is back,
watchers keep what they last knew, and `connected` says so. This module does not
know what the events mean.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from nats import errors as nats_errors
from nats.aio.msg import Msg
from nats.js import api
from nats.js import errors as js_errors

from mesh.config import NatsConfig
from mesh.identity import KeyFiles
from mesh.members import HEARTBEAT_S, Member, Roster, decode_announcement, encode_announcement
from mesh.nats_link import NatsLink
from mesh.nats_permissions import (
    LOAD,
    MEMBERS,
    MEMBERS_QUERY,
    USAGE,
    USAGE_CONSUMER,
    USAGE_DELIVER,
    USAGE_STREAM,
)

__all__ = ["Load", "Member", "News"]

log = logging.getLogger(__name__)

# Several watchers that start at once are answered once.
QUERY_DEBOUNCE_S = 0.02
USAGE_ACK_TIMEOUT_S = 5.0
USAGE_ACK_WAIT_S = 30.0
USAGE_DUPLICATES_S = 600.0
USAGE_LIMIT_BYTES = 64 * 1024 * 1024
RETRY_S = 2.0
USAGE_SETUP_ATTEMPTS = 100


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a worker is. `step_ms` is the time of its last steps, smoothed."""

    queue: int = 0
    running: int = 0
    waiting: int = 0
    active_tokens: int = 0
    free_pages: int = 0
    step_ms: float = 0.0


_encode = msgspec.json.Encoder().encode
_decode_load = msgspec.json.Decoder(Load).decode

OnChange = Callable[[dict[str, Member]], Awaitable[None] | None]
OnLoad = Callable[[str, Load], Awaitable[None] | None]
OnMessage = Callable[[str, bytes], Awaitable[None] | None]
OnUsage = Callable[[bytes], Awaitable[None]]


class News:
    """One service's ear and mouth.

    `name` is what its NATS user may speak for; `identity` is shown to a server over TLS.
    """

    def __init__(self, config: NatsConfig, *, name: str, identity: KeyFiles | None = None) -> None:
        self._name = name
        self._link = NatsLink(config, name=name, identity=identity)
        self._incarnation = secrets.token_hex(4)
        self._member: Member | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._answering: asyncio.TimerHandle | None = None
        self._timers: set[_Aging] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def connected(self) -> bool:
        """Whether news flow now; health says so when not."""
        return self._link.connected

    async def start(self) -> None:
        """Returns at once, with or without a server."""
        self._link.start()

    async def wait_connected(self) -> None:
        """Returns as soon as there is a connection."""
        await self._link.wait_connected()

    async def close(self) -> None:
        """Says goodbye (watchers drop this member at once) and disconnects."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if self._answering is not None:
            self._answering.cancel()
        for timer in self._timers:
            timer.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        member, self._member = self._member, None
        if member is not None:
            await self._link.publish(f"{MEMBERS}.{member.name}", encode_announcement(member, left=True))
            await self._link.flush()
        await self._link.close()

    # Members

    def hush(self) -> None:
        """Another process speaks under our name from now on: no more announcements."""
        self._member = None
        if self._heartbeat is not None:
            self._heartbeat.cancel()

    async def announce(self, member: Member) -> None:
        """Tells everyone now, every 5 s, and whenever somebody asks. Call it again on a change."""
        first = self._member is None
        self._member = replace(member, incarnation=member.incarnation or self._incarnation, stale=False)
        if first:
            self._heartbeat = asyncio.create_task(self._beat(), name="heartbeat")
            self._link.on_connected(self._tell)
            await self._link.subscribe(MEMBERS_QUERY, self._on_query)
        await self._tell()

    update = announce

    async def watch_members(self, on_change: OnChange) -> None:
        """Calls `on_change` with everyone known, by name, whenever that changes.

        A member that has been silent for 15 s while NATS was there is `stale`; one
        that leaves is gone at once. While NATS is away nothing changes.
        """
        roster = Roster()
        aging = _Aging(roster, lambda: self._call(on_change(roster.members())), lambda: self.connected)
        self._timers.add(aging)

        async def heard(message: Msg) -> None:
            announcement = decode_announcement(message.subject, message.data)
            if announcement is None:
                log.warning("an announcement on %s is malformed", message.subject)
                return
            changed = roster.hear(announcement, asyncio.get_running_loop().time())
            aging.schedule()
            if changed:
                await _maybe_await(on_change(roster.members()))

        async def ask() -> None:
            roster.excuse(asyncio.get_running_loop().time())
            aging.schedule()
            await self._link.publish(MEMBERS_QUERY, b"")

        await self._link.subscribe(f"{MEMBERS}.>", heard)
        self._link.on_connected(ask)

    async def _tell(self) -> None:
        if self._member is not None:
            await self._link.publish(f"{MEMBERS}.{self._member.name}", encode_announcement(self._member))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self._tell()

    async def _on_query(self, message: Msg) -> None:
        if self._answering is None:
            loop = asyncio.get_running_loop()
            self._answering = loop.call_later(QUERY_DEBOUNCE_S, self._answer)

    def _answer(self) -> None:
        self._answering = None
        self._call(self._tell())

    # Load and events

    async def publish_load(self, worker: str, load: Load) -> None:
        """Send it when it changes."""
        await self._link.publish(f"{LOAD}.{worker}", _encode(load))

    async def subscribe_load(self, on_load: OnLoad) -> None:
        """Calls `on_load(worker, load)`."""

        async def heard(message: Msg) -> None:
            try:
                load = _decode_load(message.data)
            except msgspec.DecodeError:
                log.warning("load on %s is malformed", message.subject)
                return
            await _maybe_await(on_load(message.subject.removeprefix(f"{LOAD}."), load))

        await self._link.subscribe(f"{LOAD}.>", heard)

    async def publish(self, subject: str, data: bytes) -> bool:
        """False if there is no server now; then the message is dropped."""
        return await self._link.publish(subject, data)

    async def subscribe(self, subject: str, on_message: OnMessage) -> None:
        """Calls `on_message(subject, data)`, in order. Wildcards as in NATS."""

        async def heard(message: Msg) -> None:
            await _maybe_await(on_message(message.subject, message.data))

        await self._link.subscribe(subject, heard)

    def on_connected(self, hook: Callable[[], Awaitable[None]]) -> None:
        """`hook` runs after every connect: the moment to repeat what may have been lost."""
        self._link.on_connected(hook)

    # Usage

    async def publish_usage(self, record: bytes, msg_id: str) -> bool:
        """True once the stream holds the record; otherwise keep it and try again.

        A record with the same `msg_id` within ten minutes is stored once.
        """
        jetstream = self._link.jetstream()
        if jetstream is None:
            return False
        headers = {api.Header.MSG_ID.value: msg_id}
        try:
            await jetstream.publish(USAGE, record, timeout=USAGE_ACK_TIMEOUT_S, headers=headers)
        except (nats_errors.Error, js_errors.Error, OSError, TimeoutError):
            return False
        return True

    async def consume_usage(self, on_record: OnUsage) -> None:
        """Calls `on_record` for each record, at least once; it is acknowledged when that returns.

        Makes the stream and the durable consumer, again after a NATS that lost them.
        Several consumers share the records.
        """

        async def heard(message: Msg) -> None:
            try:
                await on_record(message.data)
            except Exception:
                await message.nak(delay=RETRY_S)
                raise
            await message.ack()

        async def ensure() -> None:
            for _ in range(USAGE_SETUP_ATTEMPTS):
                if not self.connected or await self._ensure_usage():
                    return
                await asyncio.sleep(RETRY_S)
            log.error("the usage stream could not be made; usage waits in the routers")

        await self._link.subscribe(USAGE_DELIVER, heard, queue=USAGE_CONSUMER)
        self._link.on_connected(ensure)

    async def _ensure_usage(self) -> bool:
        jetstream = self._link.jetstream()
        if jetstream is None:
            return False
        try:
            await jetstream.add_stream(
                api.StreamConfig(
                    name=USAGE_STREAM,
                    subjects=[USAGE],
                    # A record that IAM has is not kept twice; a full stream refuses, and the outbox keeps.
                    retention=api.RetentionPolicy.WORK_QUEUE,
                    discard=api.DiscardPolicy.NEW,
                    storage=api.StorageType.FILE,
                    duplicate_window=USAGE_DUPLICATES_S,
                    max_bytes=USAGE_LIMIT_BYTES,
                )
            )
            await jetstream.add_consumer(
                USAGE_STREAM,
                api.ConsumerConfig(
                    durable_name=USAGE_CONSUMER,
                    deliver_subject=USAGE_DELIVER,
                    deliver_group=USAGE_CONSUMER,
                    ack_policy=api.AckPolicy.EXPLICIT,
                    ack_wait=USAGE_ACK_WAIT_S,
                    max_ack_pending=256,
                ),
            )
        except (nats_errors.Error, js_errors.Error, OSError, TimeoutError) as error:
            log.warning("the usage stream is not ready: %s", type(error).__name__)
            return False
        return True

    def _call(self, result: Awaitable[None] | None) -> None:
        """Runs what a timer started; an error in it is logged, not lost."""
        if result is None:
            return

        async def run() -> None:
            try:
                await result
            except Exception:
                log.exception("a reaction to news failed")

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Aging:
    """One timer per watcher, set to when the next member could become stale."""

    def __init__(self, roster: Roster, changed: Callable[[], None], connected: Callable[[], bool]) -> None:
        self._roster = roster
        self._changed = changed
        self._connected = connected
        self._timer: asyncio.TimerHandle | None = None

    def schedule(self) -> None:
        if self._timer is None:
            due = self._roster.next_age()
            if due is not None:
                self._timer = asyncio.get_running_loop().call_at(due, self._fire)

    def _fire(self) -> None:
        self._timer = None
        # Without a server silence means nothing; the next connect sets the timer again.
        if self._connected():
            if self._roster.age(asyncio.get_running_loop().time()):
                self._changed()
            self.schedule()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


async def _maybe_await(result: Awaitable[None] | None) -> None:
    if inspect.isawaitable(result):
        await result
