"""Ends a process whose work has got stuck, so that a hang becomes a death.

A worker whose engine never returns still answers: its event loop is free, so neither
its health nor its beats tell. It knows itself. The supervisor starts it anew, and the
routers place its requests elsewhere, as after any death. What the work is, is not
known here.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

# Far longer than the slowest step on the slowest machine, and than a scripted one.
STEP_LIMIT_S = 90.0
EXIT_STATUS = 70


def end_process(what: str) -> None:
    """Leaves the stacks of all threads in the log and ends without waiting for any of them."""
    log.critical("%s is stuck: this process ends", what)
    faulthandler.dump_traceback(all_threads=True)
    os._exit(EXIT_STATUS)


class StuckWatch:
    """`end(what)` is called on the event loop when one piece of work takes longer than `limit_s`."""

    def __init__(self, limit_s: float = STEP_LIMIT_S, end: Callable[[str], None] = end_process) -> None:
        self._limit_s = limit_s
        self._end = end

    @contextlib.contextmanager
    def over(self, what: str) -> Iterator[None]:
        """Around an await of work that happens in a thread."""
        timer = asyncio.get_running_loop().call_later(self._limit_s, self._end, what)
        try:
            yield
        finally:
            timer.cancel()
