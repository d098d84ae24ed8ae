"""Packs kept in a directory, so that a worker starts in the time that mapping a file takes.

A pack's name says what it was made of: the content of the weights and the revision of all code that decides a
bit of it. Several workers may want one at once: the first makes it, the others wait for it and map it too.
The directory is bounded; what was used least recently goes. Nothing here is needed: where it cannot be used
the pack is made in memory, and a warning says why. Knows nothing of what is in a pack.
"""

import contextlib
import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from engine.cpu.pack import Index, Pack, PackError
from engine.cpu.pack_file import SCRATCH_SUFFIX, PackWriter, open_pack
from engine.cpu.packing import Sink

log = logging.getLogger(__name__)

LIMIT_BYTES = 16 << 30
"""Of all packs together."""
LEAST_FREE_BYTES = 1 << 30
"""Left free on the disk."""
WAIT_S = 600.0
"""For another worker that makes a pack."""
_SUFFIX = ".pack"


class Recipe(Protocol):
    """Makes a pack."""

    @property
    def bytes_at_most(self) -> int: ...

    def make(self, sink: Sink) -> Index: ...


class PackCache:
    """`directory` is made where it is missing."""

    def __init__(self, directory: Path, *, limit_bytes: int = LIMIT_BYTES, wait_s: float = WAIT_S) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._wait_s = wait_s

    def get(
        self, content: bytes, revision: bytes, recipe: Callable[[], Recipe], *, threads: int
    ) -> Pack | None:
        """The pack of these weights (16 bytes each name them and the code), made if there is none.

        None, with a warning, where it cannot be kept here. What the recipe raises is passed on, OSErrors not.
        """
        path = self._directory / f"{content.hex()}-{revision.hex()}{_SUFFIX}"
        key = content + revision
        found = _open(path, key, threads)
        if found is not None:
            return found
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._alone() as alone:
                if not alone:
                    log.warning("another process has made packs in %s for long: going on", self._directory)
                    return None
                found = _open(path, key, threads)
                if found is not None:
                    return found
                wanted = recipe()
                self._make_room(path, wanted.bytes_at_most)
                with PackWriter(path, key) as writer:
                    writer.finish(wanted.make(writer))
                return open_pack(path, key, threads=threads)
        except (OSError, PackError) as error:
            log.warning("packed weights cannot be kept in %s: %s", self._directory, error)
            return None

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Whether this process is the only one that writes here, after some time at most."""
        handle = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        guard, got = threading.Lock(), threading.Event()
        given_up = False

        def wait() -> None:
            # flock knows no timeout; a thread that nobody waits for any more gives the lock back at once.
            fcntl.flock(handle, fcntl.LOCK_EX)
            with guard:
                if given_up:
                    os.close(handle)
                got.set()

        threading.Thread(target=wait, name="pack lock", daemon=True).start()
        got.wait(self._wait_s)
        with guard:
            given_up = not got.is_set()
        try:
            yield not given_up
        finally:
            if not given_up:
                os.close(handle)

    def _make_room(self, path: Path, bytes_at_most: int) -> None:
        """Deletes what a process left behind that died, packs of the same weights by other code, and what was
        used least recently until there is room. Raises OSError where there is none."""
        if bytes_at_most > self._limit_bytes:
            raise OSError(f"{bytes_at_most >> 20} MiB are more than {self._limit_bytes >> 20}")
        for scratch in self._directory.glob(f"*{SCRATCH_SUFFIX}"):
            scratch.unlink(missing_ok=True)
        content = path.name.partition("-")[0]
        packs = sorted(self._directory.glob(f"*{_SUFFIX}"), key=lambda pack: pack.stat().st_mtime)
        stale = [pack for pack in packs if pack.name.startswith(f"{content}-")]
        others = [pack for pack in packs if pack not in stale]
        # Workers that have mapped one keep it until they end.
        for pack in stale:
            pack.unlink(missing_ok=True)
        kept = sum(pack.stat().st_size for pack in others)
        while others and kept + bytes_at_most > self._limit_bytes:
            oldest = others.pop(0)
            kept -= oldest.stat().st_size
            oldest.unlink(missing_ok=True)
        system = os.statvfs(self._directory)
        free = system.f_bavail * system.f_frsize
        if bytes_at_most + LEAST_FREE_BYTES > free:
            raise OSError(f"{bytes_at_most >> 20} MiB are too much: {free >> 20} MiB are free")


def _open(path: Path, key: bytes, threads: int) -> Pack | None:
    """None where there is none, or one that cannot be used: then it is made anew."""
    try:
        pack = open_pack(path, key, threads=threads)
    except FileNotFoundError:
        return None
    except (OSError, PackError) as error:
        log.warning("%s is not used: %s", path, error)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # when it was used last
    return pack
