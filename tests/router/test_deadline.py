"""Foreign code that does not end is ended, and its thread serves on."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from router.core.deadline import TooSlow, within
from text.chat_template import JinjaChatTemplate


def forever() -> None:
    while True:
        try:
            sum(range(100))
        except Exception:  # noqa: S110
            pass


async def test_what_takes_too_long_is_ended_and_the_thread_goes_on() -> None:
    with ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            begun = time.monotonic()
            with pytest.raises(TooSlow):
                await within(0.05, pool, forever)
            assert time.monotonic() - begun < 10
            assert await within(5.0, pool, lambda: 7) == 7


async def test_quick_work_is_never_interrupted_on_the_edge() -> None:
    with ThreadPoolExecutor(1) as pool:
        results = []
        for _ in range(200):
            try:
                results.append(await within(0.0, pool, lambda: 7))
            except TooSlow:
                results.append(7)
        assert results == [7] * 200
        assert await within(5.0, pool, lambda: 8) == 8


async def test_a_template_that_computes_without_end_is_ended() -> None:
    loops = "".join("{% for _ in messages %}" for _ in range(12)) + "{% endfor %}" * 12
    template = JinjaChatTemplate(loops)
    messages = [{"role": "user", "content": "x"}] * 50
    with ThreadPoolExecutor(1) as pool:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        beside = asyncio.create_task(tick())
        with pytest.raises(TooSlow):
            await within(0.2, pool, template.render, messages)
        beside.cancel()
        assert ticks > 2
