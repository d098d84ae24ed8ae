"""How a request ends: commits settle, pages go back, then the router hears `done`.

Every request passes here exactly once, whatever ended it, so nothing it held can
be forgotten or given back twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from decode.commits import Commits
from decode.frames import Done, Ending
from decode.request import Phase, Request
from decode.scheduler import Scheduler
from mesh.errors import MeshError
from mesh.kv.client import KvClient

log = logging.getLogger(__name__)

# Whoever comes next finds the blocks of these; what a failed step wrote is not offered.
OFFERED = (Ending.FINISHED, Ending.PREEMPTED, Ending.MOVED)


class Closer:
    """`completed` counts the requests whose pages have been given back."""

    def __init__(
        self,
        kv: KvClient,
        commits: Commits,
        scheduler: Scheduler,
        ended: Callable[[Request, Ending], None],
    ) -> None:
        self.completed = 0
        self._kv = kv
        self._commits = commits
        self._scheduler = scheduler
        self._ended = ended
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def busy(self) -> bool:
        return bool(self._tasks)

    def close(self, request: Request, ending: Ending, error: MeshError | None = None) -> None:
        """To be called between steps: from now on the request is in no step."""
        if request.phase is Phase.CLOSING:
            return
        request.phase = Phase.CLOSING
        task = asyncio.create_task(self._close(request, ending, error))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def quiet(self) -> None:
        """Waits until nothing is being closed."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    async def _close(self, request: Request, ending: Ending, error: MeshError | None) -> None:
        try:
            if request.handover is not None:
                await request.handover.stop()
            await self._commits.finish(request, keep=ending in OFFERED and not request.spoilt)
            own, request.own = request.own, set()
            self._kv.give(own)
            await self._kv.release(request.handoff_id)
        except Exception:
            log.exception("request %s was not closed cleanly", request.opening.request_id)
        finally:
            self._scheduler.remove(request)
            self.completed += 1
            request.session.send(Done(request.handoff_id, ending, request.computed_prompt_tokens, error))
            self._ended(request, ending)
