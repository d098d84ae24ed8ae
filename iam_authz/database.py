"""SQLite on one thread of its own.

Every access runs there, in order, so no event loop ever waits for a disk. The
file is 0600 in a 0700 directory; write-ahead logging lets a second IAM process
use it at the same time. This module knows transactions, not tables.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from iam_authz.schema import migrate
from mesh.errors import MeshError, Unavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

BUSY_TIMEOUT_S = 5.0


class Database:
    """Open with `await Database.open(path)`; `read` and `write` take functions of a connection."""

    def __init__(self, thread: ThreadPoolExecutor, connection: sqlite3.Connection) -> None:
        self._thread = thread
        self._connection = connection
        self._closed = False

    @classmethod
    async def open(cls, path: Path) -> Database:
        """Opens, or creates, and migrates. Raises SchemaError, or OSError."""
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="iam-db")
        loop = asyncio.get_running_loop()
        try:
            return cls(thread, await loop.run_in_executor(thread, _connect, path))
        except BaseException:
            thread.shutdown(wait=False)
            raise

    async def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """What `query` returns, from one consistent view of the database."""
        return await self._run(query, "BEGIN DEFERRED")

    async def write(self, change: Callable[[sqlite3.Connection], T]) -> T:
        """Runs `change` in one transaction: all of it, or nothing if it raises."""
        return await self._run(change, "BEGIN IMMEDIATE")

    async def close(self) -> None:
        """Waits for what is under way; later calls raise Unavailable."""
        self._closed = True
        await asyncio.get_running_loop().run_in_executor(self._thread, self._connection.close)
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[sqlite3.Connection], T], begin: str) -> T:
        def transaction() -> T:
            try:
                self._connection.execute(begin)
                try:
                    result = work(self._connection)
                    self._connection.execute("COMMIT")
                    return result
                except BaseException:
                    if self._connection.in_transaction:
                        self._connection.execute("ROLLBACK")
                    raise
            except sqlite3.OperationalError as error:
                raise _unavailable(error) from error

        if self._closed:
            raise Unavailable("This IAM is stopping.", retry_after_s=1.0)
        return await asyncio.get_running_loop().run_in_executor(self._thread, transaction)


def _unavailable(error: sqlite3.Error) -> MeshError:
    # Disk full, locked for too long, read-only: the operator must see which.
    log.error("the IAM database cannot be used: %s", error)
    return Unavailable(f"The IAM database cannot be used now: {error}.", retry_after_s=1.0)


def _connect(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # SQLite gives its side files the mode of the main file.
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.fchmod(handle, 0o600)
    os.close(handle)
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        # A revocation that was answered must outlive a power cut.
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        migrate(connection)
    except BaseException:
        connection.close()
        raise
    return connection
