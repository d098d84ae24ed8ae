"""Ends a process whose work has got stuck, so that a hang becomes a death.

A worker whose engine never returns still answers: its event loop is free, so neither
its health nor its beats tell. It knows itself. The supervisor starts it anew, and the
routers place its requests elsewhere, as after any death. How long is too long is
measured: many times what the slowest piece took. What the work is, is not known here.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

# Before anything was measured: far longer than the slowest step on the slowest machine.
STEP_LIMIT_S = 90.0
# Afterwards: so many times the slowest piece, which is slowly forgotten; never less than the floor,
# because a machine that is busy with other things is not stuck.
SLOWEST_TIMES, FORGET = 40.0, 0.999
FLOOR_S = 8.0
EXIT_STATUS = 70


def end_process(what: str) -> None:
    """Leaves the stacks of all threads in the log and ends without waiting for any of them."""
    log.critical("%s is stuck: this process ends", what)
    faulthandler.dump_traceback(all_threads=True)
    os._exit(EXIT_STATUS)


class StuckWatch:
    """`end(what)` is called on the event loop when one piece of work takes longer than its limit.

    That is `limit_s` at most; less once `measures` has told how long pieces take.
    """

    def __init__(
        self,
        limit_s: float = STEP_LIMIT_S,
        end: Callable[[str], None] = end_process,
        *,
        measures: bool = True,
        floor_s: float = FLOOR_S,
    ) -> None:
        self._limit_s = limit_s
        self._end = end
        self._measures = measures
        self._floor_s = floor_s
        self._slowest_s = 0.0

    @property
    def limit_s(self) -> float:
        """For the next piece."""
        if not self._slowest_s:
            return self._limit_s
        return min(self._limit_s, max(self._floor_s, SLOWEST_TIMES * self._slowest_s))

    @contextlib.contextmanager
    def over(self, what: str) -> Iterator[None]:
        """Around an await of work that happens in a thread."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        timer = loop.call_later(self.limit_s, self._end, what)
        try:
            yield
        finally:
            timer.cancel()
        if self._measures:
            self._slowest_s = max(loop.time() - began, self._slowest_s * FORGET)
