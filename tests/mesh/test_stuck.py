"""Work that never returns ends its process; work that returns leaves no trace."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

from mesh.stuck import EXIT_STATUS, StuckWatch

STUCK = """
import asyncio, time
from mesh.stuck import StuckWatch

def never_returns():
    time.sleep(60)

async def work():
    with StuckWatch(0.1).over("a step"):
        await asyncio.to_thread(never_returns)

asyncio.run(work())
"""


def test_a_process_whose_work_is_stuck_ends_and_says_where() -> None:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, check=False)
    assert time.monotonic() - began < 30
    assert done.returncode == EXIT_STATUS
    assert "never_returns" in done.stderr


async def test_work_in_time_and_work_that_fails_end_nothing() -> None:
    ended: list[str] = []
    watch = StuckWatch(0.02, ended.append)
    with watch.over("quick"):
        pass
    try:
        with watch.over("failing"):
            raise ValueError
    except ValueError:
        pass
    await asyncio.sleep(0.05)
    assert not ended
    with watch.over("slow"):
        await asyncio.sleep(0.05)
    assert ended == ["slow"]


async def test_the_limit_follows_what_work_takes() -> None:
    ended: list[str] = []
    watch = StuckWatch(90.0, ended.append, floor_s=0.02)
    assert watch.limit_s == 90.0
    with watch.over("first"):
        await asyncio.sleep(0.01)
    assert 0.4 <= watch.limit_s < 90.0
    scripted = StuckWatch(90.0, ended.append, measures=False)
    with scripted.over("first"):
        await asyncio.sleep(0.01)
    assert scripted.limit_s == 90.0
    assert not ended
