"""One connection to NATS that may be absent at any time.

Connecting never blocks and never gives up; subscriptions are remembered and made
(again) whenever there is a server. What is published while there is none is
dropped: this carries news, and every kind of news here has its own way to be
asked for again.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from nats import errors as nats_errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.client import JetStreamContext

from mesh.config import NatsConfig
from mesh.identity import KeyFiles
from mesh.nats_permissions import inbox_prefix

log = logging.getLogger(__name__)

RECONNECT_S = 1
CONNECT_TIMEOUT_S = 2
PING_S = 60
# Less than nats-py's 2 MiB: what waits longer than a hiccup is old news.
BACKLOG_BYTES = 256 * 1024

Handler = Callable[[Msg], Awaitable[None]]
Hook = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Subscription:
    subject: str
    queue: str
    handler: Handler


class NatsLink:
    """`start` returns at once. Hooks of `on_connected` run after every (re)connect."""

    def __init__(self, config: NatsConfig, *, name: str, identity: KeyFiles | None = None) -> None:
        self._config = config
        self._identity = identity
        self._name = name
        self._client: Client | None = None
        self._jetstream: JetStreamContext | None = None
        self._subscriptions: list[_Subscription] = []
        self._hooks: list[Hook] = []
        self._runner: asyncio.Task[None] | None = None
        self._closing = False
        self._reported: str | None = None
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def connected(self) -> bool:
        """Whether news flow now."""
        return self._client is not None and self._client.is_connected

    def start(self) -> None:
        if self._runner is None:
            self._runner = asyncio.create_task(self._run(), name="nats")

    def on_connected(self, hook: Hook) -> None:
        """`hook` runs after every connect from now on; at once if there is a connection."""
        self._hooks.append(hook)
        if self.connected:
            self._spawn(hook())

    async def wait_connected(self) -> None:
        """Returns as soon as there is a connection."""
        while not self.connected:
            self._changed.clear()
            await self._changed.wait()

    async def publish(self, subject: str, data: bytes) -> bool:
        """False if there is no server now; then the message is dropped."""
        if not self.connected or self._client is None:
            return False
        try:
            await self._client.publish(subject, data)
        except (nats_errors.Error, OSError):
            return False
        return True

    async def flush(self) -> None:
        """What was published has reached the server, if there is one."""
        if self.connected and self._client is not None:
            try:
                await _flush(self._client)
            except (nats_errors.Error, OSError, TimeoutError):
                pass

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> None:
        """Calls `handler` for each message, one after the other, now and after each reconnect.

        If there is a server it has the subscription when this returns.
        """
        subscription = _Subscription(subject, queue, handler)
        self._subscriptions.append(subscription)
        if self.connected and self._client is not None:
            await self._subscribe(self._client, subscription)
            await self.flush()

    def jetstream(self) -> JetStreamContext | None:
        """None while there is no server."""
        return self._jetstream if self.connected else None

    async def close(self) -> None:
        self._closing = True
        runner, self._runner = self._runner, None
        if runner is not None:
            await _end(runner)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self) -> None:
        while not self._closing:
            client, closed = Client(), asyncio.Event()
            try:
                await self._connect(client, closed)
                await self._subscribe_all(client)
                self._client, self._jetstream = client, client.jetstream(timeout=CONNECT_TIMEOUT_S)
                await self._up()
                if not self._closing:
                    await closed.wait()
            except (nats_errors.Error, OSError, TimeoutError) as error:
                await self._down(error)
            finally:
                self._client = self._jetstream = None
                await _close(client)
            if not self._closing:
                await asyncio.sleep(RECONNECT_S)

    async def _connect(self, client: Client, closed: asyncio.Event) -> None:
        async def on_closed() -> None:
            closed.set()

        options: dict[str, Any] = {}
        if self._config.ca is not None:
            tls = ssl.create_default_context(cafile=str(self._config.ca))
            if self._identity is not None:
                tls.load_cert_chain(self._identity.cert, self._identity.key)
            options["tls"] = tls
            options["tls_hostname"] = "localhost"
        await client.connect(
            self._config.url,
            user=self._config.user,
            password=self._config.password,
            name=self._name,
            inbox_prefix=inbox_prefix(self._name),
            max_reconnect_attempts=-1,
            reconnect_time_wait=RECONNECT_S,
            connect_timeout=CONNECT_TIMEOUT_S,
            ping_interval=PING_S,
            pending_size=BACKLOG_BYTES,
            error_cb=self._down,
            reconnected_cb=self._up,
            closed_cb=on_closed,
            **options,
        )

    async def _subscribe_all(self, client: Client) -> None:
        """Makes every subscription, those that come meanwhile too; the server has them afterwards."""
        made = 0
        while made < len(self._subscriptions):
            waiting = self._subscriptions[made:]
            for subscription in waiting:
                await self._subscribe(client, subscription)
            await _flush(client)
            made += len(waiting)

    async def _subscribe(self, client: Client, subscription: _Subscription) -> None:
        async def handle(message: Msg) -> None:
            try:
                await subscription.handler(message)
            except Exception:
                log.exception("news on %s could not be used", subscription.subject)

        await client.subscribe(subscription.subject, queue=subscription.queue, cb=handle)

    async def _up(self) -> None:
        self._changed.set()
        if self._reported is not None:
            log.warning("NATS is back")
            self._reported = None
        for hook in self._hooks:
            self._spawn(hook())

    async def _down(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        # An absent server fails once a second; one line tells it.
        if text != self._reported:
            log.warning("NATS: %s", text)
            self._reported = text

    def _spawn(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            try:
                await work
            except Exception:
                log.exception("work after connecting to NATS failed")

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _end(task: asyncio.Task[None]) -> None:
    # A cancellation that meets the end of a `wait_for` is swallowed by Python 3.11, and
    # nats-py waits that way: hence again, until it is true.
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CONNECT_TIMEOUT_S)


async def _flush(client: Client) -> None:
    # nats-py writes the PING of a flush ahead of what is still in its buffer, so that
    # only what was there before the answer is known to have arrived: hence twice.
    for _ in range(2):
        await client.flush(timeout=CONNECT_TIMEOUT_S)


async def _close(client: Client) -> None:
    try:
        await client.close()
    except (nats_errors.Error, OSError, TimeoutError):
        pass
