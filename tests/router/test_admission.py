"""Waiting for a worker: by arrival, never overtaken, bounded, woken by events and not by polling."""

from __future__ import annotations

import asyncio

import pytest

from mesh.errors import Overloaded, Unavailable
from router.admission import Admission, Need, Patience, Seat
from router.placement import LoadReport, Placement, Worker
from tests.router.test_placement import nothing, placed, worker
from tests.router.world import until


def need(arrival: int, sequences: int = 1, model: str = "m", **fields: bool) -> Need:
    return Need(model, arrival, sequences, 0, nothing, **fields)


def queue(*workers: Worker, **patience: float) -> tuple[Admission, Placement]:
    placement = placed(*workers)
    return Admission(placement, Patience(**patience)), placement  # type: ignore[arg-type]


async def test_the_oldest_goes_first_and_is_not_overtaken() -> None:
    admission, _ = queue(worker("a", capacity=2))
    running = await admission.enter(need(0, 2))
    order: list[int] = []

    async def wait(arrival: int, sequences: int) -> Seat:
        seat = await admission.enter(need(arrival, sequences))
        order.append(arrival)
        return seat

    tasks = [
        asyncio.ensure_future(wait(arrival, sequences)) for arrival, sequences in ((3, 1), (1, 2), (2, 1))
    ]
    await until(lambda: admission.waiting("m") == 3)
    running.leave()
    first = await tasks[1]
    assert order == [1]
    first.leave()
    for task in (tasks[2], tasks[0]):
        (await task).leave()
    assert order == [1, 2, 3]
    assert admission.waiting("m") == 0


async def test_a_seat_is_left_once_and_a_cancelled_wait_takes_none() -> None:
    a = worker("a", capacity=1)
    admission, _ = queue(a)
    seat = await admission.enter(need(0))
    waiting = asyncio.ensure_future(admission.enter(need(1)))
    await until(lambda: admission.waiting("m") == 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    seat.leave()
    seat.leave()
    assert a.ours == 0
    # Cancelled in the moment in which a place is given.
    seat = await admission.enter(need(2))
    late = asyncio.ensure_future(admission.enter(need(3)))
    await until(lambda: admission.waiting("m") == 1)
    seat.leave()
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    assert a.ours == 0


async def test_refusals_wait_for_an_event_or_the_safety_timer() -> None:
    a = worker("a")
    admission, placement = queue(a, retry_full_s=0.05)
    (await admission.enter(need(0))).leave(refused=True)
    waiting = asyncio.ensure_future(admission.enter(need(0)))
    await until(lambda: admission.waiting("m") == 1)
    placement.said("a", LoadReport(0, 0, 9))
    admission.pump("m")
    (await waiting).leave(refused=True)
    seat = await asyncio.wait_for(admission.enter(need(0)), 1)
    seat.leave()
    assert admission._retry is None or not admission.waiting("m")


async def test_waiting_is_bounded_in_number_and_time() -> None:
    a = worker("a", capacity=1)
    admission, _ = queue(a, waiting=1, queue_s=0.05)
    seat = await admission.enter(need(0))
    waiting = asyncio.ensure_future(admission.enter(need(1)))
    await until(lambda: admission.waiting("m") == 1)
    with pytest.raises(Overloaded) as caught:
        await admission.enter(need(2))
    assert caught.value.retry_after_s
    accepted = asyncio.ensure_future(admission.enter(need(0, accepted=True)))
    with pytest.raises(Overloaded):
        await waiting
    assert not accepted.done()
    seat.leave()
    (await accepted).leave()


async def test_a_model_without_workers_is_waited_for_a_while() -> None:
    admission, placement = queue(no_worker_s=0.05)
    with pytest.raises(Unavailable) as caught:
        await admission.enter(need(0))
    assert caught.value.code == "no_worker"
    with pytest.raises(Unavailable):
        await asyncio.wait_for(admission.enter(need(1)), 0.04)
    admission, placement = queue(no_worker_s=5)
    waiting = asyncio.ensure_future(admission.enter(need(0)))
    await until(lambda: admission.waiting("m") == 1)
    placement.put(worker("a"))
    admission.pump("m")
    assert (await waiting).worker.name == "a"


async def test_idle_has_no_timers() -> None:
    admission, _ = queue(worker("a"))
    (await admission.enter(need(0))).leave()
    assert admission._retry is None
    assert not admission._lines
