"""Proof of death: each worker holds a lock on `owners/<epoch>` for its life.

The kernel frees the lock with the process, whatever killed it, and across a
restart of the store. Waiting for it blocks, so it happens in a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OwnerNote:
    """What the file of an owner says: who it is and which arena (by name) it uses."""

    worker: str
    arena: str


class OwnerLocks:
    """The folder of owner files. `died` is called on the event loop, once per epoch."""

    def __init__(self, folder: Path, died: Callable[[int], None]) -> None:
        self._folder = folder
        self._died = died
        self._loop = asyncio.get_running_loop()
        self._watched: set[int] = set()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, epoch: int) -> Path:
        """The file whose lock the worker of that epoch holds."""
        return self._folder / str(epoch)

    def create(self, note: OwnerNote) -> int:
        """A new epoch, never used before."""
        while True:
            epoch = secrets.randbits(62) + 1
            try:
                handle = os.open(self.path(epoch), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            except FileExistsError:
                continue
            with os.fdopen(handle, "w") as file:
                json.dump(asdict(note), file)
            return epoch

    def forget(self, epoch: int) -> None:
        """The owner is gone: so is its file."""
        self.path(epoch).unlink(missing_ok=True)

    def living(self) -> Iterator[tuple[int, OwnerNote]]:
        """Owners of an earlier store that may still run; files of the dead are removed."""
        for path in list(self._folder.iterdir()):
            try:
                epoch, note = int(path.name), OwnerNote(**json.loads(path.read_text()))
                dead = not self._is_locked(path)
            except (OSError, ValueError, TypeError) as error:
                log.warning("owner file %s is not usable: %s", path.name, error)
                dead = not self._is_locked(path)
                if not dead:
                    continue
            if dead:
                path.unlink(missing_ok=True)
            else:
                yield epoch, note

    def watch(self, epoch: int) -> None:
        """Calls `died(epoch)` as soon as its lock is free; at once if it is free now."""
        if not self._is_locked(self.path(epoch)):
            self._died(epoch)
            return
        if epoch in self._watched:
            return
        self._watched.add(epoch)
        threading.Thread(target=self._wait, args=(epoch,), name=f"owner-{epoch}", daemon=True).start()

    def _is_locked(self, path: Path) -> bool:
        try:
            handle = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
        return False

    def _wait(self, epoch: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            handle = os.open(self.path(epoch), os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
            finally:
                os.close(handle)
        # The loop of a store that has ended meanwhile wants to know nothing.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._freed, epoch)

    def _freed(self, epoch: int) -> None:
        self._watched.discard(epoch)
        self._died(epoch)
