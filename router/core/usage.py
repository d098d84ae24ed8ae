"""Metering: one record per request, kept in an outbox file until NATS has it.

A record is appended to the file before it is published; the file is emptied when
everything in it has been acknowledged. Each process has a file of its own, which it
holds locked, and takes up those of its dead predecessors: at the start, when NATS is
there again, now and then while records come, and every few seconds for as long as a
predecessor lives, because it may end after its successor began. The consumer
drops duplicates by request id. While NATS is away nothing is tried: its return is the
signal. It does not know what a record says.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

log = logging.getLogger(__name__)

RETRY_S = 5.0
LOOK_S = 1.0
LOOK_AGAIN_S = 5.0
CLOSE_S = 2.0
PENDING_MAX = 200_000

Publish = Callable[[bytes, str], Awaitable[bool]]


class UsageOutbox:
    """`publish(record, msg_id)` is true once the record is stored elsewhere.

    `path` without its suffix is what the files of one router's processes begin with.
    """

    def __init__(self, path: Path, publish: Publish) -> None:
        self._family = path
        self._path = path.with_name(f"{path.stem}.{os.getpid()}{path.suffix}")
        self._lock = -1
        self._publish = publish
        self._pending: deque[tuple[str, bytes]] = deque()
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="outbox")
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._written = 0
        self._tried = asyncio.Event()
        self._look_after_s = 0.0
        self._looking: asyncio.Task[None] | None = None
        self._again: asyncio.TimerHandle | None = None
        self._predecessor_lives = False

    @property
    def pending(self) -> int:
        """Records that are not acknowledged yet."""
        return len(self._pending)

    async def start(self) -> None:
        """Takes up what an earlier process left behind."""
        loop = asyncio.get_running_loop()
        self._pending.extend(await loop.run_in_executor(self._disk, self._inherit))
        self._written = len(self._pending)
        self._task = loop.create_task(self._run(), name="usage outbox")
        self._news.set()
        self._look_again()

    def add(self, msg_id: str, record: bytes) -> None:
        """Keeps a record. Never blocks and never fails: a full disk costs the copy, not the request."""
        if len(self._pending) >= PENDING_MAX:
            log.error("usage outbox is full, a record is lost", extra={"request_id": msg_id})
            return
        self._pending.append((msg_id, record))
        self._written += 1
        asyncio.get_running_loop().run_in_executor(self._disk, _append, self._path, msg_id, record)
        self._news.set()
        self._look()

    async def retry(self) -> None:
        """NATS is there (again): publish what waits."""
        self._news.set()
        self._look()

    def _look(self) -> None:
        """For what a predecessor has left since."""
        now = asyncio.get_running_loop().time()
        if self._lock >= 0 and self._looking is None and now >= self._look_after_s:
            self._look_after_s = now + LOOK_S
            self._looking = asyncio.create_task(self._take_left())

    async def _take_left(self) -> None:
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._disk, self._left)
            self._pending.extend(found)
            self._written += len(found)
            if found:
                self._news.set()
        except (OSError, RuntimeError) as error:
            log.warning("usage outboxes cannot be looked at", extra={"reason": str(error)})
        finally:
            self._looking = None
        self._look_again()

    def _look_again(self) -> None:
        """Later, if somebody may still leave something; once he has ended nothing is looked for any more."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        if self._predecessor_lives:
            self._again = asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._look)

    async def close(self) -> None:
        """One more try; what nobody takes, or not within CLOSE_S, stays in the file."""
        if self._pending:
            self._tried.clear()
            self._news.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._tried.wait()
        self._look_after_s = float("inf")
        if self._looking is not None:
            await asyncio.wait({self._looking})
        if self._again is not None:
            self._again.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.get_running_loop().run_in_executor(None, self._disk.shutdown)
        if self._lock >= 0:
            if not self._pending:
                self._path.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1

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
            self._tried.set()
            if not self._pending and self._written:
                self._written = 0
                await asyncio.get_running_loop().run_in_executor(self._disk, self._empty)

    def _inherit(self) -> list[tuple[str, bytes]]:
        """Takes our file, and what the dead left; their records are ours from now on."""
        self._family.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = _locked(self._path)
        if own is None:
            raise OSError(f"{self._path} is used by another process")
        self._lock = own
        return _read(self._path) + self._left()

    def _left(self) -> list[tuple[str, bytes]]:
        """What dead processes of this router left, moved to our file."""
        records: list[tuple[str, bytes]] = []
        self._predecessor_lives = False
        for path in sorted(self._family.parent.glob(f"{self._family.stem}*{self._family.suffix}")):
            if path == self._path or (
                path.stem != self._family.stem and not path.stem[len(self._family.stem) + 1 :].isdigit()
            ):
                continue
            lock = _locked(path)
            if lock is None:
                self._predecessor_lives = True
                continue
            with contextlib.closing(os.fdopen(lock)):
                found = _read(path)
                for msg_id, record in found:
                    _append(self._path, msg_id, record)
                path.unlink()
            records += found
        return records

    def _empty(self) -> None:
        """Runs behind every append that was ordered before; a record that came since stays."""
        if not self._pending:
            _truncate(self._path)


def _locked(path: Path) -> int | None:
    """A lock on the file that lasts as long as the process; None if another has it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


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
