"""What waits is computed together, in turns, and what nobody waits for is not computed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest

from encode.batches import Batches
from encode.bert import Rows
from mesh.errors import InternalError, Overloaded


class Engine:
    """The vector of a sequence is its first id; `open` lets a step end."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.open = threading.Event()
        self.open.set()

    def embed(self, sequences: Sequence[Sequence[int]]) -> Rows:
        self.steps.append([ids[0] for ids in sequences])
        self.open.wait(10)
        if any(ids[0] == 13 for ids in sequences):
            raise ValueError("a bug")
        return np.array([[ids[0]] for ids in sequences], np.float32)


@asynccontextmanager
async def running(engine: Engine, step_tokens: int = 4, waiting_tokens: int = 100) -> AsyncIterator[Batches]:
    batches = Batches(engine.embed, step_tokens=step_tokens, waiting_tokens=waiting_tokens)
    task = asyncio.create_task(batches.run())
    try:
        yield batches
    finally:
        engine.open.set()
        task.cancel()
        batches.close()


async def held(engine: Engine, batches: Batches, first: int) -> asyncio.Task[Rows]:
    """A call that is being computed until the engine is opened."""
    engine.open.clear()
    task = asyncio.create_task(batches.embed([[first]]))
    async with asyncio.timeout(5):
        while not engine.steps:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    return task


async def test_calls_share_steps_and_take_turns() -> None:
    engine = Engine()
    async with running(engine) as batches:
        first = await held(engine, batches, 1)
        long = asyncio.create_task(batches.embed([[20 + i] for i in range(6)]))
        short = asyncio.create_task(batches.embed([[50], [51]]))
        await asyncio.sleep(0)
        engine.open.set()
        vectors = await asyncio.gather(first, long, short)
        assert [v.ravel().tolist() for v in vectors] == [[1], [20, 21, 22, 23, 24, 25], [50, 51]]
    assert engine.steps[0] == [1]
    assert set(engine.steps[1]) == {20, 21, 50, 51}


async def test_what_its_caller_leaves_is_not_computed() -> None:
    engine = Engine()
    async with running(engine) as batches:
        first = await held(engine, batches, 1)
        left = asyncio.create_task(batches.embed([[20], [21]]))
        await asyncio.sleep(0)
        assert batches.waiting_tokens == 2
        left.cancel()
        await asyncio.sleep(0)
        engine.open.set()
        await first
        assert (await batches.embed([[30]])).tolist() == [[30]]
        assert batches.waiting_tokens == 0
        assert batches.calls == 0
    assert engine.steps == [[1], [30]]


async def test_a_step_that_fails_fails_its_calls_and_no_later_one() -> None:
    engine = Engine()
    async with running(engine) as batches:
        with pytest.raises(InternalError):
            await batches.embed([[13]])
        assert (await batches.embed([[5], [6]])).tolist() == [[5], [6]]


async def test_too_much_waiting_is_refused_and_one_long_list_is_not() -> None:
    engine = Engine()
    async with running(engine, waiting_tokens=3) as batches:
        first = await held(engine, batches, 1)
        second = asyncio.create_task(batches.embed([[2] * 9]))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await batches.embed([[3]])
        engine.open.set()
        await asyncio.gather(first, second)
