"""Slow work of many owners: they take turns, and nobody's much is everybody's wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from mesh.errors import Overloaded
from router.core.turns import Turns

pytestmark = pytest.mark.asyncio


class Gate:
    """Work that waits until it is let through, and the order in which it was begun."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._open = threading.Semaphore(0)

    def work(self, name: str) -> str:
        self.begun.append(name)
        assert self._open.acquire(timeout=30)
        return name

    def let(self, count: int) -> None:
        self._open.release(count)


@pytest.fixture
async def turns() -> AsyncIterator[Turns]:
    made = Turns("test", waiting_max=6, owner_max=4, refusal="full")
    yield made
    made.close()


async def test_an_owner_with_little_to_do_does_not_wait_for_one_with_much(turns: Turns) -> None:
    gate = Gate()
    many = [asyncio.create_task(turns.run("a", gate.work, f"a{i}")) for i in range(4)]
    await asyncio.sleep(0)
    one = asyncio.create_task(turns.run("b", gate.work, "b0"))
    await asyncio.sleep(0)
    gate.let(5)
    assert await asyncio.gather(*many, one) == ["a0", "a1", "a2", "a3", "b0"]
    # a0 runs already when b comes; after it a and b take turns.
    assert gate.begun.index("b0") <= 2


async def test_each_owner_and_all_together_are_bounded(turns: Turns) -> None:
    gate = Gate()
    tasks = [asyncio.create_task(turns.run("a", gate.work, "a")) for _ in range(5)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await turns.run("a", gate.work, "one too many of its own")
    tasks += [asyncio.create_task(turns.run(owner, gate.work, owner)) for owner in "bc"]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await turns.run("d", gate.work, "one too many of all")
    gate.let(7)
    await asyncio.gather(*tasks)
    assert len(gate.begun) == 7


async def test_what_is_cancelled_while_it_waits_is_not_begun(turns: Turns) -> None:
    gate = Gate()
    first = asyncio.create_task(turns.run("a", gate.work, "first"))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(turns.run("b", gate.work, "never"))
    last = asyncio.create_task(turns.run("c", gate.work, "last"))
    await asyncio.sleep(0)
    waiting.cancel()
    gate.let(2)
    assert list(await asyncio.gather(first, last)) == ["first", "last"]
    assert gate.begun == ["first", "last"]


async def test_an_error_is_its_own_request_s_alone(turns: Turns) -> None:
    def broken() -> None:
        raise ValueError("no")

    failing, fine = turns.run("a", broken), turns.run("a", lambda: 7)
    results = await asyncio.gather(failing, fine, return_exceptions=True)
    assert isinstance(results[0], ValueError)
    assert results[1] == 7
