"""When keys were last used: to the minute, written in batches.

Nothing runs while no key is used: the first use after a write plans the next one.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3

from iam_authz import tables
from iam_authz.database import Database
from mesh.errors import MeshError

log = logging.getLogger(__name__)

COARSE_S = 60
WRITE_AFTER_S = 30.0


class LastUsed:
    """`note` is cheap and may be called for every request."""

    def __init__(self, database: Database, write_after_s: float = WRITE_AFTER_S) -> None:
        self._database = database
        self._write_after_s = write_after_s
        self._known: dict[str, int] = {}
        self._pending: dict[str, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None

    def note(self, key_id: str, stored: int, now: float) -> None:
        """The key was used at `now`; `stored` is what the database last said."""
        minute = int(now) - int(now) % COARSE_S
        if minute <= max(stored, self._known.get(key_id, 0)):
            return
        self._known[key_id] = self._pending[key_id] = minute
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._write_after_s, self._due)

    async def flush(self) -> None:
        """Writes what is noted."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        pending, self._pending = self._pending, {}
        if not pending:
            return

        def write(connection: sqlite3.Connection) -> None:
            tables.put_last_used(connection, pending)

        try:
            await self._database.write(write)
        except MeshError as error:
            # A full disk must not stop requests: this is only a convenience.
            log.warning("last use of %d keys not written: %s", len(pending), error)

    def _due(self) -> None:
        self._timer = None
        self._writing = asyncio.create_task(self.flush())
