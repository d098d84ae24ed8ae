"""`Prefill.Run` calls: start, follow, give up on.

A run lives until it is cancelled, because its leases live exactly as long as the
call. It has failed when the call ends early, or when the worker is silent: for
`stalled_s` once it computes, and while it queues as soon as its health check goes
unanswered (a queue may be long, a living process answers). It does not know what
happens to the request then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import grpc
import grpc.aio
from kvmesh.v1 import prefill_pb2, prefill_pb2_grpc

from mesh.errors import said_by_callee
from mesh.faults import NO_FAULTS, Action, FaultPoints
from router.pulse import Pulse

# For fault points: a run that was sent so long ago is being computed.
UNDER_WAY_S = 0.002


@dataclass(frozen=True, slots=True)
class RunPatience:
    """Silence that is borne, in seconds."""

    stalled_s: float = 5.0
    health_every_s: float = 1.0


class Fault(Enum):
    """Whose fault a failed run is. HUNG: the worker lives and does nothing."""

    REQUEST = auto()
    LOST = auto()
    HUNG = auto()


@dataclass(frozen=True, slots=True)
class RunFailure:
    """Why a run is over."""

    reason: str
    fault: Fault


class PrefillRun:
    """One run. `on_complete()` once every block is committed, `on_failure(failure)` if it breaks."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        request: prefill_pb2.RunRequest,
        patience: RunPatience,
        pulse: Pulse,
        *,
        on_complete: Callable[[], None],
        on_failure: Callable[[RunFailure], None],
        faults: FaultPoints = NO_FAULTS,
    ) -> None:
        self.finished = False
        self._channel = channel
        self._request = request
        self._patience = patience
        self._pulse = pulse
        self._on_complete = on_complete
        self._on_failure = on_failure
        self._faults = faults
        self._computing = False
        self._ended = False
        self._task = asyncio.get_running_loop().create_task(self._run(), name="prefill run")

    def end(self) -> None:
        """Ends the call, and with it the leases of the run."""
        self._ended = True
        self._task.cancel()

    async def _run(self) -> None:
        failure = await self._follow()
        self._on_failure(failure)

    async def _follow(self) -> RunFailure:
        call = prefill_pb2_grpc.PrefillStub(self._channel).Run(self._request)
        if self._faults.active:
            # The first progress is no sign: decode often has all its leases before it is read.
            asyncio.get_running_loop().call_later(UNDER_WAY_S, self._faults.at, "prefilling")
        try:
            while True:
                message = await self._next(call)
                if isinstance(message, RunFailure):
                    return message
                self._computing = True
                asked = self._faults.at("progress")
                if asked is not None and asked.action is Action.DROP:
                    continue
                if message.committed_blocks >= len(self._request.block_ids) and not self.finished:
                    self.finished = True
                    self._on_complete()
        except grpc.aio.AioRpcError as error:
            lost = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
            # One that says so itself lives; it drains, is full, or its store is away.
            lost = lost and not said_by_callee(error)
            fault = Fault.LOST if lost else Fault.REQUEST
            return RunFailure(f"the run ended with {error.code().name}", fault)
        except (asyncio.CancelledError, grpc.aio.UsageError):
            if self._ended:
                raise
            return RunFailure("the channel was closed", Fault.LOST)
        finally:
            call.cancel()

    async def _next(
        self, call: grpc.aio.UnaryStreamCall[prefill_pb2.RunRequest, prefill_pb2.RunResponse]
    ) -> prefill_pb2.RunResponse | RunFailure:
        """The next message, or why there will be none."""
        reading = asyncio.ensure_future(call.read())
        silent_s = 0.0
        try:
            while not reading.done():
                wait_s = None if self.finished else self._patience.health_every_s
                await asyncio.wait({reading}, timeout=wait_s)
                if reading.done() or self.finished:
                    continue
                silent_s += self._patience.health_every_s
                if self._computing and silent_s >= self._patience.stalled_s:
                    return RunFailure("the prefill worker makes no progress", Fault.HUNG)
                if not await self._pulse.beats(self._channel) and not reading.done():
                    return RunFailure("the prefill worker does not answer", Fault.HUNG)
            message = await reading
            if not isinstance(message, prefill_pb2.RunResponse):
                # Its leases are gone with it, even if every block was committed.
                return RunFailure("the run ended early", Fault.LOST)
            return message
        finally:
            reading.cancel()
