"""Certificates are renewed in time: after a part of their life, again after a failure, whatever timers do."""

from __future__ import annotations

import asyncio

import pytest

from mesh.supervisor import renewal
from mesh.supervisor.renewal import Renewal

LIFE_S = 1000.0
LIVENESS_S = 10.0


class Wall:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewal, "LOOK_S", 0.01)


async def test_everything_is_replaced_in_time_and_again() -> None:
    wall, replaced, done = Wall(), asyncio.Event(), 0

    async def replace() -> None:
        nonlocal done
        done += 1
        wall.now += 20
        replaced.set()

    task = Renewal(LIFE_S, replace, lambda _: None, wall)
    task.start()
    for turn in range(3):
        wall.now += 0.5 * LIFE_S
        await asyncio.sleep(0.05)
        assert done == turn, "too early"
        wall.now += 0.2 * LIFE_S
        await asyncio.wait_for(replaced.wait(), LIVENESS_S)
        replaced.clear()
        assert done == turn + 1
        wall.now -= 0.1 * LIFE_S
    await task.close()


async def test_a_failure_is_told_and_tried_again_before_they_expire() -> None:
    wall, tries = Wall(), 0
    told: list[str] = []
    began = wall.now

    async def replace() -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise RuntimeError("no successor")

    task = Renewal(LIFE_S, replace, told.append, wall)
    task.start()
    async with asyncio.timeout(LIVENESS_S):
        while tries < 3:
            wall.now += 10
            await asyncio.sleep(0.02)
    await task.close()
    assert wall.now - began < LIFE_S
    assert sum("no successor" in line for line in told) == 2
