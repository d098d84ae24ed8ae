"""Runs foreign code in a thread and ends it when its time is up.

A chat template is a program that came with a model's file, and what it is given comes from a client. It runs
in pure Python, where an exception can be raised from outside; a call into C is let finish first. It does not
know what it runs.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")

# It arrives within microseconds, unless foreign code swallowed it.
ARRIVAL_S = 0.5


class TooSlow(Exception):
    """The work was ended because its time was up."""


class _Interrupt(BaseException):
    """What is raised in the thread; no handler in foreign code catches it."""


class Deadline:
    """One piece of work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._interrupted = False

    def run(self, work: Callable[..., T], *args: Any) -> T:
        """In the thread. Raises TooSlow."""
        try:
            with self._lock:
                self._thread = threading.get_ident()
            try:
                return work(*args)
            finally:
                self._leave(arrived=isinstance(sys.exc_info()[1], _Interrupt))
        except _Interrupt:
            raise TooSlow from None

    def interrupt(self) -> None:
        """From any other thread."""
        with self._lock:
            if self._thread is None or self._interrupted:
                return
            self._interrupted = True
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._thread), ctypes.py_object(_Interrupt)
            )

    def _leave(self, *, arrived: bool) -> None:
        with self._lock:
            self._thread = None
        # An interrupt that is on its way must arrive here, and not in whatever the thread does next.
        patience = time.monotonic() + ARRIVAL_S
        while self._interrupted and not arrived and time.monotonic() < patience:
            pass


async def within(seconds: float, pool: Executor, work: Callable[..., T], *args: Any) -> T:
    """The result of `work(*args)` in a thread of `pool`; raises TooSlow if it computes for longer.

    Time spent waiting for a thread does not count.
    """
    loop = asyncio.get_running_loop()
    deadline = Deadline()
    timers: list[asyncio.TimerHandle] = []

    def begin() -> T:
        loop.call_soon_threadsafe(lambda: timers.append(loop.call_later(seconds, deadline.interrupt)))
        return deadline.run(work, *args)

    try:
        return await loop.run_in_executor(pool, begin)
    finally:
        for timer in timers:
            timer.cancel()
