"""The kept responses: SQLite on one thread of its own, bounded in bytes and age.

The file is 0600 in a 0700 directory. An organisation that is over its share loses its own
oldest; nobody's responses make room for another's. Ages are looked at when the next one is
due, not by a clock that ticks. It does not know who asks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from mesh.errors import Conflict, NotFound, Overloaded, RequestTooLarge, Unavailable
from response_store.options import ShelfOptions
from response_store.record import Record, State

log = logging.getLogger(__name__)

T = TypeVar("T")

CHAIN_MAX = 1000
# A timer of an event loop must not lie too far ahead.
_SLEEP_MAX_S = 86400.0
_COLUMNS = "id, previous_id, created, state, response, input_items, background"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY,
    organisation TEXT NOT NULL,
    previous_id TEXT NOT NULL,
    created INTEGER NOT NULL,
    expires REAL NOT NULL,
    state INTEGER NOT NULL,
    response BLOB NOT NULL,
    input_items BLOB NOT NULL,
    background INTEGER NOT NULL,
    size INTEGER NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS by_organisation ON responses (organisation, expires);
CREATE INDEX IF NOT EXISTS by_expiry ON responses (expires);
"""


class Shelf:
    """Open with `await Shelf.open(path, options)`. `clock` in unix seconds."""

    def __init__(
        self,
        thread: ThreadPoolExecutor,
        connection: sqlite3.Connection,
        options: ShelfOptions,
        clock: Callable[[], float],
    ) -> None:
        self._thread = thread
        self._connection = connection
        self._options = options
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self.kept = 0
        self.kept_bytes = 0

    @classmethod
    async def open(
        cls, path: Path, options: ShelfOptions, *, clock: Callable[[], float] = time.time
    ) -> Shelf:
        """Opens, or creates. What was running when the last process ended has lost its worker."""
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shelf")
        loop = asyncio.get_running_loop()
        try:
            connection = await loop.run_in_executor(thread, _connect, path)
        except BaseException:
            thread.shutdown(wait=False)
            raise
        shelf = cls(thread, connection, options, clock)
        await shelf._run(_lose_all)
        await shelf._sweep()
        return shelf

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._sweeping is not None:
            await asyncio.gather(self._sweeping, return_exceptions=True)
        await asyncio.get_running_loop().run_in_executor(self._thread, self._connection.close)
        self._thread.shutdown(wait=False)

    async def put(self, organisation: str, record: Record) -> None:
        """Keeps or replaces. Raises Conflict, Overloaded, RequestTooLarge."""
        if record.size > self._options.organisation_bytes:
            raise RequestTooLarge("The response is too large to be kept.", param="store")
        expires = record.created + self._options.ttl_s

        def work(db: sqlite3.Connection) -> None:
            _check_replaceable(db, organisation, record)
            _make_room(db, organisation, record, self._options)
            db.execute(
                f"INSERT OR REPLACE INTO responses (organisation, expires, size, {_COLUMNS})"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (organisation, expires, record.size, *_values(record)),
            )

        await self._run(work)
        self._arm()

    async def get(self, organisation: str, response_id: str) -> Record:
        """Raises NotFound, for what is another organisation's as well."""
        now = self._clock()
        return await self._run(lambda db: _get(db, organisation, response_id, now))

    async def chain(self, organisation: str, response_id: str) -> list[Record]:
        """The response and what came before it, newest first. Raises NotFound if one is gone."""
        now = self._clock()

        def work(db: sqlite3.Connection) -> list[Record]:
            records = [_get(db, organisation, response_id, now)]
            while records[-1].previous_id and len(records) < CHAIN_MAX:
                records.append(_get(db, organisation, records[-1].previous_id, now))
            return records

        return await self._run(work)

    async def delete(self, organisation: str, response_id: str) -> None:
        """Raises NotFound."""
        now = self._clock()

        def work(db: sqlite3.Connection) -> None:
            _get(db, organisation, response_id, now)
            db.execute("DELETE FROM responses WHERE id = ?", (response_id,))

        await self._run(work)
        await self._erase()

    async def end(self, organisation: str, response_id: str, state: State) -> Record:
        """Moves a running response to `state`; another stays as it is. Raises NotFound."""
        now = self._clock()

        def work(db: sqlite3.Connection) -> Record:
            db.execute(
                "UPDATE responses SET state = ? WHERE id = ? AND organisation = ? AND state = ?",
                (int(state), response_id, organisation, int(State.RUNNING)),
            )
            return _get(db, organisation, response_id, now)

        return await self._run(work)

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def transaction() -> T:
            try:
                with self._connection:
                    self._connection.execute("BEGIN IMMEDIATE")
                    result = work(self._connection)
                self.kept, self.kept_bytes = _totals(self._connection)
                return result
            except sqlite3.OperationalError as error:
                log.error("kept responses cannot be used: %s", error)
                raise Unavailable(
                    "Kept responses cannot be reached now. Try again.", retry_after_s=1.0
                ) from None

        return await asyncio.get_running_loop().run_in_executor(self._thread, transaction)

    async def _erase(self) -> None:
        """What was deleted leaves the write-ahead log as well."""

        def work() -> None:
            try:
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            except sqlite3.OperationalError as error:
                log.warning("deleted responses stay in the log for now: %s", error)

        await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _sweep(self) -> None:
        now = self._clock()
        gone = await self._run(
            lambda db: db.execute("DELETE FROM responses WHERE expires <= ?", (now,)).rowcount
        )
        if gone:
            await self._erase()
        self._timer = None
        oldest = await self._run(lambda db: db.execute("SELECT min(expires) FROM responses").fetchone()[0])
        if oldest is not None:
            self._arm(oldest)

    def _arm(self, expires: float | None = None) -> None:
        """Looks again when the next one is due. A new one is never due before an older one."""
        if self._timer is None:
            due_s = (self._clock() + self._options.ttl_s if expires is None else expires) - self._clock()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(min(max(due_s, 0.0) + 0.01, _SLEEP_MAX_S), self._due)

    def _due(self) -> None:
        self._sweeping = asyncio.get_running_loop().create_task(self._sweep())


def _connect(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # SQLite gives its side files the mode of the main file.
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.fchmod(handle, 0o600)
    os.close(handle)
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        # What is deleted is text of tenants: it does not stay in the file.
        connection.execute("PRAGMA secure_delete = ON")
        connection.executescript(_SCHEMA)
    except BaseException:
        connection.close()
        raise
    return connection


def _values(record: Record) -> tuple[object, ...]:
    return (
        record.id,
        record.previous_id,
        record.created,
        int(record.state),
        record.response,
        record.input_items,
        int(record.background),
    )


def _get(db: sqlite3.Connection, organisation: str, response_id: str, now: float) -> Record:
    row = db.execute(
        f"SELECT {_COLUMNS} FROM responses WHERE id = ? AND organisation = ? AND expires > ?",
        (response_id, organisation, now),
    ).fetchone()
    if row is None:
        raise NotFound(f"Response with id '{response_id}' not found.")
    return Record(row[0], row[1], row[2], State(row[3]), row[4], row[5], bool(row[6]))


def _check_replaceable(db: sqlite3.Connection, organisation: str, record: Record) -> None:
    """A response that runs may end. Nothing else is ever replaced, and nothing of another organisation."""
    row = db.execute("SELECT organisation, state FROM responses WHERE id = ?", (record.id,)).fetchone()
    replaces = record.background and record.state is not State.RUNNING
    if row is None:
        if replaces:
            raise Conflict("The response has been deleted.")
    elif not replaces or row[0] != organisation or State(row[1]) is not State.RUNNING:
        raise Conflict("The response has ended already.")


def _make_room(db: sqlite3.Connection, organisation: str, record: Record, options: ShelfOptions) -> None:
    """Drops the organisation's oldest until the record fits into its share."""
    query = "SELECT coalesce(sum(size), 0) FROM responses WHERE id != ?"
    own = db.execute(f"{query} AND organisation = ?", (record.id, organisation)).fetchone()[0]
    dropped = 0
    while own - dropped + record.size > options.organisation_bytes:
        oldest, size = db.execute(
            "SELECT id, size FROM responses WHERE organisation = ? AND id != ? ORDER BY expires LIMIT 1",
            (organisation, record.id),
        ).fetchone()
        db.execute("DELETE FROM responses WHERE id = ?", (oldest,))
        dropped += size
    total = db.execute(query, (record.id,)).fetchone()[0]
    if total + record.size > options.total_bytes:
        raise Overloaded("There is no room for kept responses now. Send 'store': false.", retry_after_s=60.0)


def _lose_all(db: sqlite3.Connection) -> None:
    db.execute("UPDATE responses SET state = ? WHERE state = ?", (int(State.LOST), int(State.RUNNING)))


def _totals(db: sqlite3.Connection) -> tuple[int, int]:
    count, size = db.execute("SELECT count(*), coalesce(sum(size), 0) FROM responses").fetchone()
    return count, size
