"""One `Decode.Session` stream to one decode worker, with all our requests in it.

Opened when the worker appears, opened again with backoff when it breaks, on a fresh
channel each time. Frames are handed to the request they belong to. A worker that
has work of ours and sends nothing for 2 s (its beats come every half second) is
hung: the stream is broken off and every request in it is lost. So is one that
beats and takes no step for far longer than any step lasts. It does not know where
lost requests go.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc
import grpc.aio
from kvmesh.v1 import decode_pb2, decode_pb2_grpc

from mesh.errors import Unavailable
from mesh.faults import NO_FAULTS, Action, FaultPoints
from mesh.rpc import await_welcome
from router import wire
from router.core.choice import Row

log = logging.getLogger(__name__)

Dial = Callable[[str, str], grpc.aio.Channel]


@dataclass(frozen=True, slots=True)
class Liveness:
    """`silent_s` without any frame is a hang; so is `stuck_s` of beats without a step."""

    silent_s: float = 2.0
    # The worker watches its own steps and ends when one is stuck; this is for one that does not.
    stuck_s: float = 120.0
    connect_s: float = 5.0
    retry_first_s: float = 0.1
    retry_most_s: float = 2.0


class Listener(Protocol):
    """A request's end of its handoff. Called on the event loop; must not block."""

    def on_frame(
        self, frame: wire.Reserved | wire.Refused | wire.Ready | wire.SourcesFailed | wire.Done
    ) -> None: ...
    def on_rows(self, rows: Sequence[Row]) -> None: ...
    def on_lost(self, reason: str) -> None: ...


class DecodeSession:
    """`connected` says whether requests can be opened; `on_change` is called when that changes.

    `on_hung(worker, reason)` is called before the requests of a hung worker are lost.
    """

    def __init__(
        self,
        worker: str,
        address: str,
        dial: Dial,
        *,
        liveness: Liveness,
        on_change: Callable[[], None],
        on_hung: Callable[[str, str], None],
        faults: FaultPoints = NO_FAULTS,
    ) -> None:
        self._faults = faults
        self.worker = worker
        self.address = address
        self.connected = False
        self._dial = dial
        self._liveness = liveness
        self._on_change = on_change
        self._on_hung = on_hung
        self._listeners: dict[str, Listener] = {}
        self._stepping: set[str] = set()
        self._outgoing: asyncio.Queue[decode_pb2.SessionRequest | None] = asyncio.Queue()
        self._heard_at = 0.0
        self._stepped_at = 0.0
        self._steps = -1
        self._watchdog: asyncio.TimerHandle | None = None
        self._hurry = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None
        self._hung = ""
        self._closed = False
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"session {worker}")

    def open(self, opening: wire.Opening, listener: Listener) -> None:
        """Sends a request to the worker; raises Unavailable when there is no stream."""
        if not self.connected:
            raise Unavailable(f"worker {self.worker} cannot be reached")
        if not self._listeners:
            now = asyncio.get_running_loop().time()
            self._heard_at = self._stepped_at = now
        self._listeners[opening.handoff_id] = listener
        self._outgoing.put_nowait(wire.open_frame(opening))
        self._watch()

    def sources(self, handoff_id: str, attempt: int, sources: wire.Sources) -> None:
        self._send(handoff_id, wire.sources_frame(handoff_id, attempt, sources), "sources")

    def cancel(self, handoff_id: str, choice: int | None = None) -> None:
        self._send(handoff_id, wire.cancel_frame(handoff_id, choice), "cancel")

    def credit(self, handoff_id: str, tokens: int) -> None:
        self._send(handoff_id, wire.credit_frame(handoff_id, tokens))

    def holds(self, handoff_id: str) -> bool:
        """Whether the worker has not yet given the last frame of this handoff."""
        return handoff_id in self._listeners

    @property
    def handoffs(self) -> int:
        return len(self._listeners)

    def hurry(self, address: str) -> None:
        """The worker was announced (again): connect now."""
        self.address = address
        self._hurry.set()

    async def close(self) -> None:
        """Ends the stream; requests in it are lost."""
        self._closed = True
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._lose("the worker has left")

    def _send(self, handoff_id: str, frame: decode_pb2.SessionRequest, point: str = "") -> None:
        if self.connected and handoff_id in self._listeners:
            self._outgoing.put_nowait(frame)
            fault = self._faults.at(point) if point else None
            if fault is not None and fault.action is Action.DUPLICATE:
                self._outgoing.put_nowait(frame)

    async def _run(self) -> None:
        wait_s = self._liveness.retry_first_s
        while True:
            self._hung = ""
            self._reading = asyncio.get_running_loop().create_task(self._stream())
            try:
                await self._reading
            except asyncio.CancelledError:
                if self._closed or not self._hung:
                    await _ended(self._reading)
                    raise
            if self.connected:
                wait_s = self._liveness.retry_first_s
            self.connected = False
            self._hurry.clear()
            # First the news: nobody who waits may get a place that a lost request leaves here.
            self._on_change()
            self._lose(self._hung or "the worker's stream broke")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._hurry.wait()
            wait_s = min(wait_s * 2, self._liveness.retry_most_s)

    async def _stream(self) -> None:
        self._outgoing = asyncio.Queue()
        channel = self._dial(self.address, "decode")
        try:
            call = decode_pb2_grpc.DecodeStub(channel).Session(_frames(self._outgoing))
            async with asyncio.timeout(self._liveness.connect_s):
                await await_welcome(call)
            self.connected = True
            self._on_change()
            async for response in call:
                self._heard_at = asyncio.get_running_loop().time()
                frame = wire.frame(response)
                if frame is not None:
                    self._deliver(frame)
        except (grpc.aio.AioRpcError, Unavailable, TimeoutError, OSError) as error:
            reason = error.code().name if isinstance(error, grpc.aio.AioRpcError) else repr(error)
            log.info("decode session ended", extra={"worker": self.worker, "reason": reason})
        finally:
            self._outgoing.put_nowait(None)
            await channel.close(None)

    def _deliver(self, frame: wire.Frame) -> None:
        if isinstance(frame, wire.Step):
            self._stepped_at = self._heard_at
            for handoff_id, rows in frame.rows.items():
                listener = self._listeners.get(handoff_id)
                if listener is not None:
                    self._guarded(handoff_id, listener, rows)
            return
        if isinstance(frame, wire.Beat):
            if frame.steps != self._steps:
                self._steps, self._stepped_at = frame.steps, self._heard_at
            return
        listener = self._listeners.get(frame.handoff_id)
        if isinstance(frame, wire.Ready):
            if not self._stepping:
                self._stepped_at = self._heard_at
            self._stepping.add(frame.handoff_id)
        elif isinstance(frame, (wire.Done, wire.Refused)):
            self._listeners.pop(frame.handoff_id, None)
            self._stepping.discard(frame.handoff_id)
            if not self._listeners:
                self._unwatch()
        if listener is not None:
            listener.on_frame(frame)

    def _guarded(self, handoff_id: str, listener: Listener, rows: Sequence[Row]) -> None:
        """A request that cannot take its tokens fails alone."""
        try:
            listener.on_rows(rows)
        except Exception:
            log.exception("a request could not take its tokens", extra={"handoff_id": handoff_id})
            self.cancel(handoff_id)
            self._listeners.pop(handoff_id, None)
            listener.on_frame(wire.Done(handoff_id, "failed", None, 0))

    def _lose(self, reason: str) -> None:
        lost, self._listeners = self._listeners, {}
        self._stepping.clear()
        self._unwatch()
        for listener in lost.values():
            listener.on_lost(reason)

    def _watch(self) -> None:
        if self._watchdog is None:
            loop = asyncio.get_running_loop()
            self._watchdog = loop.call_later(self._liveness.silent_s, self._check, False)

    def _unwatch(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None

    def _check(self, again: bool) -> None:
        """Runs only while the worker has work of ours."""
        self._watchdog = None
        if not self._listeners:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        silent_s = now - self._heard_at
        if self._stepping and now - self._stepped_at >= self._liveness.stuck_s:
            self._declare_hung("takes no step")
            return
        if silent_s < self._liveness.silent_s:
            self._watchdog = loop.call_later(self._liveness.silent_s - silent_s + 0.01, self._check, False)
        elif again:
            self._declare_hung("silent")
        else:
            # If it was this loop that stood still, what the worker sent is read first.
            self._watchdog = loop.call_later(max(0.1, self._liveness.silent_s / 8), self._check, True)

    def _declare_hung(self, reason: str) -> None:
        log.warning("worker hung", extra={"worker": self.worker, "reason": reason})
        self._hung = f"the worker hung ({reason})"
        self.connected = False
        self._on_hung(self.worker, reason)
        if self._reading is not None:
            self._reading.cancel()


async def _frames(
    queue: asyncio.Queue[decode_pb2.SessionRequest | None],
) -> AsyncIterator[decode_pb2.SessionRequest]:
    while (frame := await queue.get()) is not None:
        yield frame


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
