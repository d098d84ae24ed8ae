"""Who waits for a worker, and in which order.

Requests wait by arrival, per model: the oldest is placed first and is never
overtaken, so that it always advances. Nothing is polled: a pump runs when a
request comes, when one of ours ends, when a worker appears or says its load; one
safety timer runs only while somebody waits for a worker that refused. Waiting is
bounded in number and in time. It does not know what placing a request means.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mesh.errors import Overloaded, Unavailable
from router.placement import Gate, Held, Placement, Worker


@dataclass(frozen=True, slots=True)
class Patience:
    """Bounds of waiting. A request that was accepted once may wait as long as a worker lives."""

    waiting: int = 1024
    queue_s: float = 300.0
    no_worker_s: float = 30.0
    retry_full_s: float = 0.5


@dataclass(frozen=True, slots=True)
class Need:
    """What a request needs of a decode worker. `held` tells the cached blocks on a worker's node."""

    model: str
    arrival_ns: int
    sequences: int
    blocks: int
    held: Held
    accepted: bool = False
    # When the request began to wait, by time.monotonic: refusals do not start the wait anew.
    queued_at: float = 0.0


class Seat:
    """A place at a worker. Left exactly once, with `leave`."""

    def __init__(self, queue: Admission, worker: Worker, sequences: int) -> None:
        self.worker = worker
        self._queue = queue
        self._sequences = sequences
        self._left = False

    def accepted(self) -> None:
        """The worker took it."""
        self._queue.accepted(self.worker)

    def leave(self, *, refused: bool = False) -> None:
        if not self._left:
            self._left = True
            self._queue.left(self.worker, self._sequences, refused=refused)


@dataclass(order=True, slots=True)
class _Waiter:
    arrival_ns: int
    order: int
    need: Need = field(compare=False)
    seat: asyncio.Future[Seat] = field(compare=False)
    timer: asyncio.TimerHandle | None = field(compare=False, default=None)
    alone: asyncio.TimerHandle | None = field(compare=False, default=None)


class Admission:
    """The queues of all models in front of one `Placement`."""

    def __init__(self, placement: Placement, patience: Patience) -> None:
        self._placement = placement
        self._patience = patience
        self._lines: dict[str, list[_Waiter]] = {}
        self._orders = itertools.count()
        self._retry: asyncio.TimerHandle | None = None
        self._gone_at: dict[str, float] = {}
        self.on_waiting: Callable[[str, int], None] = lambda model, waiting: None

    def waiting(self, model: str) -> int:
        """How many requests wait for a worker of the model."""
        return sum(not waiter.seat.done() for waiter in self._lines.get(model, ()))

    async def enter(self, need: Need) -> Seat:
        """Waits for a worker. Raises Overloaded (full, too long) or Unavailable (no worker)."""
        if not need.accepted and self.waiting(need.model) >= self._patience.waiting:
            raise Overloaded("Too many requests are waiting for this model. Try again.", retry_after_s=2.0)
        loop = asyncio.get_running_loop()
        waiter = _Waiter(need.arrival_ns, next(self._orders), need, loop.create_future())
        if not need.accepted:
            waited_s = time.monotonic() - need.queued_at if need.queued_at else 0.0
            waiter.timer = loop.call_later(
                max(0.0, self._patience.queue_s - waited_s), self._too_long, waiter
            )
        heapq.heappush(self._lines.setdefault(need.model, []), waiter)
        try:
            self.pump(need.model)
            self.on_waiting(need.model, self.waiting(need.model))
            return await waiter.seat
        except BaseException:
            # Cancelled in the same moment in which a place was given.
            if waiter.seat.done() and not waiter.seat.cancelled() and waiter.seat.exception() is None:
                waiter.seat.result().leave()
            raise
        finally:
            _still(waiter)
            if not waiter.seat.done():
                waiter.seat.cancel()
            self.on_waiting(need.model, self.waiting(need.model))
            self.pump(need.model)

    def pump(self, model: str | None = None) -> None:
        """Places whoever can be placed now, oldest first."""
        for name in [model] if model is not None else list(self._lines):
            self._pump_line(name)
        self._arm_retry()

    def accepted(self, worker: Worker) -> None:
        self._placement.accepted(worker)
        self.pump(worker.model)

    def left(self, worker: Worker, sequences: int, *, refused: bool) -> None:
        self._placement.ended(worker, sequences)
        if refused:
            self._placement.refused(worker)
        self.pump(worker.model)

    def _pump_line(self, model: str) -> None:
        line = self._lines.get(model, [])
        while line:
            waiter = line[0]
            if waiter.seat.done():
                heapq.heappop(line)
                continue
            need = waiter.need
            worker = self._placement.choose_decode(model, need.sequences, need.blocks, need.held)
            if worker is None:
                break
            heapq.heappop(line)
            _still(waiter)
            self._placement.taken(worker, need.sequences)
            waiter.seat.set_result(Seat(self, worker, need.sequences))
        if not line:
            self._lines.pop(model, None)
        self._watch_for_workers(model)

    def _watch_for_workers(self, model: str) -> None:
        """Bounds the wait for a model that no worker serves."""
        if self._placement.served(model):
            self._gone_at.pop(model, None)
            for waiter in self._lines.get(model, ()):
                if waiter.alone is not None:
                    waiter.alone.cancel()
                    waiter.alone = None
            return
        loop = asyncio.get_running_loop()
        gone_at = self._gone_at.setdefault(model, time.monotonic())
        left_s = max(0.0, gone_at + self._patience.no_worker_s - time.monotonic())
        for waiter in self._lines.get(model, ()):
            if waiter.alone is None and not waiter.seat.done():
                waiter.alone = loop.call_later(left_s, self._no_worker, waiter)

    def _no_worker(self, waiter: _Waiter) -> None:
        if not waiter.seat.done():
            waiter.seat.set_exception(
                Unavailable(
                    "No worker serves this model now. Try again.", code="no_worker", retry_after_s=2.0
                )
            )

    def _too_long(self, waiter: _Waiter) -> None:
        if not waiter.seat.done():
            waiter.seat.set_exception(
                Overloaded("The request has waited too long for a worker. Try again.", retry_after_s=5.0)
            )

    def _arm_retry(self) -> None:
        """A full worker is tried again after a while, in case that no news of it arrives."""
        if self._retry is not None or not self._stuck():
            return
        loop = asyncio.get_running_loop()
        self._retry = loop.call_later(self._patience.retry_full_s, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        for worker in self._stuck():
            self._placement.stir(worker)
        self.pump()

    def _stuck(self) -> list[Worker]:
        return [
            worker
            for model in self._lines
            for worker in self._placement.workers("decode", model)
            if worker.gate is Gate.FULL
        ]


def _still(waiter: _Waiter) -> None:
    for timer in (waiter.timer, waiter.alone):
        if timer is not None:
            timer.cancel()
    waiter.timer = waiter.alone = None
