"""One thread for slow work of many owners, who take turns.

Whoever has much to do waits for itself: between two pieces of one owner every other owner that waits has one.
What is cancelled while it waits is not begun. Runs on one event loop; knows nothing of the work.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from mesh.errors import Overloaded

T = TypeVar("T")


class Turns:
    """`waiting_max` pieces wait in all, `owner_max` of one owner; more are refused with `refusal`."""

    def __init__(self, name: str, *, waiting_max: int, owner_max: int, refusal: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._waiting_max = waiting_max
        self._owner_max = owner_max
        self._refusal = refusal
        # The owner whose turn is next comes first; one that has been served goes to the end.
        self._lanes: dict[str, deque[tuple[asyncio.Future[Any], Callable[[], Any]]]] = {}
        self._busy = False

    async def run(self, owner: str, work: Callable[..., T], *args: object) -> T:
        """The result of `work(*args)` in the thread; raises what it raises, or Overloaded."""
        lane = self._lanes.get(owner, ())
        if len(lane) >= self._owner_max or sum(map(len, self._lanes.values())) >= self._waiting_max:
            raise Overloaded(self._refusal, retry_after_s=1.0)
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._lanes.setdefault(owner, deque()).append((result, partial(work, *args)))
        self._next()
        return await result

    def close(self) -> None:
        for lane in self._lanes.values():
            for result, _ in lane:
                result.cancel()
        self._lanes.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> None:
        while self._lanes and not self._busy:
            owner = next(iter(self._lanes))
            lane = self._lanes.pop(owner)
            result, work = lane.popleft()
            if lane:
                self._lanes[owner] = lane
            if result.done():
                continue
            self._busy = True
            running = asyncio.get_running_loop().run_in_executor(self._thread, work)
            running.add_done_callback(partial(self._ended, result))

    def _ended(self, result: asyncio.Future[Any], running: asyncio.Future[Any]) -> None:
        self._busy = False
        self._next()
        if running.cancelled():
            result.cancel()
            return
        error = running.exception()
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(running.result())
