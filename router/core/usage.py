"""Metering: one record per request, kept in an outbox file until NATS has it.

A record is appended to the file before it is published; the file is emptied when
everything in it has been acknowledged, and read again at the start. The consumer
drops duplicates by request id. While NATS is away nothing is tried: its return is the
signal. It does not know what a record says.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

log = logging.getLogger(__name__)

RETRY_S = 5.0
PENDING_MAX = 200_000

Publish = Callable[[bytes, str], Awaitable[bool]]


class UsageOutbox:
    """`publish(record, msg_id)` is true once the record is stored elsewhere."""

    def __init__(self, path: Path, publish: Publish) -> None:
        self._path = path
        self._publish = publish
        self._pending: deque[tuple[str, bytes]] = deque()
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="outbox")
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._written = 0

    @property
    def pending(self) -> int:
        """Records that are not acknowledged yet."""
        return len(self._pending)

    async def start(self) -> None:
        """Takes up what an earlier process left behind."""
        loop = asyncio.get_running_loop()
        self._pending.extend(await loop.run_in_executor(self._disk, _read, self._path))
        self._written = len(self._pending)
        self._task = loop.create_task(self._run(), name="usage outbox")
        self._news.set()

    def add(self, msg_id: str, record: bytes) -> None:
        """Keeps a record. Never blocks and never fails: a full disk costs the copy, not the request."""
        if len(self._pending) >= PENDING_MAX:
            log.error("usage outbox is full, a record is lost", extra={"request_id": msg_id})
            return
        self._pending.append((msg_id, record))
        self._written += 1
        asyncio.get_running_loop().run_in_executor(self._disk, _append, self._path, msg_id, record)
        self._news.set()

    async def retry(self) -> None:
        """NATS is there (again): publish what waits."""
        self._news.set()

    async def close(self) -> None:
        """What is not acknowledged stays in the file."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.get_running_loop().run_in_executor(None, self._disk.shutdown)

    async def _run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while self._pending:
                msg_id, record = self._pending[0]
                if not await self._publish(record, msg_id):
                    # Either NATS is away, and its return wakes us, or its stream is not ready yet.
                    asyncio.get_running_loop().call_later(RETRY_S, self._news.set)
                    break
                self._pending.popleft()
            if not self._pending and self._written:
                self._written = 0
                await asyncio.get_running_loop().run_in_executor(self._disk, self._empty)

    def _empty(self) -> None:
        """Runs behind every append that was ordered before; a record that came since stays."""
        if not self._pending:
            _truncate(self._path)


def _append(path: Path, msg_id: str, record: bytes) -> None:
    line = f"{msg_id} {base64.b64encode(record).decode()}\n".encode()
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(handle, line)
        finally:
            os.close(handle)
    except OSError as error:
        log.error("usage outbox cannot be written", extra={"reason": str(error)})


def _truncate(path: Path) -> None:
    try:
        os.truncate(path, 0)
    except OSError as error:
        log.error("usage outbox cannot be emptied", extra={"reason": str(error)})


def _read(path: Path) -> list[tuple[str, bytes]]:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    records: list[tuple[str, bytes]] = []
    for line in lines:
        msg_id, _, encoded = line.partition(b" ")
        try:
            records.append((msg_id.decode(), base64.b64decode(encoded, validate=True)))
        except ValueError:
            # Half a line of a process that was killed.
            continue
    return records
