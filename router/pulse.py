"""Whether workers still answer: asked once for everybody who waits for the same one.

An answer is good for a while, so that a hundred queued requests are no hundred questions. It does not know
who waits, nor what follows from silence.
"""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc


class Pulse:
    """`fresh_s` is how long an answer is good, `patience_s` how long one is waited for."""

    def __init__(self, fresh_s: float = 0.5, patience_s: float = 1.0) -> None:
        self._fresh_s = fresh_s
        self._patience_s = patience_s
        self._asking: WeakKeyDictionary[grpc.aio.Channel, asyncio.Task[bool]] = WeakKeyDictionary()
        self._alive_at_s: WeakKeyDictionary[grpc.aio.Channel, float] = WeakKeyDictionary()

    async def beats(self, channel: grpc.aio.Channel) -> bool:
        """Whether the worker behind the channel answers, or has just answered."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._alive_at_s.get(channel, -self._fresh_s) < self._fresh_s:
            return True
        asking = self._asking.get(channel)
        if asking is None or asking.done():
            asking = self._asking[channel] = loop.create_task(self._ask(channel), name="pulse")
        # Whoever leaves meanwhile does not end it for the others.
        return await asyncio.shield(asking)

    async def _ask(self, channel: grpc.aio.Channel) -> bool:
        asked_at_s = asyncio.get_running_loop().time()
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=self._patience_s)
        except grpc.aio.AioRpcError as error:
            # An answer, whatever it says, comes from a living process.
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return False
        except (asyncio.CancelledError, grpc.aio.UsageError):
            # The channel was closed: its calls say so themselves.
            return True
        self._alive_at_s[channel] = asked_at_s
        return True
