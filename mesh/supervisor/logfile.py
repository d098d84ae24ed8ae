"""One process's log: a file that is bounded in size by rotation."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

LIMIT_BYTES = 8 * 1024 * 1024
KEPT = 3
_TAIL_LINES = 40


class LogFile:
    """Appends to `path`; at `limit_bytes` it becomes `<path>.1`, and so on up to `kept`."""

    def __init__(self, path: Path, *, limit_bytes: int = LIMIT_BYTES, kept: int = KEPT) -> None:
        self.path = path
        self._limit_bytes, self._kept = limit_bytes, kept
        self._handle = _open(path)
        self._bytes = os.fstat(self._handle).st_size
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._partial = b""

    def write(self, data: bytes) -> None:
        """Appends what a process wrote."""
        if self._handle < 0:
            return
        os.write(self._handle, data)
        self._bytes += len(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._partial = self._partial[-4096:]
        self._tail.extend(line.decode(errors="replace") for line in lines[-_TAIL_LINES:])
        if self._bytes > self._limit_bytes and data.endswith(b"\n"):
            self._rotate()

    def tail(self, lines: int = _TAIL_LINES) -> list[str]:
        """The last lines since this object exists."""
        return list(self._tail)[-lines:]

    def forget_tail(self) -> None:
        """Begins a new tail: what follows is another run of the process."""
        self._tail.clear()

    def close(self) -> None:
        """What is written later is dropped."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def _rotate(self) -> None:
        os.close(self._handle)
        for number in range(self._kept - 1, 0, -1):
            older = self.path.with_name(f"{self.path.name}.{number}")
            if older.exists():
                older.replace(self.path.with_name(f"{self.path.name}.{number + 1}"))
        self.path.replace(self.path.with_name(f"{self.path.name}.1"))
        self._handle = _open(self.path)
        self._bytes = 0


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
