"""Metered usage: one record per organisation and request, however often it arrives.

Records that arrive while one transaction is being written share the next one.
"""

from __future__ import annotations

import asyncio
import sqlite3
from dataclasses import astuple

from iam_authz.database import Database
from iam_authz.records import Usage

# Within the message limit even if every text is as long as it may be.
MAX_LISTED = 20_000

_COLUMNS = (
    "request_id, organisation, credential, model_asked, model_served, "
    "prompt_tokens, completion_tokens, cached_tokens, outcome, finished_ms"
)


class UsageLedger:
    """The table of usage."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: list[tuple[Usage, asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None

    async def add(self, record: Usage) -> None:
        """Returns when the record is safe; a repeated one changes nothing. Raises Unavailable."""
        safe: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((record, safe))
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_all())
        await safe

    async def listed(self, organisation: str | None, since: int) -> list[Usage]:
        """Records that ended at or after `since` (Unix seconds), oldest first, at most 20,000.

        To read on, ask again with the time of the last one and skip what is known.
        """
        where = "finished_ms >= ?" + ("" if organisation is None else " AND organisation = ?")
        values: tuple[object, ...] = (since * 1000,) + (() if organisation is None else (organisation,))

        def query(connection: sqlite3.Connection) -> list[Usage]:
            rows = connection.execute(
                f"SELECT {_COLUMNS} FROM usage WHERE {where} ORDER BY finished_ms, request_id LIMIT ?",
                (*values, MAX_LISTED),
            )
            return [Usage(*row) for row in rows]

        return await self._database.read(query)

    async def _write_all(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            error = await self._write([record for record, _ in batch])
            for _, safe in batch:
                if not safe.done():
                    safe.set_result(None) if error is None else safe.set_exception(error)
        self._writer = None

    async def _write(self, records: list[Usage]) -> Exception | None:
        def insert(connection: sqlite3.Connection) -> None:
            connection.executemany(
                f"INSERT OR IGNORE INTO usage ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [astuple(record) for record in records],
            )

        try:
            await self._database.write(insert)
        except Exception as error:
            return error
        return None
